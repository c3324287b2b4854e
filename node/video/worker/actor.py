"""Ray actor of a video job: starts the worker of one lease and waits for its end.

The driver of the node's Ray (`node.video.ray.driver`) creates the actor after the agent has granted the lease. The
actor stores no objects in Ray and no state for a client: the agent reports the progress of the job over the link.

The actor exits as soon as its parent process, which belongs to Ray, has ended. Ray itself takes seconds to notice that,
and the worker's memory would stay leased for as long.
"""

import os
import threading
from pathlib import Path

import ray

from node.video.worker.worker_parent import LeaseFenced, WorkerParent

LINGER_SECONDS = 15.0
"""Seconds after the end of its worker for which the actor can answer `wait`. Then its process exits.

The driver that would end the actor may have ended. Without this limit, the actor would occupy its resources for as long
as Ray runs.
"""
POLL_INTERVAL_SECONDS = 0.1
"""Seconds between two checks of the parent process. No portable call notifies a process of its parent's end."""


class WorkerHost:
    """Ray actor that runs the `WorkerParent` of one lease in a thread, and can therefore answer calls at any time.

    `folder` is the folder of the lease with the id `lease` and this generation. The constructor starts the worker. The
    process exits `LINGER_SECONDS` after the end of the worker.
    """

    def __init__(self, folder: str, lease: str, generation: int) -> None:
        self._parent = WorkerParent(Path(folder), lease, generation)
        self._ended = threading.Event()
        self._why = ""
        threading.Thread(target=_exit_with_parent, args=(os.getppid(),), name="parent", daemon=True).start()
        threading.Thread(target=self._run_worker, name="attendant", daemon=True).start()

    def _run_worker(self) -> None:
        try:
            self._why = f"exit {self._parent.run()}"
        except (LeaseFenced, OSError) as error:
            self._why = str(error)
        finally:
            self._ended.set()
            threading.Event().wait(LINGER_SECONDS)
            os._exit(0)

    def get_node_id(self) -> str:
        """Return the id of the actor's Ray node. Any answer proves that the actor has started."""
        return ray.get_runtime_context().get_node_id()

    def wait(self) -> str:
        """Wait for the end of the worker. Return `exit CODE`, or the error that prevented or interrupted its run."""
        self._ended.wait()
        return self._why

    def stop(self) -> None:
        """Kill the worker's process group at once, from any thread (`WorkerParent.stop`)."""
        self._parent.stop()


def _exit_with_parent(parent: int) -> None:
    """Exit when the parent process has ended. The worker then ends as well, because its stdin closes."""
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(POLL_INTERVAL_SECONDS)
    os._exit(1)

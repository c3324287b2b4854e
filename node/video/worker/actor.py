"""The Ray actor of a video job: shows the lease, attends its worker, dies with it.

It holds nothing: no object of Ray's, no state that anybody asks for. The broker creates it on the node whose agent has
granted the lease; who wants to know how the job goes hears it from that agent, over the link.

It leaves as soon as the process has that started it: Ray takes seconds to notice, and the worker's memory would be lent
for as long.
"""

import os
import threading
from pathlib import Path

import ray

from node.video.worker.worker_parent import Attendant, Fenced

LINGER = 15.0
"""Seconds that it stays after its worker's end for whoever asks how that was. Who else would end it may be gone, and
its share of the node would be taken for as long as Ray runs."""
LOOK = 0.1
"""Seconds between two looks at our parent. No system tells a process of its parent's end in a way that all have."""


class Host:
    """Attends the worker of one lease on a thread of its own, so that it answers and ends at any time."""

    def __init__(self, folder: str, lease: str, generation: int) -> None:
        self._attendant = Attendant(Path(folder), lease, generation)
        self._ended = threading.Event()
        self._why = ""
        threading.Thread(target=_leave_with, args=(os.getppid(),), name="parent", daemon=True).start()
        threading.Thread(target=self._attend, name="attendant", daemon=True).start()

    def _attend(self) -> None:
        try:
            self._why = f"exit {self._attendant.run()}"
        except (Fenced, OSError) as error:
            self._why = str(error)
        finally:
            self._ended.set()
            threading.Event().wait(LINGER)
            os._exit(0)

    def begun(self) -> str:
        """Answer, which says that the actor is up; give the Ray node that it is on."""
        return ray.get_runtime_context().get_node_id()

    def wait(self) -> str:
        """Wait for the worker's end; give how it came."""
        self._ended.wait()
        return self._why

    def stop(self) -> None:
        """End the worker at once."""
        self._attendant.stop()


def _leave_with(parent: int) -> None:
    """Leave when our parent has left, in whatever way; our worker then loses its life line."""
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(LOOK)
    os._exit(1)

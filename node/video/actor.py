"""The Ray actor of a video job: shows the lease, attends its worker, dies with it.

It holds nothing: no object of Ray's, no state that anybody asks for. The broker creates it on the node whose agent has
granted the lease; who wants to know how the job goes hears it from that agent, over the link.
"""

import threading
from pathlib import Path

import ray

from node.video.attendant import Attendant, Fenced


class Host:
    """Attends the worker of one lease on a thread of its own, so that it answers and ends at any time."""

    def __init__(self, folder: str, lease: str, generation: int) -> None:
        self._attendant = Attendant(Path(folder), lease, generation)
        self._ended = threading.Event()
        self._why = ""
        threading.Thread(target=self._attend, name="attendant", daemon=True).start()

    def _attend(self) -> None:
        try:
            self._why = f"exit {self._attendant.run()}"
        except (Fenced, OSError) as error:
            self._why = str(error)
        finally:
            self._ended.set()

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

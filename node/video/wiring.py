"""Assembly of a node's video parts: the offer, the lender and Ray's process."""

from collections.abc import Callable
from pathlib import Path

import structlog

from node.engine_process.supervisor import Supervisor
from node.memory.limits import Limiter
from node.memory.poll import MemoryPoll
from node.settings import NodeSettings
from node.video.capability import VideoCapability
from node.video.lease_manager import LeaseManager
from node.video.ray.local_ray import LocalRay
from wire.frames import Frame
from wire.units import GIB

log = structlog.get_logger("node.video")


class VideoSubsystem:
    """Video parts of a node, started and ended in order. Without a video offer only the periodic check runs."""

    def __init__(
        self, settings: NodeSettings, state: Path, limiter: Limiter, poll: MemoryPoll, supervisor: Supervisor
    ) -> None:
        folder = state / "node" / "video"
        self.offer = VideoCapability(settings, state)
        self.lease_manager = LeaseManager(settings, limiter, poll, supervisor, self.offer, folder / "leases")
        gib = limiter.cap.bytes // GIB
        self.ray = LocalRay(settings.worker, folder / "ray", state / "logs" / "ray.log", gib)
        self._changed: Callable[[], None] = lambda: None
        self._paused = ""

    def connect(self, send: Callable[[Frame], None], changed: Callable[[], None]) -> None:
        """Set the callbacks that send a frame to the coordinator and report a change."""
        self._changed = changed
        self.lease_manager.send, self.lease_manager.changed = send, self._offered
        self.lease_manager.begin, self.lease_manager.finish = self.ray.begin, self.ray.end
        self.ray.changed, self.ray.failed, self.offer.changed = changed, self.lease_manager.not_started, self._offered

    async def start(self) -> None:
        """Recover leases of an earlier agent, and start the search for packages."""
        try:
            await self.lease_manager.start()
        except OSError as error:
            log.error("video disabled", cause=f"its folder cannot be used: {error}")  # noqa: TRY400  a sentence for a person
            return
        self.offer.start()
        self._offered()

    async def stop(self) -> None:
        """End the job, then Ray."""
        await self.offer.stop()
        await self.lease_manager.stop()
        await self.ray.stop()

    def pause(self, why: str) -> None:
        """Refuse new leases because of `why`, and stop Ray once no lease is held. An empty text ends the pause."""
        self._paused = why
        self.lease_manager.pause(why)
        self._offered()

    def _offered(self) -> None:
        self.ray.set_running(on=self.lease_manager.holding)
        self.ray.offer(wanted=not self.offer.unready and (not self._paused or self.lease_manager.holding))
        self._changed()

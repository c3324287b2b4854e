"""Construct and connect the video parts of a node: search for packages, leases of memory, and Ray."""

from collections.abc import Callable
from pathlib import Path

import structlog

from node.engine_process.supervisor import Supervisor
from node.illegal_events import IllegalEvents
from node.memory.limits import Limiter
from node.memory.poll import MemoryPoll
from node.settings import NodeSettings
from node.video.capability import VideoCapability
from node.video.lease_manager import LeaseCallbacks, LeaseManager
from node.video.ray.local_ray import LocalRay
from wire.frames import Frame
from wire.units import GIB

log = structlog.get_logger("node.video")


class VideoSubsystem:
    """Video parts of a node: search for packages, leases of memory, and Ray.

    Ray starts only while this node can make videos, the coordinator allows it, and the node is not paused (or holds a
    lease). `send(frame)` sends a frame to the coordinator. `changed()` is called when the next report may differ.
    `state` is the state folder.
    """

    def __init__(
        self,
        settings: NodeSettings,
        state: Path,
        limiter: Limiter,
        poll: MemoryPoll,
        supervisor: Supervisor,
        *,
        send: Callable[[Frame], None],
        changed: Callable[[], None],
        illegal_events: IllegalEvents,
    ) -> None:
        folder = state / "node" / "video"
        self.offer = VideoCapability(settings, state, self._update_ray)
        callbacks = LeaseCallbacks(
            send=send,
            changed=self._update_ray,
            begin=lambda lease, generation, place, size: self.ray.start_actor(lease, generation, place, size),
            finish=lambda lease: self.ray.end_actor(lease),
        )
        self.lease_manager = LeaseManager(
            settings, limiter, poll, supervisor, self.offer, folder / "leases", callbacks, illegal_events
        )
        gib = limiter.cap.bytes // GIB
        self.ray = LocalRay(
            settings.worker,
            folder / "ray",
            state / "logs" / "ray.log",
            gib,
            changed=changed,
            failed=self.lease_manager.handle_failed_start,
        )
        self._changed = changed
        self._paused = ""

    async def start(self) -> None:
        """Recover leases of an earlier agent, and start the periodic search for video packages.

        Wait at most `lease_manager.RECOVERY_SECONDS` for the end of an earlier worker. If the folder of the leases
        cannot be used, video stays disabled until the next start.
        """
        try:
            await self.lease_manager.start()
            self.offer.start()
        except OSError as error:
            cause = f"the folder of the leases cannot be used: {error}; correct that and restart the node"
            log.error("video disabled", cause=cause)  # noqa: TRY400  a sentence for a person
            self.offer.set_unready(cause)
        self._update_ray()

    async def stop(self) -> None:
        """Stop the search for packages, end the current lease and wait for its end, and stop Ray."""
        await self.offer.stop()
        await self.lease_manager.stop()
        await self.ray.stop()

    def pause(self, why: str) -> None:
        """Refuse new leases for the reason `why`, and stop Ray once no lease is held. An empty text ends the pause."""
        self._paused = why
        self.lease_manager.pause(why)
        self._update_ray()

    def _update_ray(self) -> None:
        self.ray.set_has_lease(on=self.lease_manager.holding)
        self.ray.set_offered(wanted=not self.offer.unready and (not self._paused or self.lease_manager.holding))
        self._changed()

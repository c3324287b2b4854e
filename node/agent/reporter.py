"""Reports of this node to the coordinator: their content, and when they are sent."""

import asyncio
import os
import time

import structlog
from msgspec.structs import replace

from node.agent.disk_meter import DiskMeter
from node.agent.links import CoordinatorLinks
from node.engine_process.supervisor import Supervisor
from node.illegal_events import IllegalEvents
from node.memory.limits import Limiter
from node.memory.poll import MemoryPoll
from node.memory.timer import Timer
from node.models.folders import get_hub_folder
from node.settings import NodeSettings
from node.sharing.controller import SharingController
from node.video.lease_manager import LeaseManager
from node.video.ray.local_ray import LocalRay
from wire.bounds import MAX_MODELS
from wire.codec import MAX_REPORT_BYTES, encode
from wire.frames import Report
from wire.report import Hardware, Memory
from wire.video import VideoState

MIN_REPORT_GAP_SECONDS = 0.2
"""Minimum seconds between a report and the next report of a change. A change of the models is reported at once."""

log = structlog.get_logger("node.agent.agent")


class Reporter:
    """Sender of this node's reports. Call all methods on the loop of the links."""

    def __init__(
        self,
        settings: NodeSettings,
        hardware: Hardware,
        links: CoordinatorLinks,
        *,
        supervisor: Supervisor,
        limiter: Limiter,
        poll: MemoryPoll,
        lease_manager: LeaseManager,
        ray: LocalRay,
        sharing: SharingController,
        illegal_events: IllegalEvents,
    ) -> None:
        self._settings = settings
        self._hardware = hardware
        self._links = links
        self._supervisor = supervisor
        self._limiter = limiter
        self._poll = poll
        self._lease_manager = lease_manager
        self._ray = ray
        self._sharing = sharing
        self._illegal_events = illegal_events
        self._disk = DiskMeter(get_hub_folder(os.environ))
        self._sequence = 0
        self._ping = 0
        self._reported_at = 0.0
        self._last_report_key: tuple[object, ...] = ()
        self._reported_models: tuple[object, ...] = ()
        self._next_report = Timer(self.send)
        self._draining = False
        self._unreported_count = 0

    def send(self) -> None:
        """Send a report now, with fewer models if it is too long (`shorten_report`), and schedule the next.

        Do nothing without a link.
        """
        self._next_report.cancel()
        link = self._links.current
        if link is None:
            return
        loop = asyncio.get_running_loop()
        self._sequence += 1
        self._reported_at = loop.time()
        self._last_report_key = self._compute_report_key()
        self._reported_models = self._compute_models_key()
        snapshot = self._supervisor.reports.latest
        report = Report(
            sequence=self._sequence,
            memory=self._build_memory(),
            engine=self._supervisor.state,
            models=snapshot.models if snapshot else (),
            acked_seq=snapshot.acked_seq if snapshot else 0,
            draining=self._draining or not self._sharing.sharing_state.shared,
            ping=self._ping,
            system=self._poll.build_system_memory(),
            enforcement=self._poll.build_enforcement(),
            video=self._build_video_state(),
            sharing=self._sharing.to_report(),
            illegal_events=self._illegal_events.count,
            disk=self._disk.read(),
        )
        sent = shorten_report(report)
        self._log_unreported_models(len(report.models) - len(sent.models), len(sent.models))
        link.send(sent)
        settings = self._settings.node
        # When idle the coordinator's ping triggers reports; this timer fires only when a ping is late.
        due = settings.report_busy_seconds if self.is_busy() else settings.report_idle_seconds * 1.5
        self._next_report.set(loop.time() + due)

    def send_soon(self) -> None:
        """Schedule a report if a value that concerns the coordinator has changed. Generated tokens cause no report.

        The report is sent at least `MIN_REPORT_GAP_SECONDS` after the last one. A change of the models, such as a load,
        is reported now. The coordinator must know the models before it gets the engine's answer to the command. Do
        nothing without a link.
        """
        if self._links.current is None or self._last_report_key == self._compute_report_key():
            return
        if self._reported_models != self._compute_models_key():
            self.send()
        else:
            now = asyncio.get_running_loop().time()
            self._next_report.move_forward(max(now, self._reported_at + MIN_REPORT_GAP_SECONDS))

    def answer_ping(self, nonce: int) -> None:
        """Store the nonce of a ping, which all later reports repeat.

        Send a report now if the last one is older than half of `report_idle_seconds`.
        """
        self._ping = nonce
        if asyncio.get_running_loop().time() - self._reported_at > self._settings.node.report_idle_seconds / 2:
            self.send()

    def report_draining(self) -> None:
        """Report now, and in all later reports, that this node drains."""
        self._draining = True
        self.send()

    def is_busy(self) -> bool:
        """Return whether a request runs or is queued here, or memory is leased to another process."""
        latest = self._supervisor.reports.latest
        requests = latest.running + latest.waiting if latest is not None else 0
        return requests > 0 or self._limiter.leases > 0

    def _compute_report_key(self) -> tuple[object, ...]:
        """Return the values whose change causes a report."""
        state, snapshot = self._supervisor.state, self._supervisor.reports.latest
        ceiling = snapshot.memory.ceiling if snapshot else 0
        acked = snapshot.acked_seq if snapshot else 0
        video = self._build_video_state()
        offered = (video.ready, video.cause, video.ray, video.ray_cause, video.allowed, len(video.packages))
        leases = self._lease_manager.compute_report_key()
        return (
            state.state,
            state.running,
            state.waiting,
            ceiling,
            self._compute_models_key(),
            acked,
            self._poll.state.level,
            leases,
            offered,
        )

    def _compute_models_key(self) -> tuple[object, ...]:
        snapshot = self._supervisor.reports.latest
        models = snapshot.models if snapshot else ()
        return tuple((model.name, model.loaded, model.loading, bool(model.cause)) for model in models)

    def _build_video_state(self) -> VideoState:
        ray = self._ray
        return replace(self._lease_manager.build_video_state(), ray=ray.node, ray_cause=ray.cause, allowed=ray.allowed)

    def _build_memory(self) -> Memory:
        """Return the memory values of the engine's gate, with the age of its report.

        Until the engine has reported that it applies limits, only the limits are set, and no request fits.
        """
        reports = self._supervisor.reports
        if reports.latest is not None and reports.latest.memory.cap and reports.received_at is not None:
            return replace(reports.latest.memory, age=time.monotonic() - reports.received_at)
        limits = self._limiter.compute_limits(0)
        return Memory(
            cap=limits.cap,
            ceiling=limits.ceiling,
            margin=limits.margin,
            bound_by=limits.bound_by,
            guard=limits.guard,
            leases=limits.leases,
            total=self._hardware.memory,
        )

    def _log_unreported_models(self, count: int, reported: int) -> None:
        """Log the number of models that the report leaves out, if that number has changed since the last report."""
        if count not in (0, self._unreported_count):
            log.warning("models not reported", count=count, reported=reported)
        self._unreported_count = count


def shorten_report(report: Report) -> Report:
    """Return the report, shortened to `MAX_MODELS` models and `MAX_REPORT_BYTES` bytes if it is longer.

    Models that are not loaded are removed first.
    """
    if len(report.models) <= MAX_MODELS and len(encode(report)) <= MAX_REPORT_BYTES:
        return report
    models = sorted(report.models, key=lambda model: not model.loaded)[:MAX_MODELS]
    while models and len(encode(replace(report, models=tuple(models)))) > MAX_REPORT_BYTES:
        del models[len(models) * 3 // 4 :]
    return replace(report, models=tuple(models))

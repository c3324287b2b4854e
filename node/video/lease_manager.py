"""Lease memory to video jobs, one at a time, and answer the coordinator about leases.

`lease_state` has the states of a lease, `lease_rules` decides whether a lease fits, `lease_granter`
grants it and `lease_store` stores it. This module runs the task of a lease. It keeps artifacts until the coordinator
acknowledges the end of their lease. `node.video.ray.local_ray` and `node.video.worker.worker_parent` start the worker.

A restarted agent finds its lease on the disk, ends the remaining processes of the worker, and reports that the job was
lost. Usually the parent of the worker has already ended these processes, because the earlier agent has released its
lock. The ceiling stays lowered until the end of the worker is verified.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
from msgspec.structs import replace

from node.engine_process.supervisor import Supervisor
from node.illegal_events import IllegalEvents
from node.memory.limits import LeaseHolder, Limiter
from node.memory.poll import MemoryPoll
from node.settings import NodeSettings
from node.video import lease_rules, lease_state
from node.video.capability import VideoCapability
from node.video.lease_granter import LeaseGranter
from node.video.lease_rules import LeasePhase, LeaseRecord, WorkerGroup
from node.video.lease_state import BeginGrant, CheckLease, LeaseLife, RefuseLease
from node.video.lease_store import LeaseStore, hash_artifacts
from node.video.worker.lease_files import read_claim
from node.video.worker.watchdog_policy import EndWorker
from node.video.worker.worker_monitor import POLL_INTERVAL_SECONDS, WorkerMonitor, kill_worker_group
from wire.frames import Frame, LeaseEnded, LeaseGranted, LeaseRefused, LeaseRelease, LeaseRequest
from wire.state_machine import IllegalEventError
from wire.units import show_size
from wire.video import Artifact, LeaseEndCode, LeaseState, ReleaseCause, VideoState

RECOVERY_SECONDS = 5.0
"""Maximum seconds for which the start of the node waits for the end of a worker of an earlier agent. The wait has a
limit because a process that hangs in the driver of the GPU survives SIGKILL."""

log = structlog.get_logger("node.video.lease_manager")


@dataclass(frozen=True, slots=True)
class LeaseCallbacks:
    """Functions that the lease manager calls."""

    send: Callable[[Frame], None]
    """Sends a frame to the coordinator. Without a link the frame is discarded."""
    changed: Callable[[], None]
    """Called when the node's next report may differ from its last one."""
    begin: Callable[[str, int, str, int], None]
    """Starts the Ray actor of a granted lease. Arguments: id, generation, folder, and size in bytes of the lease."""
    finish: Callable[[str], None]
    """Ends the Ray actor of the lease with this id."""


class LeaseManager:
    """Manager of the leases of video jobs on this node: grants, watches and ends one lease at a time.

    Call every method on the event loop that called `start`. `folder` contains the stored leases and a folder for each.
    """

    def __init__(
        self,
        settings: NodeSettings,
        limiter: Limiter,
        poll: MemoryPoll,
        supervisor: Supervisor,
        offer: VideoCapability,
        folder: Path,
        callbacks: LeaseCallbacks,
        illegal_events: IllegalEvents,
    ) -> None:
        self._limiter = limiter
        self._offer = offer
        self._callbacks = callbacks
        self._illegal_events = illegal_events
        self._store = LeaseStore(folder)
        self._granter = LeaseGranter(settings, limiter, poll, supervisor, offer, self._store)
        self._life = LeaseLife()
        self._monitor: WorkerMonitor | None = None
        self._task: asyncio.Task[None] | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._check_due = asyncio.Event()
        self._last_report_key: tuple[object, ...] = ()

    # state

    @property
    def holding(self) -> bool:
        """Whether the ceiling is lowered for a video job, also by an earlier agent: until its memory is returned."""
        return self._granter.holding

    def list_states(self) -> tuple[LeaseState, ...]:
        """Return the states of all stored leases for the report: being granted, held, or ended and not acknowledged."""
        return tuple(self._build_state(record) for record in self._store.ledger.leases)

    def _build_state(self, record: LeaseRecord) -> LeaseState:
        monitor = self._monitor
        if record.ended is not None or monitor is None or monitor.record.lease != record.lease:
            return lease_rules.build_lease_state(record, LeasePhase.GRANTING if monitor is None else LeasePhase.ENDING)
        job = monitor.job
        phase = LeasePhase.ENDING if self._life.order else job.phase
        state = lease_rules.build_lease_state(record, phase, job.step, job.steps, monitor.footprint, monitor.peak)
        return state if self.holding else replace(state, size=0, phase=LeasePhase.ENDING)

    def compute_report_key(self) -> tuple[object, ...]:
        """Return id, phase, progress and size of each lease. The caller sends a report when the result changes."""
        return tuple((state.lease, state.phase, state.progress, state.size) for state in self.list_states())

    def build_video_state(self) -> VideoState:
        """Return the video part of the report. The caller sets the fields `ray`, `ray_cause` and `allowed`."""
        offer = self._offer
        packages = tuple(package.described for package in offer.packages.values()) if offer.enabled else ()
        return VideoState(not offer.unready, offer.unready, "", packages, self.list_states())

    def find_artifact(self, name: str) -> Path | None:
        """Return the path of the artifact `artifact:LEASE/NAME`, unchecked; None if no ended lease has reported it."""
        return self._store.find_artifact(name)

    # orders

    def handle_request(self, request: LeaseRequest) -> None:
        """Grant or refuse a lease. Send the answer to the coordinator, at once or within seconds.

        For a repeated request, send the grant of a granted lease or the end of an ended lease again. A request that was
        refused is checked again. A request that is repeated while the lease is being granted is refused. Once the lease
        is stored, such a repetition gets no answer but the grant.
        """
        record = self._store.ledger.find(request.lease, request.generation)
        if record is None:
            self._apply(lease_state.LeaseWanted(request, self._store.ledger.holding))
        elif record.ended is not None:
            self._callbacks.send(record.ended)
        elif self._monitor is not None:
            self._callbacks.send(LeaseGranted(record.lease, record.generation, str(self._monitor.folder)))

    def release(self, order: LeaseRelease) -> None:
        """End a lease, or delete a lease whose end the coordinator acknowledges.

        If the lease has ended already, send its end again. For an unknown lease, send the end `worker_lost`, unless the
        order is an acknowledgement.
        """
        record = self._store.ledger.find(order.lease, order.generation)
        if record is not None and record.ended is not None:
            if order.cause == ReleaseCause.ACKNOWLEDGED:
                self._store.delete(record)
            else:
                self._callbacks.send(record.ended)
        elif self._life.is_current(order.lease, order.generation):
            self._apply(lease_state.ReleaseOrdered(order.cause or "released"))
        elif (
            order.cause != ReleaseCause.ACKNOWLEDGED
        ):  # the answer to an acknowledgement would be acknowledged in an endless loop
            text = "this node has no such lease"
            self._callbacks.send(LeaseEnded(order.lease, order.generation, LeaseEndCode.WORKER_LOST, text))

    def pause(self, why: str) -> None:
        """Refuse new leases, also a lease that is being granted, for the reason `why`; empty to end the pause."""
        self._apply(lease_state.PauseChanged(why))

    def end(self, why: str) -> None:
        """End the current lease and refuse new leases, for the reason `why`.

        Do nothing if the ceiling is not lowered for a lease, or if the end of the lease is ordered already.
        """
        self._apply(lease_state.OwnerReclaimed(why, self.holding))

    def resend_ends(self) -> None:
        """Send the ends of leases that the coordinator has not acknowledged again. Call this for each new link."""
        for record in self._store.ended:
            if record.ended is not None:
                self._callbacks.send(record.ended)

    def handle_failed_start(self, lease: str, why: str) -> None:
        """End the lease `lease`, because Ray could not start its actor; `why` is the reason.

        Do nothing if this lease is not held, or if its worker runs already.
        """
        self._apply(lease_state.ActorFailed(lease, why))

    def on_engine_change(self) -> None:
        """Handle a new report of the engine: continue a grant that waits for it."""
        self._granter.on_engine_change()

    def _apply(self, event: lease_state.Event) -> None:
        """Apply an event and perform its actions. An illegal event is logged and changes nothing."""
        try:
            self._life, actions = lease_state.step(self._life, event)
        except IllegalEventError as error:
            self._illegal_events.record("lease", error)
            return
        for action in actions:
            match action:
                case BeginGrant():
                    self._task = asyncio.get_running_loop().create_task(self._run(action.request))
                case RefuseLease():
                    self._callbacks.send(action.refused)
                case CheckLease():
                    self._check_due.set()

    # lifecycle of a lease

    async def start(self) -> None:
        """Read the stored leases, and end the worker that an earlier agent left behind.

        If a lease has not ended, end its worker, restore the ceiling, and report its job as lost. Wait for this at most
        `RECOVERY_SECONDS`; then continue in the background. Until the worker ends, the ceiling stays lowered.

        Raise `OSError` if the folder of the leases cannot be used.
        """
        self._store.load()
        record = self._store.ledger.holding
        if record is None:
            return
        self._limiter.begin_lease(record.size, LeaseHolder.VIDEO)
        self._recovery = asyncio.create_task(self._recover(record))
        try:
            await asyncio.wait_for(asyncio.shield(self._recovery), RECOVERY_SECONDS)
        except TimeoutError:
            log.warning("worker of an earlier lease does not end", lease=record.lease, size=show_size(record.size))
            self._recovery.add_done_callback(_log_failure)

    async def _recover(self, record: LeaseRecord) -> None:
        await _end_left_worker(record, self._store.get_folder(record))
        self._granter.return_memory()
        self._store.clean(record)
        log.warning("lease recovered", lease=record.lease, job=record.job, size=show_size(record.size))
        self._report_end(record, EndWorker(LeaseEndCode.WORKER_LOST, "the node was restarted while the job ran"), None)
        self._callbacks.changed()

    async def stop(self) -> None:
        """End the current lease with its worker, wait until both have ended, and refuse all further leases.
        Workers of an earlier agent are not awaited."""
        if self._recovery is not None:
            self._recovery.cancel()
        self._apply(lease_state.NodeStopping())
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, request: LeaseRequest) -> None:
        """Grant, watch and end one lease, or send its refusal.

        After an exception, restore the ceiling, remove a lease that has not ended from the ledger, and raise again.
        """
        try:
            granted = await self._granter.grant(request, lambda: self._refuse_paused(request))
            if isinstance(granted, LeaseRefused):
                log.info(
                    "lease refused", lease=request.lease, job=request.job, code=granted.code, message=granted.message
                )
                self._apply(lease_state.GrantRefused())
                self._callbacks.send(granted)
                return
            self._apply(lease_state.GrantCompleted())
            await self._serve(granted)
        except Exception:
            log.exception("lease")
            self._granter.restore()
            raise
        finally:
            self._apply(lease_state.LeaseAbandoned())
            self._task = None
            self._callbacks.changed()

    def _refuse_paused(self, request: LeaseRequest) -> LeaseRefused | None:
        return lease_state.refuse_paused(request, self._life.paused) if self._life.paused else None

    async def _serve(self, monitor: WorkerMonitor) -> None:
        """Send that a lease is granted, watch its worker, and end it on every path."""
        self._monitor = monitor
        record = monitor.record
        log.info(
            "lease granted",
            lease=record.lease,
            generation=record.generation,
            job=record.job,
            size=show_size(record.size),
        )
        self._callbacks.send(LeaseGranted(record.lease, record.generation, str(monitor.folder)))
        self._callbacks.begin(record.lease, record.generation, str(monitor.folder), record.size)
        self._callbacks.changed()
        end = EndWorker(LeaseEndCode.MONITOR_FAILED, "the worker monitor failed", at_once=True)
        try:
            end = await self._watch(monitor)
        finally:
            self._apply(lease_state.EndBegun())
            try:
                await self._end(monitor, end)
            finally:
                self._monitor = None
            self._apply(lease_state.MemoryReturned())

    async def _watch(self, monitor: WorkerMonitor) -> EndWorker:
        """Watch the worker until there is a reason to end it."""
        while True:
            end = self._life.end or monitor.check()
            self._report_progress(monitor)
            if end is not None:
                return end
            self._check_due.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_SECONDS):
                    await self._check_due.wait()

    def _report_progress(self, monitor: WorkerMonitor) -> None:
        """Store a worker that has started, and report a changed state."""
        if monitor.worker is not None and not self._life.has_worker:
            self._apply(lease_state.WorkerStarted())
            self._limiter.set_worker(monitor.worker.pid)
            self._store.put(monitor.record_worker())
        report_key = self.compute_report_key()
        if report_key != self._last_report_key:
            self._last_report_key = report_key
            self._callbacks.changed()

    async def _end(self, monitor: WorkerMonitor, end: EndWorker) -> None:
        """Return the memory once the worker is dead, then report the result."""
        began = time.monotonic()
        await monitor.kill(end)
        self._granter.return_memory()
        self._callbacks.finish(monitor.record.lease)
        log.info(
            "lease ended",
            lease=monitor.record.lease,
            code=end.code,
            message=end.message,
            peak=show_size(monitor.peak),
            seconds=round(time.monotonic() - began, 3),
        )
        self._callbacks.changed()
        await asyncio.to_thread(monitor.close)
        artifacts: tuple[Artifact, ...] = ()
        if end.code == LeaseEndCode.COMPLETED:
            names, why = (monitor.job.clip or {}).get("files"), "the worker reported success without a clip"
            try:
                artifacts = await asyncio.to_thread(hash_artifacts, monitor.folder, names)
            except OSError as error:
                why = f"the clip cannot be read: {error}"
            end = end if artifacts else EndWorker(LeaseEndCode.OUTPUT_INVALID, why)
        if end.code in (LeaseEndCode.WORKER_LOST, LeaseEndCode.WORKER_CRASHED) and await asyncio.to_thread(
            self._store.is_full
        ):
            end = EndWorker(LeaseEndCode.DISK_FULL, f"the disk of this node is full: {end.message}")
        self._report_end(monitor.record, end, monitor, artifacts)

    def _report_end(
        self, record: LeaseRecord, end: EndWorker, monitor: WorkerMonitor | None, artifacts: tuple[Artifact, ...] = ()
    ) -> None:
        """Store the end of a lease, and send it to the coordinator."""
        ended = _build_ended(record, end, monitor, artifacts)
        self._store.end(replace(record, ended=ended))
        self._callbacks.send(ended)


def _build_ended(
    record: LeaseRecord, end: EndWorker, monitor: WorkerMonitor | None, artifacts: tuple[Artifact, ...]
) -> LeaseEnded:
    peak, seconds = (monitor.peak, monitor.seconds) if monitor is not None else (0, 0.0)
    return LeaseEnded(
        lease=record.lease,
        generation=record.generation,
        code=end.code,
        message=end.message,
        artifacts=artifacts,
        peak=peak,
        seconds=round(seconds, 3),
        made=msgspec.json.encode(monitor.job.clip) if monitor is not None and artifacts else b"",
    )


async def _end_left_worker(record: LeaseRecord, folder: Path) -> None:
    """Kill the worker of a lease of an earlier agent, if it has one, and wait until its processes have ended. `folder`
    is the folder of the lease."""
    claim = read_claim(folder)
    worker = record.worker or (WorkerGroup(pid=claim.worker, born=claim.born) if claim is not None else None)
    if worker is not None:
        await kill_worker_group(worker, 0.0)


def _log_failure(recovery: asyncio.Task[None]) -> None:
    if not recovery.cancelled() and (error := recovery.exception()) is not None:
        log.error("lease not recovered", error=str(error))

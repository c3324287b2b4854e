"""Grant leases in two phases: check the request, then lower the ceiling and wait for the engine's confirmation."""

import os
import time
from collections.abc import Callable

import structlog

from node.engine.memory.wired_limit import WireMode
from node.engine_process.supervisor import Supervisor
from node.memory.lessor import LeaseFailure, LeaseObstacle, MemoryLessor
from node.memory.limits import LeaseHolder, Limiter
from node.memory.poll import MemoryPoll
from node.settings import NodeSettings
from node.video import lease_rules
from node.video.capability import VideoCapability
from node.video.lease_rules import LeaseRecord
from node.video.lease_store import LeaseStore
from node.video.worker.job_spec import JobSpec, parse_spec
from node.video.worker.lease_files import OUT, SCRATCH, LeaseGrant
from node.video.worker.watchdog_policy import WorkerBounds
from node.video.worker.worker_monitor import WorkerMonitor, build_worker_environment
from wire.frames import LeaseRefused, LeaseRequest
from wire.refusals import RefusalCode
from wire.units import show_size
from wire.video import LeaseRefusalCode

log = structlog.get_logger("node.video.lease_manager")


class LeaseGranter:
    """Handler of the coordinator's lease requests: checks a request, makes room for the lease, and lowers the ceiling.

    Call every method on the event loop of the memory poll.
    """

    def __init__(
        self,
        settings: NodeSettings,
        limiter: Limiter,
        poll: MemoryPoll,
        supervisor: Supervisor,
        offer: VideoCapability,
        store: LeaseStore,
    ) -> None:
        self._settings = settings
        self._poll = poll
        self._supervisor = supervisor
        self._lessor = MemoryLessor(limiter, poll, supervisor, LeaseHolder.VIDEO)
        self._offer = offer
        self._store = store

    @property
    def holding(self) -> bool:
        """Whether the ceiling is lowered for a video job: from the grant of a lease until its memory is returned."""
        return self._lessor.holding

    def on_engine_change(self) -> None:
        """Handle a new report of the engine: continue a grant that waits for it."""
        self._lessor.on_engine_change()

    def return_memory(self) -> None:
        """Restore the ceiling after the end of a lease."""
        self._lessor.return_memory()

    def restore(self) -> None:
        """Restore the ceiling, and remove the lease that has not ended, if any, from the stored leases.

        The files of the lease are not deleted.
        """
        self.return_memory()
        record = self._store.ledger.holding
        if record is not None:
            self._store.drop(record)

    async def grant(
        self, request: LeaseRequest, refuse_now: Callable[[], LeaseRefused | None]
    ) -> LeaseRefused | WorkerMonitor:
        """Grant or refuse a lease. Return the monitor of its worker, with the ceiling lowered, or the refusal.

        A granted lease is stored. After a refusal, the ceiling is restored and the lease is not stored. If the lease
        was stored before the refusal, its generation stays the newest of its job, and a repeated request is superseded.

        `refuse_now()` returns a refusal for reasons that arose while the ceiling was lowered; None without one. An
        unexpected error is logged and refuses the lease. If this call is cancelled, the caller must call `restore`.
        """
        try:
            return await self._grant(request, refuse_now)
        except Exception as error:
            log.exception("lease", lease=request.lease, job=request.job)
            self.restore()
            text = f"the node could not grant the lease ({type(error).__name__}): see its log"
            return lease_rules.refuse(request, LeaseRefusalCode.VIDEO_NOT_READY, text, lease_rules.READY_RETRY_SECONDS)

    async def _grant(
        self, request: LeaseRequest, refuse_now: Callable[[], LeaseRefused | None]
    ) -> LeaseRefused | WorkerMonitor:
        spec = self._read_spec(request)
        if isinstance(spec, LeaseRefused):
            return spec
        refused = await self._judge_with_room(request)
        if refused is not None:
            return refused
        record = LeaseRecord(
            lease=request.lease, generation=request.generation, job=request.job, model=request.model, size=request.size
        )
        refused = lease_rules.refuse(
            request,
            LeaseRefusalCode.DISK_FULL,
            "the lease cannot be stored on this node",
            lease_rules.READY_RETRY_SECONDS,
        )
        if self._store.put(record):
            refused = await self._lower_ceiling(request) or refuse_now() or self._check_package(request)
        if refused is None:
            try:
                return self._open(record, spec)
            except OSError as error:
                text = f"the folder of the job cannot be created: {error}"
                refused = lease_rules.refuse(request, LeaseRefusalCode.DISK_FULL, text, lease_rules.READY_RETRY_SECONDS)
        self.restore()
        return refused

    def _read_spec(self, request: LeaseRequest) -> LeaseRefused | JobSpec:
        """Check the request, but not whether the lease fits now. Return the parsed job, or a refusal."""
        refused = (
            lease_rules.check_name(request)
            or lease_rules.check_generation(request, self._store.ledger)
            or self._check_holder(request)
            or lease_rules.check_ready(request, self._poll.read_memory(), self._offer.unready)
        )
        refused = refused or self._check_package(request)
        if refused is not None:
            return refused
        spec = parse_spec(request.spec)
        return lease_rules.refuse(request, RefusalCode.INVALID, spec) if isinstance(spec, str) else spec

    def _check_package(self, request: LeaseRequest) -> LeaseRefused | None:
        package = self._offer.packages.get(request.model)
        if package is not None and not package.described.cause:
            return None
        cause = package.described.cause if package is not None else "this node has no such package"
        text = f"{request.model} cannot be used on this node: {cause}"
        return lease_rules.refuse(request, LeaseRefusalCode.VIDEO_NOT_READY, text)

    def _check_holder(self, request: LeaseRequest) -> LeaseRefused | None:
        other = self._lessor.find_other_holder()
        code = LeaseRefusalCode.LEASE_HELD
        return lease_rules.refuse(request, code, other, lease_rules.HELD_RETRY_SECONDS) if other else None

    async def _judge_with_room(self, request: LeaseRequest) -> LeaseRefused | None:
        """Return a refusal; None if the lease fits.

        Before a refusal for lack of memory, ask the engine once to free it.
        """
        refused = self._judge(request)
        if refused is None or refused.headroom is None:
            return refused
        await self._lessor.make_room(request.size)
        return self._judge(request)

    def _judge(self, request: LeaseRequest) -> LeaseRefused | None:
        report = self._supervisor.reports.latest
        pinned = frozenset(self._settings.models.preload)
        return lease_rules.check_fits(
            request, self._poll.read_memory(), report.models if report is not None else (), pinned
        )

    async def _lower_ceiling(self, request: LeaseRequest) -> LeaseRefused | None:
        """Lower the ceiling and wait until the engine holds the new limits. Return a refusal, or None."""
        began = time.monotonic()
        failure = await self._lessor.lower_ceiling(request.size)
        if failure is None:
            log.info(
                "ceiling lowered",
                lease=request.lease,
                size=show_size(request.size),
                seconds=round(time.monotonic() - began, 3),
            )
            return None
        match failure.obstacle:
            case LeaseObstacle.HELD:
                code, retry = LeaseRefusalCode.LEASE_HELD, lease_rules.HELD_RETRY_SECONDS
                return lease_rules.refuse(request, code, failure.message, retry)
            case LeaseObstacle.ENGINE_SILENT:
                code, retry = LeaseRefusalCode.ENGINE_SILENT, lease_rules.HEADROOM_RETRY_SECONDS
                return lease_rules.refuse(request, code, failure.message, retry)
            case LeaseObstacle.NEW_REQUESTS:
                return _refuse_for_new_requests(request, failure)

    def _open(self, record: LeaseRecord, spec: JobSpec) -> WorkerMonitor:
        """Create the folder of the lease, and return the monitor of its worker. Raise `OSError` if that fails."""
        settings, package = self._settings.worker, self._offer.packages[record.model]
        bounds = WorkerBounds(
            record.size, spec.stall or settings.stall_timeout_seconds, spec.timeout or settings.job_timeout_seconds
        )
        folder = self._store.get_folder(record)
        monitor = WorkerMonitor(
            record, folder, bounds, settings.start_timeout_seconds, settings.terminate_grace_seconds
        )
        job = {
            **spec.to_worker_input(package.described),
            "package": str(package.folder),
            "out": str(folder / OUT),
            "wire": self._settings.memory.wire != WireMode.OFF,
        }
        monitor.open(
            LeaseGrant(
                lease=record.lease,
                generation=record.generation,
                size=record.size,
                python=str(self._offer.python),
                environment=build_worker_environment(os.environ, folder / SCRATCH),
                job=job,
            )
        )
        return monitor


def _refuse_for_new_requests(request: LeaseRequest, failure: LeaseFailure) -> LeaseRefused:
    """Return the refusal of a lease that requests prevented. The headroom is as before the ceiling was lowered."""
    assert failure.refused is not None  # noqa: S101  it has the numbers
    numbers = failure.refused.numbers
    headroom = numbers.headroom if numbers is not None else None
    return LeaseRefused(
        lease=request.lease,
        generation=request.generation,
        code=failure.refused.code.value,
        message=failure.message,
        need=request.size,
        headroom=None if headroom is None else headroom + request.size,
        retry_after=lease_rules.HEADROOM_RETRY_SECONDS,
        waiting_for="the end of the new requests",
    )

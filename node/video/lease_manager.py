"""Manager of leases: leases memory to video jobs, one at a time. `node.video.leases` decides, this module acts.

Covers: the grant in two phases, the lease's lifecycle on the disk, the watch of its worker, and its end on every path.
It also keeps the artifacts until the coordinator has them. Does not cover: the start of a worker
(`node.video.ray.local_ray`, `node.video.worker.worker_parent`), the job (`node.video.worker.job_spec`) and the packages
(`node.video.capability`).

A restarted agent finds its lease on the disk. It ends the remaining processes of the worker, and reports that the job
was lost. The worker's parent has usually ended them before, because the agent's lock is gone. The ceiling stays lowered
until the end of the worker is verified.
"""

import asyncio
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog
from msgspec.structs import replace

from host.private_files import private_folder, write_private
from node.engine.memory.wired_limit import WireMode
from node.engine_process.supervisor import Supervisor
from node.memory.limits import Limiter
from node.memory.poll import MemoryPoll
from node.settings import NodeSettings
from node.video import leases
from node.video.capability import VideoCapability
from node.video.leases import LeaseLedger, LeasePhase, LeaseRecord, WorkerGroup
from node.video.worker import watchdog_policy
from node.video.worker.job_spec import JobSpec, read_spec
from node.video.worker.lease_files import GRANT, OUT, SCRATCH, LeaseGrant, read_claim
from node.video.worker.watchdog_policy import EndWorker, WorkerBounds
from node.video.worker.worker_monitor import COMPLETED, POLL_INTERVAL_SECONDS, WorkerMonitor, kill, worker_environment
from wire.capacity.arithmetic import judge
from wire.frames import Frame, LeaseEnded, LeaseGranted, LeaseRefused, LeaseRelease, LeaseRequest
from wire.refusals import Refused
from wire.units import show_size
from wire.video import Artifact, LeaseState, VideoState

CONFIRM_TIMEOUT_SECONDS = 5.0
"""Timeout in seconds of the engine's confirmation that it holds lower limits, or that it made room."""
ACKNOWLEDGED = "acknowledged"
NO_DISK = "disk_full"
STOPPING = "node_stopping"
SILENT = "engine_silent"
PAUSED = "node_paused"
RETRY_SOON_SECONDS = 2.0
MIN_FREE_DISK_BYTES = 64 * 1024
"""Minimum free bytes of a disk. With less, the end of a worker is attributed to the full disk."""
MAX_ENDED_LEASES = 32
"""Maximum number of ended leases without acknowledgement. Above that, the oldest are removed with their files."""
PREFIX = "artifact:"

log = structlog.get_logger("node.video.lease_manager")


class LeaseManager:
    """Leases of video jobs on this node: grant, watch and end one lease at a time.

    Call every method on the event loop that called `start`.
    """

    def __init__(
        self,
        settings: NodeSettings,
        limiter: Limiter,
        poll: MemoryPoll,
        supervisor: Supervisor,
        offer: VideoCapability,
        folder: Path,
    ) -> None:
        self._settings = settings
        self._limiter = limiter
        self._poll = poll
        self._supervisor = supervisor
        self._offer = offer
        self._folder = folder
        self._ledger = LeaseLedger()
        self._watch: WorkerMonitor | None = None
        self._requested: tuple[str, int] | None = None
        self._order = ""
        self._unstarted = ""
        self._stopping = False
        self._paused = ""
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._last_report_key: tuple[object, ...] = ()
        self.send: Callable[[Frame], None] = lambda frame: None
        """Sends a frame to the coordinator. Without a link the frame is discarded."""
        self.changed: Callable[[], None] = lambda: None
        """Called when the next report would differ."""
        self.begin: Callable[[str, int, str, int], None] = lambda lease, generation, folder, size: None
        """Starts the Ray actor of a granted lease (lease, generation, its folder, its size in bytes)."""
        self.finish: Callable[[str], None] = lambda lease: None
        """Ends the Ray actor of a lease."""

    # state

    @property
    def holding(self) -> bool:
        """Whether memory is leased now."""
        return self._limiter.leases > 0

    def states(self) -> tuple[LeaseState, ...]:
        """Return rows of the report for all leases: the held one, and ended ones without acknowledgement."""
        return tuple(self._state(record) for record in self._ledger.leases)

    def _state(self, record: LeaseRecord) -> LeaseState:
        watch = self._watch
        if record.ended is not None or watch is None or watch.record.lease != record.lease:
            return leases.state_of(record, LeasePhase.GRANTING if watch is None else LeasePhase.ENDING)
        job = watch.job
        phase = LeasePhase.ENDING if self._order else job.phase
        state = leases.state_of(record, phase, job.step, job.steps, watch.footprint, watch.peak)
        return state if self.holding else replace(state, size=0, phase=LeasePhase.ENDING)

    def report_key(self) -> tuple[object, ...]:
        """Return the values of all leases whose change causes a report."""
        return tuple((one.lease, one.phase, one.progress, one.size) for one in self.states())

    def video(self) -> VideoState:
        """Return the video part of the report, without the fields of Ray."""
        offer = self._offer
        packages = tuple(one.described for one in offer.packages.values()) if offer.enabled else ()
        return VideoState(not offer.unready, offer.unready, "", packages, self.states())

    def artifact(self, what: str) -> Path | None:
        """Return the file that `artifact:LEASE/NAME` names; None if no ended lease of this node has this artifact."""
        lease, _, name = what.removeprefix(PREFIX).partition("/")
        record = next((one for one in self._ledger.leases if one.lease == lease and one.ended is not None), None)
        known = (
            record is not None and record.ended is not None and any(one.name == name for one in record.ended.artifacts)
        )
        return self._place(record) / OUT / name if record is not None and known else None

    # requests of the coordinator

    def handle_request(self, request: LeaseRequest) -> None:
        """Grant or refuse a lease. Send the answer to the coordinator, at once or within seconds.

        A repeated request gets the earlier answer again.
        """
        record = self._ledger.find(request.lease, request.generation)
        if record is not None:
            self._repeat(record)
        elif self._stopping:
            self.send(leases.refuse(request, STOPPING, "this node is stopping", leases.READY_RETRY_SECONDS))
        elif self._paused:
            self.send(self._no_more(request))
        elif self._task is not None or self._requested is not None:
            holding = self._ledger.holding
            what, wait = (
                (f"to {holding.job}", leases.HELD_RETRY_SECONDS)
                if holding is not None
                else ("already", RETRY_SOON_SECONDS)
            )
            self.send(
                leases.refuse(
                    request, leases.LEASE_HELD, f"this node has granted memory {what}: one lease at a time", wait
                )
            )
        else:
            self._requested, self._order = (request.lease, request.generation), ""
            self._task = asyncio.get_running_loop().create_task(self._live(request))

    def _no_more(self, request: LeaseRequest) -> LeaseRefused:
        return leases.refuse(
            request, PAUSED, f"this node accepts no leases: {self._paused}", leases.READY_RETRY_SECONDS
        )

    def _repeat(self, record: LeaseRecord) -> None:
        """Send an earlier answer again. Sends nothing while the decision is pending."""
        if record.ended is not None:
            self.send(record.ended)
        elif self._watch is not None:
            self.send(LeaseGranted(record.lease, record.generation, str(self._watch.folder)))

    def release(self, order: LeaseRelease) -> None:
        """End a lease, or delete a lease whose end is acknowledged.

        Send the end of a lease that has ended already or is unknown.
        """
        record = self._ledger.find(order.lease, order.generation)
        if record is None and self._requested == (order.lease, order.generation):
            self._order = order.cause or "released"
        elif record is None:
            if order.cause != ACKNOWLEDGED:  # the answer to an acknowledgement would be acknowledged in an endless loop
                self.send(
                    LeaseEnded(order.lease, order.generation, watchdog_policy.LOST, "this node has no such lease")
                )
        elif record.ended is None:
            self._order = order.cause or "released"
            self._changed.set()
        elif order.cause == ACKNOWLEDGED:
            self._forget(record)
        else:
            self.send(record.ended)

    def pause(self, why: str) -> None:
        """Refuse new leases because of `why`; an empty text ends the pause. A held lease continues."""
        self._paused = why

    def end(self, why: str) -> None:
        """End the held lease and refuse new leases, because of `why`.

        Do nothing if no lease is held or its end has been ordered.
        """
        if self.holding and not self._order:
            self._paused, self._order = why, PAUSED
            self._changed.set()

    def resend_ends(self) -> None:
        """Send again, on a new link, the ends of leases that the coordinator has not acknowledged."""
        for record in self._ledger.leases:
            if record.ended is not None:
                self.send(record.ended)

    def not_started(self, lease: str, why: str) -> None:
        """End a lease whose actor could not be started; `why` is the reason.

        A lease with a running worker continues.
        """
        watch = self._watch
        if watch is not None and watch.record.lease == lease and watch.worker is None:
            self._unstarted = why
            self._changed.set()

    def engine_changed(self) -> None:
        """Wake tasks that wait for the engine, after a new report of the engine."""
        self._changed.set()

    # lifecycle of a lease

    async def start(self) -> None:
        """Recover the state of an earlier agent: end its worker and return its lease.

        Raise `OSError` if the folder of the leases cannot be used.
        """
        private_folder(self._folder)
        self._ledger = self._load()
        record = self._ledger.holding
        if record is None:
            return
        self._limiter.leases = record.size
        place = self._place(record)
        claim = read_claim(place)
        worker = record.worker or (WorkerGroup(pid=claim.worker, born=claim.born) if claim is not None else None)
        if worker is not None:
            await kill(worker, 0.0)
        self._give_back()
        (place / GRANT).unlink(missing_ok=True)
        shutil.rmtree(place / SCRATCH, ignore_errors=True)
        log.warning("lease recovered", lease=record.lease, job=record.job, size=show_size(record.size))
        self._conclude(record, EndWorker(watchdog_policy.LOST, "the node was restarted while the job ran"), None)

    async def stop(self) -> None:
        """End the worker, wait until its lease has ended, and refuse all further leases."""
        self._stopping = True
        if self._task is not None:
            self._order = self._order or STOPPING
            self._changed.set()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _live(self, request: LeaseRequest) -> None:
        """Grant, watch and end one lease."""
        try:
            granted = await self._grant(request)
            if isinstance(granted, LeaseRefused):
                log.info(
                    "lease refused", lease=request.lease, job=request.job, code=granted.code, message=granted.message
                )
                self.send(granted)
                return
            await self._serve(granted)
        except Exception:
            log.exception("lease")
            self._restore()
            raise
        finally:
            self._task = self._requested = None
            self._order = ""
            self.changed()

    # the grant

    async def _grant(self, request: LeaseRequest) -> LeaseRefused | WorkerMonitor:
        spec = self._readable(request)
        refused = spec if isinstance(spec, LeaseRefused) else await self._fitted(request)
        if refused is not None or isinstance(spec, LeaseRefused):
            return refused or leases.refuse(request, leases.INVALID, "no job")
        record = LeaseRecord(
            lease=request.lease, generation=request.generation, job=request.job, model=request.model, size=request.size
        )
        refused = leases.refuse(request, NO_DISK, "the lease cannot be stored on this node", leases.READY_RETRY_SECONDS)
        if self._keep(record):
            refused = await self._lowered(request)
        if refused is None and self._paused:
            refused = self._no_more(request)
        if refused is None:
            try:
                return self._open(record, spec)
            except OSError as error:
                refused = leases.refuse(
                    request, NO_DISK, f"the folder of the job cannot be created: {error}", leases.READY_RETRY_SECONDS
                )
        self._restore()
        return refused

    def _readable(self, request: LeaseRequest) -> LeaseRefused | JobSpec:
        """Check the request without a reading of the memory."""
        refused = (
            leases.check_name(request)
            or leases.check_generation(request, self._ledger)
            or leases.check_ready(request, self._poll.memory(), self._offer.unready)
        )
        if refused is not None:
            return refused
        package = self._offer.packages.get(request.model)
        if package is None or package.described.cause:
            cause = package.described.cause if package is not None else "this node has no such package"
            return leases.refuse(request, leases.NOT_READY, f"{request.model} cannot be used on this node: {cause}")
        spec = read_spec(request.spec)
        return leases.refuse(request, leases.INVALID, spec) if isinstance(spec, str) else spec

    async def _fitted(self, request: LeaseRequest) -> LeaseRefused | None:
        """Judge the lease. Where it does not fit, ask the engine once to make room, and judge again."""
        refused = self._judged(request)
        if refused is None or not self._short(refused):
            return refused
        number = self._supervisor.orders.free_memory(request.size)
        await self._until(lambda: self._supervisor.reports.freed_order >= number)
        return self._judged(request)

    def _short(self, refused: LeaseRefused) -> bool:
        return refused.headroom is not None

    def _judged(self, request: LeaseRequest) -> LeaseRefused | None:
        report = self._supervisor.reports.latest
        pinned = frozenset(self._settings.models.preload)
        return leases.check_fits(request, self._poll.memory(), report.models if report is not None else (), pinned)

    async def _lowered(self, request: LeaseRequest) -> LeaseRefused | None:
        """Lower the ceiling and wait until the engine holds the new limits.

        The lease must then still fit, because new work may have arrived.
        """
        began = time.monotonic()
        self._limiter.leases = request.size
        self._poll.poll_once()
        number = self._supervisor.orders.limits_number
        await self._until(lambda: self._supervisor.reports.limits_number >= number)
        if self._supervisor.reports.limits_number < number:
            message = f"the engine did not confirm the lower ceiling within {CONFIRM_TIMEOUT_SECONDS:.0f} s"
            return leases.refuse(request, SILENT, message, leases.HEADROOM_RETRY_SECONDS)
        memory = self._poll.memory()
        after = judge(memory, 0)
        if isinstance(after, Refused):
            headroom = after.numbers.headroom if after.numbers is not None else None
            return LeaseRefused(
                request.lease,
                request.generation,
                after.code.value,
                "requests arrived while the ceiling was lowered",
                request.size,
                None if headroom is None else headroom + request.size,
                leases.HEADROOM_RETRY_SECONDS,
                "the end of the new requests",
            )
        log.info(
            "ceiling lowered",
            lease=request.lease,
            size=show_size(request.size),
            seconds=round(time.monotonic() - began, 3),
        )
        return None

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait at most `CONFIRM_TIMEOUT_SECONDS` for the engine to meet a condition."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM_TIMEOUT_SECONDS):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

    def _open(self, record: LeaseRecord, spec: JobSpec) -> WorkerMonitor:
        """Create the lease's folder for its worker."""
        settings, package = self._settings.worker, self._offer.packages[record.model]
        bounds = WorkerBounds(
            record.size, spec.stall or settings.stall_timeout_seconds, spec.timeout or settings.job_timeout_seconds
        )
        place = self._place(record)
        watch = WorkerMonitor(record, place, bounds, settings.start_timeout_seconds, settings.terminate_grace_seconds)
        job = {
            **spec.job(package.described),
            "package": str(package.folder),
            "out": str(place / OUT),
            "wire": self._settings.memory.wire != WireMode.OFF,
        }
        watch.open(
            LeaseGrant(
                lease=record.lease,
                generation=record.generation,
                size=record.size,
                python=str(self._offer.python),
                environment=worker_environment(os.environ, place / SCRATCH),
                job=job,
            )
        )
        return watch

    def _restore(self) -> None:
        """Restore the ceiling, and remove a lease that was not granted."""
        self._give_back()
        record = self._ledger.holding
        if record is not None:
            self._ledger = self._ledger.drop(record.lease, record.generation)
            self._save()

    # while it is granted

    async def _serve(self, watch: WorkerMonitor) -> None:
        self._watch = watch
        record = watch.record
        log.info(
            "lease granted",
            lease=record.lease,
            generation=record.generation,
            job=record.job,
            size=show_size(record.size),
        )
        self._unstarted = ""
        self.send(LeaseGranted(record.lease, record.generation, str(watch.folder)))
        self.begin(record.lease, record.generation, str(watch.folder), record.size)
        self.changed()
        end = EndWorker(watchdog_policy.UNREADABLE, "the worker monitor failed", at_once=True)
        try:
            end = await self._watched(watch)
        finally:
            await self._end(watch, end)

    async def _watched(self, watch: WorkerMonitor) -> EndWorker:
        """Watch the worker until there is a reason to end it."""
        while True:
            if self._order:
                return EndWorker(self._order, self._ordered())
            if self._unstarted and watch.worker is None:
                return EndWorker(watchdog_policy.NOT_STARTED, self._unstarted)
            end = watch.check()
            self._note(watch)
            if end is not None:
                return end
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_SECONDS):
                    await self._changed.wait()

    def _ordered(self) -> str:
        """Return a text on the cause of the end."""
        if self._stopping:
            return "this node is stopping"
        return (
            f"its node stopped sharing: {self._paused}" if self._order == PAUSED else "the coordinator ended the lease"
        )

    def _note(self, watch: WorkerMonitor) -> None:
        """Store a worker that has started, and report a changed state."""
        if watch.worker is not None and watch.record.worker is None:
            self._limiter.worker = watch.worker.pid
            watch.record = replace(watch.record, worker=watch.worker)
            self._keep(watch.record)
        report_key = self.report_key()
        if report_key != self._last_report_key:
            self._last_report_key = report_key
            self.changed()

    async def _end(self, watch: WorkerMonitor, end: EndWorker) -> None:
        """Return the memory once the worker is dead, then report the result."""
        began = time.monotonic()
        await watch.kill(end)
        self._give_back()
        self.finish(watch.record.lease)
        log.info(
            "lease ended",
            lease=watch.record.lease,
            code=end.code,
            message=end.message,
            peak=show_size(watch.peak),
            seconds=round(time.monotonic() - began, 3),
        )
        self.changed()
        await asyncio.to_thread(watch.close)
        artifacts = await asyncio.to_thread(_artifacts, watch) if end.code == COMPLETED else ()
        if end.code == COMPLETED and not artifacts:
            end = EndWorker("output_invalid", "the worker reported success without a clip")
        if end.code in (watchdog_policy.LOST, watchdog_policy.CRASHED) and await asyncio.to_thread(_full, self._folder):
            end = EndWorker(NO_DISK, f"the disk of this node is full: {end.message}")
        self._conclude(watch.record, end, watch, artifacts)
        self._watch = None

    def _give_back(self) -> None:
        self._limiter.leases, self._limiter.worker = 0, None
        self._poll.poll_once()

    def _conclude(
        self, record: LeaseRecord, end: EndWorker, watch: WorkerMonitor | None, artifacts: tuple[Artifact, ...] = ()
    ) -> None:
        made = msgspec.json.encode(watch.job.made) if watch is not None and artifacts else b""
        peak, seconds = (watch.peak, watch.seconds) if watch is not None else (0, 0.0)
        ended = LeaseEnded(
            record.lease, record.generation, end.code, end.message, artifacts, peak, round(seconds, 3), made
        )
        self._keep(replace(record, ended=ended))
        if not artifacts:
            shutil.rmtree(self._place(record) / OUT, ignore_errors=True)
        for old in [one for one in self._ledger.leases if one.ended is not None][:-MAX_ENDED_LEASES]:
            self._forget(old)
        self.send(ended)

    # on the disk

    def _place(self, record: LeaseRecord) -> Path:
        return self._folder / f"{record.lease}.{record.generation}"

    def _keep(self, record: LeaseRecord) -> bool:
        self._ledger = self._ledger.put(record)
        return self._save()

    def _forget(self, record: LeaseRecord) -> None:
        self._ledger = self._ledger.drop(record.lease, record.generation)
        self._save()
        shutil.rmtree(self._place(record), ignore_errors=True)

    def _save(self) -> bool:
        """Write the ledger to the disk. Return whether that succeeded; a granted lease continues in either case."""
        try:
            write_private(self._folder / "leases.json", msgspec.json.encode(self._ledger))
        except OSError as error:
            log.error("leases unwritable", error=str(error))  # noqa: TRY400  the sentence is for a person
            return False
        return True

    def _load(self) -> LeaseLedger:
        """Read the ledger of an earlier agent, and remove folders that belong to no lease."""
        try:
            ledger = msgspec.json.decode((self._folder / "leases.json").read_bytes(), type=LeaseLedger)
        except FileNotFoundError:
            ledger = LeaseLedger()
        except (OSError, msgspec.MsgspecError) as error:
            log.error("leases unreadable", error=str(error))  # noqa: TRY400  the sentence is for a person
            ledger = LeaseLedger()
        known = {f"{record.lease}.{record.generation}" for record in ledger.leases}
        for entry in self._folder.iterdir():
            if entry.is_dir() and entry.name not in known:
                shutil.rmtree(entry, ignore_errors=True)
        return ledger


def _full(folder: Path) -> bool:
    """Return whether the disk has no room even for the text of an error."""
    with suppress(OSError):
        return shutil.disk_usage(folder).free < MIN_FREE_DISK_BYTES
    return False


def _artifacts(watch: WorkerMonitor) -> tuple[Artifact, ...]:
    """Return size and hash of the artifacts that the worker reports; empty if the clip is missing or empty."""
    names = (watch.job.made or {}).get("files")
    found: list[Artifact] = []
    for name in ("video.mp4", "thumbnail.webp"):
        file = watch.folder / OUT / name
        if isinstance(names, list) and name in names and file.is_file() and not file.is_symlink():
            with file.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").digest()
            found.append(Artifact(name, file.stat().st_size, digest))
    complete = bool(found) and found[0].name == "video.mp4" and found[0].size > 0
    return tuple(found) if complete else ()

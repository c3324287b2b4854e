"""Monitor the worker of one granted lease from the agent: its start, its events, its footprint and its end.

The monitor reads the lease's folder and the kernel several times a second, and `node.video.worker.watchdog_policy`
decides. A worker gets its job only once it is watched. Before that, it loads nothing.
"""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from host.private_files import create_private_folder, write_private
from node.memory.sensor import list_group_members, measure_footprint, read_process_identity
from node.video.lease_rules import LeasePhase, LeaseRecord, WorkerGroup
from node.video.worker import watchdog_policy
from node.video.worker.lease_files import (
    ATTENDED,
    EVENTS,
    GO,
    GRANT,
    GUARD,
    OUT,
    SCRATCH,
    FileTail,
    LeaseGrant,
    is_locked,
    lock_file,
    read_claim,
    write_new,
)
from node.video.worker.watchdog_policy import EndWorker, WatchdogState, WorkerBounds, WorkerObservation
from wire.video import LeaseEndCode

POLL_INTERVAL_SECONDS = 0.2
"""Seconds between two checks of a worker."""
EXIT_TIMEOUT_SECONDS = 5.0
"""Maximum seconds from a worker's report of the end of its job to its exit. After that, the worker is ended."""
REPORT_TIMEOUT_SECONDS = 1.0
"""Seconds that the parent process has, after the worker's end, to report the end or to exit as well.

After that, the worker counts as crashed.
"""
EXIT_POLL_SECONDS = 0.02
"""Seconds between two checks whether a killed worker has ended."""
PHASES = {
    "start": LeasePhase.STARTING,
    "denoise": LeasePhase.DENOISING,
    "decode": LeasePhase.DECODING,
    "convert": LeasePhase.DECODING,
    "generated": LeasePhase.SAVING,
    "save": LeasePhase.SAVING,
}
"""Phase of the lease by the phase in a `progress` event of the worker. Events with other phases do not change it."""
CODES = frozenset(
    {
        LeaseEndCode.OUTPUT_INVALID,
        LeaseEndCode.GENERATION_FAILED,
        LeaseEndCode.MODEL_INVALID,
        LeaseEndCode.DISK_FULL,
    }
)
"""Failure codes that a worker may report. Any other code counts as `LeaseEndCode.GENERATION_FAILED`."""
KEPT = ("PATH", "USER", "LANG", "LC_ALL")
"""Environment variables that a worker inherits. All other variables of a worker are set explicitly."""


def build_worker_environment(inherited: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """Return the environment variables of a worker: those in `KEPT`, offline mode, and folders below `scratch`."""
    allowed = {name: inherited[name] for name in KEPT if name in inherited}
    ours = {"HOME": str(scratch), "TMPDIR": str(scratch), "XDG_CACHE_HOME": str(scratch / "cache")}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return allowed | ours | offline


@dataclass(slots=True)
class WorkerJob:
    """State of a video job, as the events of its worker report it."""

    phase: LeasePhase = LeasePhase.GRANTED
    """Phase of the lease by the last event."""
    step: int = 0
    """Denoising steps done, of `steps`, by the last `progress` event."""
    steps: int = 0
    """Number of denoising steps; 0 before the first `progress` event."""
    mark: tuple[object, ...] = ()
    """Value that changes with each sign of progress."""
    end: EndWorker | None = None
    """End of the job; None until an event ends the job."""
    clip: dict[str, Any] | None = None
    """Properties of the finished clip by name; None before."""
    ended_at: float = 0.0
    """Monotonic seconds at which `end` was set; 0 before."""

    def begin(self) -> None:
        """Record that the worker process has started."""
        self.phase = LeasePhase.STARTING

    def handle_event(self, line: bytes, now: float) -> None:
        """Apply one event of the worker, a line of JSON. Ignore an invalid event. `now` is in monotonic seconds."""
        try:
            event = cast("object", msgspec.json.decode(line))
        except msgspec.DecodeError:
            return
        if isinstance(event, dict):
            self._apply_event(cast("dict[str, Any]", event), now)

    def _apply_event(self, event: dict[str, Any], now: float) -> None:
        match event:
            case {"event": "start"}:
                self._set_phase(LeasePhase.STARTING)
            case {"event": "loading" | "loaded"}:
                self._set_phase(LeasePhase.LOADING, event["event"])
            case {"event": "progress", "phase": str(phase), "step": int(step), "steps": int(steps)}:
                self.step, self.steps = max(0, min(step, steps)), max(0, steps)
                self._set_phase(PHASES.get(phase, self.phase), phase, step)
            case {"event": "beat", "blocks": int(blocks)}:
                self.mark = (*self.mark[:3], blocks)
            case {"event": "done", "made": dict()}:
                self.clip, self.end = event["made"], EndWorker(LeaseEndCode.COMPLETED, "")
            case {"event": "failed", "code": str(code), "message": str(message)}:
                self.end = EndWorker(code if code in CODES else LeaseEndCode.GENERATION_FAILED, message[:1000])
            case {"event": "exit", "code": int(code)}:
                self.end = self.end or EndWorker(
                    LeaseEndCode.WORKER_CRASHED, f"the worker ended {_describe_exit(code)} before it finished"
                )
            case _:
                return
        if self.end is not None and not self.ended_at:
            self.ended_at = now

    def _set_phase(self, phase: LeasePhase, *details: object) -> None:
        blocks = self.mark[3:] if len(self.mark) > 3 else (0,)
        self.phase = phase
        self.mark = (phase, details[0] if details else "", details[1] if len(details) > 1 else 0, *blocks)


def _describe_exit(code: int) -> str:
    names = {int(member): member.name for member in signal.Signals}
    return f"with exit code {code}" if code >= 0 else f"by {names.get(-code, f'signal {-code}')}"


class WorkerMonitor:
    """Monitor of one granted lease, from the creation of its folder to the end of its worker.

    `folder` is the folder of the lease. `start_timeout` is the maximum number of seconds until the worker starts.
    `grace` is the time in seconds between SIGTERM and SIGKILL. `record` is the stored lease.
    """

    def __init__(
        self, record: LeaseRecord, folder: Path, bounds: WorkerBounds, start_timeout: float, grace: float
    ) -> None:
        self.record = record
        self.folder = folder
        self.job = WorkerJob()
        """State of the job."""
        self.worker: WorkerGroup | None = None
        """Process group of the worker; None before the worker starts."""
        self.footprint = 0
        """Footprint of the worker's processes in bytes at the last check; 0 before the first or if unreadable."""
        self.state: WatchdogState | None = None
        """State of the watchdog; None before the worker starts."""
        self._bounds = bounds
        self._start_timeout = start_timeout
        self._grace = grace
        self._granted = time.monotonic()
        self._tail = FileTail(folder / EVENTS)
        self._guard: int | None = None
        self._gone_at = 0.0

    def open(self, grant: LeaseGrant) -> None:
        """Create the folder of the lease in place of an existing one, lock its `guard` file, and write the grant.

        The worker may start after that. On failure, release the lock, remove the folder and raise `OSError`.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            create_private_folder(self.folder)
            create_private_folder(self.folder / OUT)
            create_private_folder(self.folder / SCRATCH)
            self._guard = lock_file(self.folder / GUARD)
            write_private(self.folder / GRANT, msgspec.json.encode(grant))
        except OSError:
            self.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @property
    def peak(self) -> int:
        """Highest footprint of the worker in bytes; 0 before the first reading."""
        return self.state.peak if self.state is not None else 0

    @property
    def seconds(self) -> float:
        """Seconds since the start of the worker; 0 before it."""
        return time.monotonic() - self.state.began if self.state is not None else 0.0

    def record_worker(self) -> LeaseRecord:
        """Store the worker in `record`, and return the new record."""
        self.record = replace(self.record, worker=self.worker)
        return self.record

    def check(self) -> EndWorker | None:
        """Check the worker once. Return the reason why it has ended or must be ended; None for a worker in order.

        A worker that has not started within `start_timeout` seconds counts as failed. Raise `OSError` if a file of the
        lease's folder cannot be created or locked.
        """
        now = time.monotonic()
        if self.worker is None:
            return self._look_for_worker(now)
        for line in self._tail.read_lines():
            self.job.handle_event(line, now)
        return self._judge(self.worker, now)

    def _look_for_worker(self, now: float) -> EndWorker | None:
        claim = read_claim(self.folder)
        if claim is not None:
            self.worker = WorkerGroup(pid=claim.worker, born=claim.born)
            self.state = watchdog_policy.create_state(now)
            self.job.begin()
            with suppress(FileExistsError):
                write_new(self.folder / GO, b"")
        elif now - self._granted >= self._start_timeout:
            return EndWorker(LeaseEndCode.START_FAILED, f"no worker was started within {now - self._granted:.0f} s")
        return None

    def _judge(self, worker: WorkerGroup, now: float) -> EndWorker | None:
        assert self.state is not None  # noqa: S101  it begins with the worker
        attended = is_locked(self.folder / ATTENDED)  # read first: worker and attendant may both end, done, in between
        alive = find_living_processes(worker)
        read = measure_footprint(alive)
        self.footprint = read or 0
        if not alive or not attended:
            for line in self._tail.read_lines():  # the last events may have arrived by now
                self.job.handle_event(line, now)
        if self.job.end is not None and (not alive or now - self.job.ended_at >= EXIT_TIMEOUT_SECONDS):
            return self.job.end
        if not alive:
            self._gone_at = self._gone_at or now
            if attended and now - self._gone_at < REPORT_TIMEOUT_SECONDS:
                return None
        observation = WorkerObservation(read, self.job.mark, bool(alive), attended or self.job.end is not None)
        self.state, end = watchdog_policy.step(self.state, observation, self._bounds, now)
        return end

    async def kill(self, end: EndWorker) -> None:
        """Remove the grant, end the worker's process group, and wait until all of its processes have ended.

        Without the grant, no worker starts later. `end.at_once` decides whether SIGTERM precedes SIGKILL. The wait has
        no time limit.
        """
        with suppress(OSError):
            (self.folder / GRANT).unlink(missing_ok=True)
        if self.worker is not None:
            await kill_worker_group(self.worker, 0.0 if end.at_once else self._grace)

    def close(self) -> None:
        """Release the lock of the lease's folder, and delete the scratch folder."""
        if self._guard is not None:
            os.close(self._guard)
            self._guard = None
        shutil.rmtree(self.folder / SCRATCH, ignore_errors=True)


def find_living_processes(worker: WorkerGroup) -> tuple[int, ...]:
    """Return the ids of the living processes of a worker's group; none if a later process has the worker's id."""
    if worker.born and (now := read_process_identity(worker.pid)) and now != worker.born:
        return ()
    return list_group_members(worker.pid)


async def kill_worker_group(worker: WorkerGroup, grace: float) -> None:
    """Send SIGTERM to a worker's process group, and SIGKILL after `grace` seconds; with a `grace` of 0, only SIGKILL.

    Return when all processes of the group have ended. The wait has no time limit.
    """
    deadline, number = time.monotonic() + grace, signal.SIGTERM if grace else signal.SIGKILL
    while find_living_processes(worker):
        if time.monotonic() >= deadline:
            number = signal.SIGKILL
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, number)
        await asyncio.sleep(EXIT_POLL_SECONDS)

"""Watches the worker of one granted lease, from the agent: claims, events, footprint, end.

Everything is read from the lease's folder and from the kernel, several times a second;
`node.video.worker.watchdog_policy` decides.
A worker gets its job only once it is watched, so a lease that ends before that has cost no memory.
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

from host.private_files import private_folder, write_private
from node.memory.sensor import born, footprint_of, members
from node.video.leases import Held, Phase, Worker
from node.video.worker import watchdog_policy
from node.video.worker.lease_files import (
    ATTENDED,
    EVENTS,
    GO,
    GRANT,
    GUARD,
    OUT,
    SCRATCH,
    Grant,
    Tail,
    lock,
    locked,
    read_claim,
    write_new,
)
from node.video.worker.watchdog_policy import Bounds, End, Seen, State

LOOK = 0.2
"""Seconds from one look to the next."""
LEAVE = 5.0
"""Seconds that a worker has to be gone after its last word."""
WORD = 1.0
"""Seconds that who started a worker has, after its end, to say how it ended, or to be gone as well."""
DEATH_LOOK = 0.02
COMPLETED = "completed"
PHASES = {
    "start": Phase.STARTING, "denoise": Phase.DENOISING, "decode": Phase.DECODING, "convert": Phase.DECODING,
    "generated": Phase.SAVING, "save": Phase.SAVING,
}  # fmt: skip
CODES = frozenset({"output_invalid", "generation_failed", "model_invalid", "disk_full"})
"""What a worker may say of its own failure."""
KEPT = ("PATH", "USER", "LANG", "LC_ALL")
"""What a worker inherits; everything else it is told."""


def worker_environment(inherited: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """Give the environment of a worker: what is named here and nothing else, its caches in its own scratch folder."""
    kept = {name: inherited[name] for name in KEPT if name in inherited}
    ours = {"HOME": str(scratch), "TMPDIR": str(scratch), "XDG_CACHE_HOME": str(scratch / "cache")}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return kept | ours | offline


@dataclass(slots=True)
class Job:
    """How the job goes, by what the worker has said. `mark` changes with each sign of progress."""

    phase: Phase = Phase.GRANTED
    step: int = 0
    steps: int = 0
    mark: tuple[object, ...] = ()
    end: End | None = None
    made: dict[str, Any] | None = None
    said_at: float = 0.0

    def hear(self, line: bytes, now: float) -> None:
        """Take in one event; what makes no sense is not taken for progress."""
        try:
            event = cast("object", msgspec.json.decode(line))
        except msgspec.DecodeError:
            return
        if isinstance(event, dict):
            self._take(cast("dict[str, Any]", event), now)

    def _take(self, event: dict[str, Any], now: float) -> None:
        match event:
            case {"event": "start"}:
                self._move(Phase.STARTING)
            case {"event": "loading" | "loaded"}:
                self._move(Phase.LOADING, event["event"])
            case {"event": "progress", "phase": str(phase), "step": int(step), "steps": int(steps)}:
                self.step, self.steps = max(0, min(step, steps)), max(0, steps)
                self._move(PHASES.get(phase, self.phase), phase, step)
            case {"event": "beat", "blocks": int(blocks)}:
                self.mark = (*self.mark[:3], blocks)
            case {"event": "done", "made": dict()}:
                self.made, self.end = event["made"], End(COMPLETED, "")
            case {"event": "failed", "code": str(code), "message": str(message)}:
                self.end = End(code if code in CODES else "generation_failed", message[:1000])
            case {"event": "exit", "code": int(code)}:
                self.end = self.end or End(watchdog_policy.CRASHED, f"the worker ended {_how(code)} before it was done")
            case _:
                return
        if self.end is not None and not self.said_at:
            self.said_at = now

    def _move(self, phase: Phase, *what: object) -> None:
        blocks = self.mark[3:] if len(self.mark) > 3 else (0,)
        self.phase = phase
        self.mark = (phase, what[0] if what else "", what[1] if len(what) > 1 else 0, *blocks)


def _how(code: int) -> str:
    names = {int(one): one.name for one in signal.Signals}
    return f"with exit code {code}" if code >= 0 else f"by {names.get(-code, f'signal {-code}')}"


class Watch:
    """One granted lease, from its folder to the death of its worker."""

    def __init__(self, held: Held, folder: Path, bounds: Bounds, start_timeout: float, grace: float) -> None:
        self.held = held
        self.folder = folder
        self.job = Job()
        self.worker: Worker | None = None
        self.footprint = 0
        self.state: State | None = None
        self._bounds = bounds
        self._start_timeout = start_timeout
        self._grace = grace
        self._granted = time.monotonic()
        self._tail = Tail(folder / EVENTS)
        self._guard: int | None = None
        self._gone_at = 0.0

    def open(self, grant: Grant) -> None:
        """Lay out the folder; from now on an attendant may begin. OSError when that is not possible."""
        shutil.rmtree(self.folder, ignore_errors=True)
        private_folder(self.folder)
        private_folder(self.folder / OUT)
        private_folder(self.folder / SCRATCH)
        self._guard = lock(self.folder / GUARD)
        write_private(self.folder / GRANT, msgspec.json.encode(grant))

    @property
    def peak(self) -> int:
        """The highest footprint that was read."""
        return self.state.peak if self.state is not None else 0

    @property
    def seconds(self) -> float:
        """For how long the worker has been here."""
        return time.monotonic() - self.state.began if self.state is not None else 0.0

    def look(self) -> End | None:
        """Look once; an end when there has to be one."""
        now = time.monotonic()
        if self.worker is None:
            return self._look_for_worker(now)
        for line in self._tail.lines():
            self.job.hear(line, now)
        return self._judge(self.worker, now)

    def _look_for_worker(self, now: float) -> End | None:
        claim = read_claim(self.folder)
        if claim is not None:
            self.worker = Worker(pid=claim.worker, born=claim.born)
            self.state = watchdog_policy.begin(now)
            self.job.phase = Phase.STARTING
            with suppress(FileExistsError):
                write_new(self.folder / GO, b"")
        elif now - self._granted >= self._start_timeout:
            return End(watchdog_policy.NOT_STARTED, f"nobody started a worker within {now - self._granted:.0f} s")
        return None

    def _judge(self, worker: Worker, now: float) -> End | None:
        assert self.state is not None  # noqa: S101  it begins with the worker
        attended = locked(self.folder / ATTENDED)  # asked first: worker and attendant may both end, done, in between
        alive = living(worker)
        read = footprint_of(alive)
        self.footprint = read or 0
        if not alive or not attended:
            for line in self._tail.lines():  # its last words may have come by now
                self.job.hear(line, now)
        if self.job.end is not None and (not alive or now - self.job.said_at >= LEAVE):
            return self.job.end
        if not alive:
            self._gone_at = self._gone_at or now
            if attended and now - self._gone_at < WORD:
                return None
        seen = Seen(read, self.job.mark, bool(alive), attended or self.job.end is not None)
        self.state, end = watchdog_policy.step(self.state, seen, self._bounds, now)
        return end

    async def kill(self, end: End) -> None:
        """End the worker's group, and return when no process of it lives."""
        with suppress(OSError):
            (self.folder / GRANT).unlink(missing_ok=True)
        if self.worker is not None:
            await kill(self.worker, 0.0 if end.at_once else self._grace)

    def close(self) -> None:
        """Let go of the folder, and wipe all of it that nobody will ask for."""
        if self._guard is not None:
            os.close(self._guard)
            self._guard = None
        shutil.rmtree(self.folder / SCRATCH, ignore_errors=True)


def living(worker: Worker) -> tuple[int, ...]:
    """List the processes of a worker's group that live; none when the number is a later process's by now."""
    if worker.born and (now := born(worker.pid)) and now != worker.born:
        return ()
    return members(worker.pid)


async def kill(worker: Worker, grace: float) -> None:
    """SIGTERM a worker's group, SIGKILL it after `grace` seconds, and return when none of it lives."""
    deadline, number = time.monotonic() + grace, signal.SIGTERM if grace else signal.SIGKILL
    while living(worker):
        if time.monotonic() >= deadline:
            number = signal.SIGKILL
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, number)
        await asyncio.sleep(DEATH_LOOK)

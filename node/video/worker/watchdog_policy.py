"""Watchdog of a video worker: decide whether the worker has to be ended, and why. Pure.

`node.video.lease_manager` asks it several times a second, because it holds the lease and outlives the actor.

    footprint of all of the worker's processes > lease      ended at once         memory_lease_exceeded
    the footprint cannot be read three times in a row       ended                 monitor_failed
    the worker is gone, and has not said how it went        nothing to end        worker_crashed, worker_lost
    no sign of progress for `stall` seconds                 ended                 worker_stalled
    not done `timeout` seconds after it was started         ended                 job_timeout

A sign of progress is a new phase, a step or a transformer block that was computed, never the mere beat of a thread,
which goes on while a GPU hangs. A step of a large picture takes twenty minutes; a block never takes five.
The kernel is asked from outside: what the worker says of its own memory judges nobody. An overshoot between two looks
is real (200 ms of allocating), which is why a prediction has a margin.
"""

from dataclasses import dataclass, replace

from wire.units import show_size

EXCEEDED = "memory_lease_exceeded"
STALLED = "worker_stalled"
TIMEOUT = "job_timeout"
UNREADABLE = "monitor_failed"
CRASHED = "worker_crashed"
LOST = "worker_lost"
NOT_STARTED = "start_failed"
READINGS = 3
"""Failed readings in a row after which nobody guards the memory any more."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a worker may take: bytes, seconds without progress, seconds in all."""

    lease: int
    stall: float
    timeout: float


@dataclass(frozen=True, slots=True)
class Seen:
    """One look. `footprint` in bytes (None: unreadable), `mark` is anything that changes with each sign of progress,
    `alive`: some process of the worker lives; `attended`: so does who started it."""

    footprint: int | None
    mark: object
    alive: bool = True
    attended: bool = True


@dataclass(frozen=True, slots=True)
class State:
    """What is remembered: when the worker began and last got on, failed readings in a row, the highest footprint."""

    began: float
    moved: float
    mark: object = None
    failed: int = 0
    peak: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """End the worker, for this reason; `at_once`: without the time that it gets to leave by itself."""

    code: str
    message: str
    at_once: bool = False


def begin(now: float) -> State:
    """Watch a worker that is started now."""
    return State(now, now)


def step(state: State, seen: Seen, bounds: Bounds, now: float) -> tuple[State, End | None]:
    """Judge one look; `now` in seconds of a clock that never jumps."""
    if seen.mark != state.mark:
        state = replace(state, mark=seen.mark, moved=now)
    if not seen.alive:
        return state, _gone(seen)
    failed = state.failed + 1 if seen.footprint is None else 0
    state = replace(state, failed=failed, peak=max(state.peak, seen.footprint or 0))
    return state, _beyond(state, seen, bounds, now)


def _gone(seen: Seen) -> End:
    if seen.attended:
        return End(CRASHED, "the worker ended without a word; its log says more")
    return End(LOST, "who started the worker is gone, and the worker with it")


def _beyond(state: State, seen: Seen, bounds: Bounds, now: float) -> End | None:
    """Name the bound that a living worker has broken."""
    if seen.footprint is not None and seen.footprint > bounds.lease:
        message = f"it took {show_size(seen.footprint)} of a lease of {show_size(bounds.lease)}"
        return End(EXCEEDED, message, at_once=True)
    if state.failed >= READINGS:
        return End(UNREADABLE, f"its footprint could not be read {state.failed} times in a row", at_once=True)
    if not seen.attended:
        return End(LOST, "who started the worker is gone", at_once=True)
    if now - state.moved >= bounds.stall:
        return End(STALLED, f"nothing was computed for {now - state.moved:.0f} s")
    if now - state.began >= bounds.timeout:
        return End(TIMEOUT, f"it was not done after {now - state.began:.0f} s")
    return None

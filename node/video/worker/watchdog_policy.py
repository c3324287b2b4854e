"""Watchdog of a video worker: decide whether the worker has to be ended, and why. Pure functions.

`node.video.worker.worker_monitor` calls `step` several times a second. The monitor runs in the agent, because the agent
outlives the worker's parent process, which is usually a Ray actor.

    footprint of all of the worker's processes > lease      killed at once        memory_lease_exceeded
    the footprint cannot be read three times in a row       killed at once        monitor_failed
    the parent process of the worker has ended              killed at once        worker_lost
    the worker has ended, and has reported no result        nothing to end        worker_crashed, worker_lost
    no sign of progress for `stall` seconds                 SIGTERM, then SIGKILL worker_stalled
    not done `timeout` seconds after it was started         SIGTERM, then SIGKILL job_timeout

A sign of progress is a new phase, a step or a computed transformer block. The `beat` event of the worker alone is no
sign, because its thread continues while a GPU hangs. A denoising step of a large picture can take twenty minutes, a
block less than five. The footprint is read from the kernel; memory numbers that the worker reports are ignored. Between
two checks, a worker can exceed its lease by the memory that it allocates in 0.2 s. The predicted footprint of a job
therefore has a margin.
"""

from dataclasses import dataclass, replace

from wire.units import show_size
from wire.video import LeaseEndCode

MAX_FAILED_READINGS = 3
"""Failed readings of the footprint in a row after which the worker is killed."""


@dataclass(frozen=True, slots=True)
class WorkerBounds:
    """Limits of a worker, beyond which the watchdog ends it."""

    lease: int
    """Maximum footprint in bytes."""
    stall: float
    """Maximum seconds without progress."""
    timeout: float
    """Maximum seconds from the start of the worker to its end."""


@dataclass(frozen=True, slots=True)
class WorkerObservation:
    """State of a worker, as observed by one check."""

    footprint: int | None
    """Footprint of all processes of the worker in bytes; None if it cannot be read."""
    mark: object
    """Value that changes with each sign of progress, and stays equal otherwise."""
    alive: bool = True
    """Whether a process of the worker is alive."""
    attended: bool = True
    """Whether the worker's parent process is alive.

    Also True once the worker has reported its result, because the parent is then not needed.
    """


@dataclass(frozen=True, slots=True)
class WatchdogState:
    """State of the watchdog between two checks."""

    began: float
    """Start of the worker, in seconds of a monotonic clock."""
    moved: float
    """Time of the last sign of progress, in seconds of a monotonic clock."""
    mark: object = None
    """`WorkerObservation.mark` at the last check."""
    failed: int = 0
    """Failed readings in a row."""
    peak: int = 0
    """Highest footprint in bytes."""


@dataclass(frozen=True, slots=True)
class EndWorker:
    """Reason why a worker has ended or must be ended."""

    code: str
    """Code that the node reports: a `LeaseEndCode`, or the cause of an order by the coordinator."""
    message: str
    """Sentence for a person; empty for a completed job."""
    at_once: bool = False
    """Whether the worker is killed without a grace period."""


def create_state(now: float) -> WatchdogState:
    """Return the initial state for a worker that starts at `now`, in seconds of a monotonic clock."""
    return WatchdogState(now, now)


def step(
    state: WatchdogState, observation: WorkerObservation, bounds: WorkerBounds, now: float
) -> tuple[WatchdogState, EndWorker | None]:
    """Apply one observation. Return the next state, and the reason why the worker has ended or must be ended.

    The reason is None for a worker within its bounds. `now` is in seconds of a monotonic clock.
    """
    if observation.mark != state.mark:
        state = replace(state, mark=observation.mark, moved=now)
    if not observation.alive:
        return state, _describe_end(observation)
    failed = state.failed + 1 if observation.footprint is None else 0
    state = replace(state, failed=failed, peak=max(state.peak, observation.footprint or 0))
    return state, _check_bounds(state, observation, bounds, now)


def _describe_end(observation: WorkerObservation) -> EndWorker:
    if observation.attended:
        return EndWorker(LeaseEndCode.WORKER_CRASHED, "the worker ended without a message: see its log")
    return EndWorker(LeaseEndCode.WORKER_LOST, "the parent process of the worker ended, and the worker with it")


def _check_bounds(
    state: WatchdogState, observation: WorkerObservation, bounds: WorkerBounds, now: float
) -> EndWorker | None:
    """Return the end for the bound that a living worker has exceeded; None if it exceeds none."""
    if observation.footprint is not None and observation.footprint > bounds.lease:
        message = f"the worker used {show_size(observation.footprint)} of a lease of {show_size(bounds.lease)}"
        return EndWorker(LeaseEndCode.MEMORY_LEASE_EXCEEDED, message, at_once=True)
    if state.failed >= MAX_FAILED_READINGS:
        return EndWorker(
            LeaseEndCode.MONITOR_FAILED,
            f"the footprint of the worker could not be read {state.failed} times in a row",
            at_once=True,
        )
    if not observation.attended:
        return EndWorker(LeaseEndCode.WORKER_LOST, "the parent process of the worker ended", at_once=True)
    if now - state.moved >= bounds.stall:
        return EndWorker(LeaseEndCode.WORKER_STALLED, f"no progress for {now - state.moved:.0f} s")
    if now - state.began >= bounds.timeout:
        return EndWorker(LeaseEndCode.JOB_TIMEOUT, f"the job was not finished after {now - state.began:.0f} s")
    return None

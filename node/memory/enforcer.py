"""Decide the orders to an engine that is above its limits. Pure: `node.memory.poll` calls `step` at each poll.

The gate is inside the engine and refuses requests before memory is allocated. The enforcer is in the agent. It reacts
to memory above a limit nevertheless, because of a peak that no estimate predicted, a leak, or a new lease. The enforcer
decides by the agent's own reading of the process, and can end the process. With `memory.guard` off, it only counts.

    OK         headroom ≥ 0         nothing
    OVER_SOFT  headroom < 0         order at each poll: release free buffers, reusable cache and idle models. The gate
                                    admits no request meanwhile, because it uses the same numbers
    OVER_HARD  current over         first reading: as OVER_SOFT. From the second reading in a row: order to end the
               cap − leases         newest request; after each answer, the next request, while the engine stays over
               … and no answer      within one period, and no native call that may last longer: the process is ended

`wire.capacity.arithmetic.compute_level` computes the levels. An unreadable footprint neither increases nor resets the
count of readings. While the ceiling is unreadable, only an engine above cap − leases gets orders. An engine that
answers is never ended, even with no memory left to release, because its gate then refuses all requests.

The engine executes orders between native calls, and a forward can last longer than a period. While a native call may
still run (`EnforcerInput.call_until`), the process is therefore not ended. A late poll ends no engine, because the
agent may not have read the answer of the engine yet.
"""

from dataclasses import dataclass, replace

from node.memory.reading import POLL_PERIOD_SECONDS
from wire.capacity import arithmetic
from wire.frames import ReduceMemory
from wire.report import Memory, MemoryLevel
from wire.units import show_size

BUSY_POLL_SECONDS = 0.25
"""Seconds between polls while the engine serves requests, loads a model, or is above cap − leases."""
IDLE_POLL_SECONDS = POLL_PERIOD_SECONDS
"""Seconds between polls while the engine is idle with a loaded model."""
EMPTY_POLL_SECONDS = 5.0
"""Seconds between polls while the engine is idle without a loaded model, and without an engine."""
LATE_POLL_SECONDS = 2 * BUSY_POLL_SECONDS
"""Seconds after the last poll from which on a poll is late. A late poll ends no engine."""


@dataclass(frozen=True, slots=True)
class EnforcerInput:
    """Input of `step`: readings of the engine at one poll, and the last order that the engine has executed."""

    engine: int | None
    """Process id of the engine that runs and has limits; None without one."""
    memory: Memory
    """Memory part of the engine's last report, with the agent's own reading and limits."""
    enforced: int = 0
    """Sequence number (`ReduceMemory.poll`) of the last order that the engine has executed; 0 before the first."""
    call_until: float = 0.0
    """Monotonic seconds until which the running native call may last (`EngineProbe.call_until`); 0 without a call."""


@dataclass(frozen=True, slots=True)
class EnforcerState:
    """State of the enforcer between polls, an input and result of `step`. Times are monotonic seconds."""

    polls: int = 0
    """Number of polls; also the sequence number of the orders of a poll."""
    level: MemoryLevel = MemoryLevel.UNKNOWN
    """Level at the last poll."""
    engine: int | None = None
    """Process id of the engine at the last poll; None without one."""
    over: int = 0
    """Number of consecutive readings above cap − leases."""
    order_number: int = 0
    """Sequence number of the last order to end a request.

    It is 0 if there was none since the engine was last below cap − leases, or since the process was replaced.
    """
    ordered_at: float = 0.0
    """Time of the last order to end a request."""
    looked_at: float = 0.0
    """Time of the last poll."""
    ended: int | None = None
    """Process id of the engine that the enforcer ended; None before.

    Reset to None once another engine or no engine runs, because the system can reuse the id.
    """
    over_caps: int = 0
    """Number of times that the engine rose above cap − leases."""
    kills: int = 0
    """Number of engine processes that the enforcer ended."""


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Action: send this order to the engine."""

    order: ReduceMemory


@dataclass(frozen=True, slots=True)
class EndEngine:
    """Action: end the engine process for this reason."""

    cause: str


Action = SendOrder | EndEngine


def step(state: EnforcerState, reading: EnforcerInput, now: float) -> tuple[EnforcerState, tuple[Action, ...]]:
    """Return the state after one poll, and the actions to perform: at most one. `now` is in monotonic seconds."""
    level = MemoryLevel.UNKNOWN if reading.engine is None else arithmetic.compute_level(reading.memory)
    if reading.engine != state.engine:
        state = replace(state, engine=reading.engine, over=0, order_number=0, ended=None)
    late = now - state.looked_at > LATE_POLL_SECONDS
    state = replace(state, polls=state.polls + 1, level=level, looked_at=now)
    if level is MemoryLevel.UNKNOWN:
        return state if reading.engine is None or reading.memory.phys is None else replace(
            state, over=0, order_number=0
        ), ()
    if level is not MemoryLevel.OVER_HARD:
        return replace(state, over=0, order_number=0), _reduce_softly(state, reading)
    state = replace(state, over=state.over + 1, over_caps=state.over_caps + (state.over == 0))
    if state.over == 1 or not reading.memory.guard:
        return state, _reduce_softly(state, reading)
    return _reduce_hard(state, reading, now, late=late)


def _reduce_softly(state: EnforcerState, reading: EnforcerInput) -> tuple[Action, ...]:
    if state.level < MemoryLevel.OVER_SOFT or not reading.memory.guard:
        return ()
    return (SendOrder(ReduceMemory(state.polls, MemoryLevel.OVER_SOFT)),)


def _reduce_hard(
    state: EnforcerState, reading: EnforcerInput, now: float, *, late: bool
) -> tuple[EnforcerState, tuple[Action, ...]]:
    if state.engine == state.ended:
        return state, ()
    if state.order_number <= reading.enforced:
        order = ReduceMemory(state.polls, MemoryLevel.OVER_HARD, arithmetic.compute_excess(reading.memory))
        return replace(state, order_number=state.polls, ordered_at=now), (SendOrder(order),)
    if late or now - state.ordered_at < POLL_PERIOD_SECONDS or now < reading.call_until:
        return state, ()
    over, line = arithmetic.compute_excess(reading.memory), arithmetic.compute_hard_limit(reading.memory)
    cause = (
        f"over its cap: {show_size(line + over)} of {show_size(line)} in two readings, without an answer of the engine"
    )
    return replace(state, ended=state.engine, kills=state.kills + 1), (EndEngine(cause),)


def compute_pause_seconds(state: EnforcerState, *, busy: bool, loaded: bool) -> float:
    """Return the seconds until the next poll.

    `busy` is whether the engine works, `loaded` whether a model is loaded. An engine above cap − leases counts as busy.
    """
    if busy or state.over:
        return BUSY_POLL_SECONDS
    return IDLE_POLL_SECONDS if loaded else EMPTY_POLL_SECONDS

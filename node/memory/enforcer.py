"""The enforcer: what the agent does about an engine that stands over a line. Pure; `poll` drives it.

The gate is inside the engine, and refuses before memory is taken. The enforcer is outside, and sees what was taken all
the same: by what no estimate foresaw, by a leak, by a lease that came. It judges by the agent's own reading of the
process, and it can end that process, because it is not in it.

    OK         headroom ≥ 0         nothing
    OVER_SOFT  headroom < 0         told at each poll: give back free buffers, reusable cache and idle models. Nobody is
                                    admitted meanwhile, because the gate judges by the same numbers
    OVER_HARD  current over         once: as OVER_SOFT. On two readings in a row: told to end its newest request too,
               cap − leases         and once it has answered, the next, for as long as it stays over
               … and no answer      within one period, and no native call under way that may last longer: ended

Levels are `wire.capacity.arithmetic.level`; there is no second set of thresholds. A footprint that cannot be read
neither counts nor pardons. A ceiling that cannot be read asks for nothing. An engine that answers is never ended, even
where it has nothing left to give: it refuses everything then, and that is enough. With the guard off by name all of it
only counts.

Orders are obeyed between native calls. So an engine that is in one has until that call would count as hung: a forward,
or a piece of a load, that lasts longer than a period is no silence. Nor is it where the agent itself stood still: what
the engine said meanwhile may not have been read yet, so a look that comes late ends nothing.
"""

from dataclasses import dataclass, replace

from node.memory.reading import PERIOD
from wire.capacity import arithmetic
from wire.frames import Enforce
from wire.report import Level, Memory
from wire.units import show_size

BUSY = 0.25
IDLE = PERIOD
EMPTY = 5.0
"""Seconds from one poll to the next while the engine works (or is over its cap), rests, or has no model loaded."""
LATE = 2 * BUSY
"""Seconds after which the next look at an engine over its cap is late."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One poll. `engine` names the process that is up and has limits (None: there is none), `memory` is what it last
    said of itself with the agent's own reading and limits put in, `enforced` the last order that it says it obeyed.
    `call_until` is when the native call under way would count as hung, as the engine last said (0: there is none)."""

    engine: int | None
    memory: Memory
    enforced: int = 0
    call_until: float = 0.0


@dataclass(frozen=True, slots=True)
class State:
    """What is remembered: `over` readings in a row were over the cap, order `asked` of time `asked_at` is the last to
    end a request (0: none), `looked_at` the time of the last poll, `ended` is the process that was ended, until another
    one is up or none: the system may give its number again."""

    polls: int = 0
    level: Level = Level.UNKNOWN
    engine: int | None = None
    over: int = 0
    asked: int = 0
    asked_at: float = 0.0
    looked_at: float = 0.0
    ended: int | None = None
    over_caps: int = 0
    kills: int = 0


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this to the engine."""

    order: Enforce


@dataclass(frozen=True, slots=True)
class End:
    """End the engine's process, for this reason."""

    blame: str


Action = Tell | End


def step(state: State, seen: Seen, now: float) -> tuple[State, tuple[Action, ...]]:
    """Judge one poll; `now` in seconds of a clock that never jumps."""
    level = Level.UNKNOWN if seen.engine is None else arithmetic.level(seen.memory)
    if seen.engine != state.engine:
        state = replace(state, engine=seen.engine, over=0, asked=0, ended=None)
    late = now - state.looked_at > LATE
    state = replace(state, polls=state.polls + 1, level=level, looked_at=now)
    if level is Level.UNKNOWN:
        return state if seen.engine is None or seen.memory.phys is None else replace(state, over=0, asked=0), ()
    if level is not Level.OVER_HARD:
        return replace(state, over=0, asked=0), _soft(state, seen)
    state = replace(state, over=state.over + 1, over_caps=state.over_caps + (state.over == 0))
    if state.over == 1 or not seen.memory.guard:
        return state, _soft(state, seen)
    return _hard(state, seen, now, late=late)


def _soft(state: State, seen: Seen) -> tuple[Action, ...]:
    if state.level < Level.OVER_SOFT or not seen.memory.guard:
        return ()
    return (Tell(Enforce(state.polls, Level.OVER_SOFT)),)


def _hard(state: State, seen: Seen, now: float, *, late: bool) -> tuple[State, tuple[Action, ...]]:
    if state.engine == state.ended:
        return state, ()
    if state.asked <= seen.enforced:
        order = Enforce(state.polls, Level.OVER_HARD, arithmetic.excess(seen.memory))
        return replace(state, asked=state.polls, asked_at=now), (Tell(order),)
    if late or now - state.asked_at < PERIOD or now < seen.call_until:
        return state, ()
    over, line = arithmetic.excess(seen.memory), arithmetic.hard_line(seen.memory)
    blame = f"over its cap: {show_size(line + over)} of {show_size(line)} on two readings, and it did not answer"
    return replace(state, ended=state.engine, kills=state.kills + 1), (End(blame),)


def pause(state: State, *, busy: bool, loaded: bool) -> float:
    """Give the seconds until the next poll."""
    if busy or state.over:
        return BUSY
    return IDLE if loaded else EMPTY

"""State machine of the node's connection to the coordinator, as data: events in, the next state out. Pure.

The machine decides when to dial and how long to wait before that, also around sleep, denial and stop. It knows no
addresses and certificates (`link_keeper`), and no requests on links (`links`).

    dialing ─(opened)─► connected ─(welcome)─► linked ─(closed)─► waiting ─(delay over)─► dialing
       └─(no coordinator found)─► waiting      └──────(closed)──────▲
    any ─(the machine sleeps)─► asleep ─(awake)─► dialing      any ─(denied for good)─► expelled      any ─► stopped
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from wire.state_machine import IllegalEventError, InvariantError

DIAL_DELAYS_SECONDS = (0.5, 30.0)
"""First and maximum delay between two rounds of dialing, in seconds.

Each delay is multiplied by a random factor from 0.5 to 1.5.
"""


class LinkState(StrEnum):
    """State of the connection to the coordinator."""

    DIALING = "dialing"
    """No connection; the node dials the coordinator, or searches for it."""
    CONNECTED = "connected"
    """A connection is open, and the coordinator has not accepted it yet."""
    LINKED = "linked"
    """The coordinator has accepted the connection."""
    WAITING = "waiting"
    """No connection; the next round of dialing follows after a delay."""
    ASLEEP = "asleep"
    """The machine sleeps or is about to sleep; the node does not dial."""
    EXPELLED = "expelled"
    """The coordinator denied this node for good."""
    STOPPED = "stopped"
    """The agent stops; the node dials no more."""


@dataclass(frozen=True, slots=True)
class LinkLife:
    """State of the connection, with the delays of the next rounds of dialing in seconds."""

    state: LinkState = LinkState.DIALING
    next_delay: float = DIAL_DELAYS_SECONDS[0]
    """Seconds of the next wait, before the random factor. The coordinator's acceptance sets it to the shortest."""
    retry_after: float = 0.0
    """Minimum seconds of the next wait, from the last denial (`Denied.retry_after`)."""
    wait: float = 0.0
    """Seconds of the current wait; 0 in other states."""

    def check(self) -> None:
        """Raise `InvariantError` if `wait` contradicts the state, or `next_delay` is not in `DIAL_DELAYS_SECONDS`."""
        if (self.wait > 0) != (self.state is LinkState.WAITING):
            raise InvariantError(f"a wait belongs to the state waiting: {self}")
        if not DIAL_DELAYS_SECONDS[0] <= self.next_delay <= DIAL_DELAYS_SECONDS[1]:
            raise InvariantError(f"a delay is out of its bounds: {self}")


# events


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """Event: a connection is open and its Hello is sent."""


@dataclass(frozen=True, slots=True)
class DialFailed:
    """Event: no coordinator was reached. `jitter` is random, from 0.5 to 1.5."""

    jitter: float = 1.0


@dataclass(frozen=True, slots=True)
class LinkAccepted:
    """Event: the coordinator accepted a connection."""


@dataclass(frozen=True, slots=True)
class LinkDenied:
    """Event: the coordinator denied the node, for good or for `retry_after` seconds."""

    final: bool = False
    retry_after: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """Event: the last connection has ended. `jitter` is random, from 0.5 to 1.5."""

    jitter: float = 1.0


@dataclass(frozen=True, slots=True)
class DelayOver:
    """Event: the wait before the next round of dialing is over."""


@dataclass(frozen=True, slots=True)
class SleepAnnounced:
    """Event: the machine is about to sleep."""


@dataclass(frozen=True, slots=True)
class WokeUp:
    """Event: the machine is awake."""


@dataclass(frozen=True, slots=True)
class LinkStop:
    """Event: the agent stops."""


Event = (
    LinkOpened | DialFailed | LinkAccepted | LinkDenied | LinkClosed | DelayOver | SleepAnnounced | WokeUp | LinkStop
)

_D, _C, _L, _W, _A, _E, _S = LinkState
_LIVE = (_D, _C, _L, _W, _A)
_OVERTAKEN = {state: frozenset({state}) for state in (_A, _E, _S)}
_FINAL = {_E: frozenset({_E}), _S: frozenset({_S})}

TABLE: Mapping[type, Mapping[LinkState, frozenset[LinkState]]] = {
    LinkOpened: {_D: frozenset({_C})} | _OVERTAKEN,
    DialFailed: {_D: frozenset({_W})} | _OVERTAKEN,
    LinkAccepted: {_C: frozenset({_L}), _L: frozenset({_L}), _D: frozenset({_D}), _W: frozenset({_W})} | _OVERTAKEN,
    LinkDenied: {state: frozenset({state, _E}) for state in _LIVE} | _FINAL,
    LinkClosed: {_C: frozenset({_W}), _L: frozenset({_W})} | _OVERTAKEN,
    DelayOver: {_W: frozenset({_D})} | _OVERTAKEN,
    SleepAnnounced: {state: frozenset({_A}) for state in _LIVE} | _FINAL,
    WokeUp: {state: frozenset({state}) for state in LinkState} | {_A: frozenset({_D})},
    LinkStop: {state: frozenset({_S}) for state in _LIVE} | _FINAL,
}
"""For each event: the states in which it is legal, and the states that may follow.

While a task dials, waits or watches a connection, the machine may fall asleep, be denied or stop. The event of the end
of such a task is then legal and changes nothing.
"""


def step(life: LinkLife, event: Event) -> LinkLife:
    """Apply one event. Return the new state. Raise `IllegalEventError` if `TABLE` does not allow the event.

    Raise `InvariantError` if the new state is not in `TABLE` or contradicts itself, which only a bug can cause.
    """
    allowed = TABLE[type(event)].get(life.state)
    if allowed is None:
        raise IllegalEventError(f"the link is {life.state}: {event} cannot happen")
    after = _apply(life, event)
    if after.state not in allowed:
        raise InvariantError(f"{life.state} -> {after.state} by {event} is not in the table")
    after.check()
    return after


def _apply(life: LinkLife, event: Event) -> LinkLife:
    final = life.state in (LinkState.EXPELLED, LinkState.STOPPED)
    overtaken = final or life.state is LinkState.ASLEEP
    match event:
        case LinkOpened() if not overtaken:
            return LinkLife(LinkState.CONNECTED, next_delay=life.next_delay)
        case DialFailed() | LinkClosed() if not overtaken:
            return _wait(life, event.jitter)
        case LinkAccepted() if life.state is LinkState.CONNECTED:
            return replace(life, state=LinkState.LINKED, next_delay=DIAL_DELAYS_SECONDS[0])
        case LinkDenied() if not final:
            return LinkLife(LinkState.EXPELLED) if event.final else replace(life, retry_after=event.retry_after)
        case DelayOver() if not overtaken:
            return replace(life, state=LinkState.DIALING, wait=0.0)
        case SleepAnnounced() if not final:
            return LinkLife(LinkState.ASLEEP)
        case WokeUp() if life.state is LinkState.ASLEEP:
            return LinkLife()
        case LinkStop() if not final:
            return LinkLife(LinkState.STOPPED)
        case _:
            return life


def _wait(life: LinkLife, jitter: float) -> LinkLife:
    wait = max(life.retry_after, life.next_delay * jitter)
    longer = min(life.next_delay * 2, DIAL_DELAYS_SECONDS[1])
    return LinkLife(LinkState.WAITING, next_delay=longer, wait=wait)

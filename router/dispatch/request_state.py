"""State machine of a request, as data: events in, actions out. The dispatcher performs the actions.

The state machine covers states and legal transitions, attempts and their order, losses and crashes, and releases at an
end. It does not cover the choice of a node (`router.placement`), the order of the queue (`router.admission.queue`), or
the text of an answer (`answer`). Tokens after the first ones change no state.

                       no room          ┌─────────┐ deadline
          NEW ◄───────────────────────► │ QUEUED  │
       placed │ ▲ refused, node lost    └────┬────┘
              ▼ │                            │ placed
           ┌──────┐ admitted ┌──────────┐    │
           │ SENT │ ───────► │ ADMITTED │    │
           └──────┘ ◄────────┼──────────┼────┘
              │ ▲            │ first    │
              │ │ moved      ▼ tokens   │
              │ └─────────┌───────────┐ │
              └─────────► │ STREAMING │ │       any state ── finished, denied, failed, cancelled ──► ENDED
                first     └───────────┘ │
                tokens

A request that no node can start may go from NEW to UPSTREAM (handed over), and from there only to ENDED.

Invariants
- A request has exactly one of a place in the queue (QUEUED), an attempt on a node (SENT, ADMITTED, STREAMING), and an
  outcome (ENDED). At an upstream (UPSTREAM) it has none of them. It is NEW only within one call of the dispatcher.
- An attempt has a reservation from `StartAttempt` to `Release`. While a move is in delivery (`origin`), the earlier
  attempt keeps its reservation.
- Numbers of attempts only grow. An event of an earlier attempt is ignored.
- ENDED is final: the outcome never changes, and the quota is settled once.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from router.dispatch.request import Outcome, RequestFailure
from router.dispatch.request_events import (
    Action,
    AttemptEnded,
    AttemptLost,
    CancelAttempt,
    CorrectHeadroom,
    DeadlinePassed,
    Delivered,
    Dequeue,
    EndRequest,
    Enqueue,
    Event,
    FirstTokens,
    HandedOver,
    HandOver,
    Moved,
    NodeAdmitted,
    NodeRefused,
    NoRoom,
    OfAttempt,
    Placed,
    PrefillDone,
    RecordPrompt,
    Release,
    RequestDenied,
    StartAttempt,
    Stopped,
    Undelivered,
    UpstreamEnded,
    Withdraw,
)
from router.placement.recovery import LossKind, can_recover
from wire.identity import NodeId
from wire.state_machine import IllegalEventError, InvariantError


class RequestState(StrEnum):
    """State of a request."""

    NEW = "new"
    """On no node and not queued, which lasts only within one call of the dispatcher."""
    QUEUED = "queued"
    """In the queue, without a node."""
    SENT = "sent"
    """Sent to a node that has neither admitted nor refused it."""
    ADMITTED = "admitted"
    """Admitted by its node, before the first token of this attempt."""
    STREAMING = "streaming"
    """On a node that has sent tokens in this attempt."""
    UPSTREAM = "upstream"
    """Handed over to an upstream."""
    ENDED = "ended"
    """Ended with an outcome."""


ON_NODE = frozenset({RequestState.SENT, RequestState.ADMITTED, RequestState.STREAMING})
"""States in which the request has an attempt on a node."""


class RequestLife(msgspec.Struct, frozen=True, gc=False):
    """State of one request and of its attempts. All times are in monotonic seconds."""

    since: float
    """Time at which the current state began."""
    state: RequestState = RequestState.NEW
    attempt: int = 0
    """Number of the current attempt; 0 if there is none."""
    node: NodeId | None = None
    """Node of the current attempt; None if there is none."""
    node_name: str = ""
    """Name of the node of the current attempt, or of the last one; empty before the first."""
    newest: int = 0
    """Highest attempt number so far; 0 before the first attempt."""
    attempts: int = 0
    """Number of attempts, including undelivered ones."""
    in_a_row: int = 0
    """Number of attempts since the arrival, the last wait in the queue, or the last loss. A move sets it to 1."""
    losses: int = 0
    """Number of losses of its node or of memory there, and of moves that count as a loss.

    A request recovers from at most `recovery.MAX_LOSSES` of them.
    """
    crashes: int = 0
    """Number of attempts that ended with a crash of the engine."""
    lost_by: RequestFailure | None = None
    """Cause of the newest `AttemptLost`, including a crash; None before the first.

    The queue never refuses a request that has a cause.
    """
    first_at: float | None = None
    """Time of the first token of any attempt; None before it."""
    origin: "RequestLife | None" = None
    """State before an attempt from the queue or from another node, until its frame is delivered; None otherwise."""
    outcome: Outcome | None = None
    """Outcome of the request; None before its end."""

    def check(self) -> None:
        """Raise `InvariantError` if two values contradict each other."""
        state = self.state
        wrong = [
            "attempt and state differ" * ((self.attempt != 0) != (state in ON_NODE)),
            "attempt without a node" * ((self.attempt != 0) != (self.node is not None)),
            "outcome and state differ" * ((self.outcome is not None) != (state is RequestState.ENDED)),
            "attempt is newer than the newest" * (self.attempt > self.newest),
            "fewer attempts than in a row" * (self.attempts < self.in_a_row),
            "a number without an attempt" * ((self.newest != 0) != (self.attempts != 0)),
            "in delivery but not sent" * (self.origin is not None and state is not RequestState.SENT),
            "a loss without a cause" * (self.crashes > 0 and self.lost_by is None),
            "streams without a first token" * (state is RequestState.STREAMING and self.first_at is None),
        ]
        if any(wrong):
            raise InvariantError(f"{', '.join(filter(None, wrong))}: {self}")


Step = tuple[RequestLife, tuple[Action, ...]]
_NEW, _QUEUED, _SENT, _ADMITTED, _STREAMING, _UPSTREAM, _ENDED = RequestState


def _map_states(states: frozenset[RequestState], *after: RequestState) -> dict[RequestState, frozenset[RequestState]]:
    return {state: frozenset(after) for state in states}


TABLE: Mapping[type[Event], Mapping[RequestState, frozenset[RequestState]]] = {
    Placed: {_NEW: frozenset({_SENT}), _QUEUED: frozenset({_SENT})},
    Moved: _map_states(ON_NODE, _SENT),
    Delivered: {_SENT: frozenset({_SENT})},
    Undelivered: {_SENT: frozenset({_NEW, _QUEUED, *ON_NODE})},
    NoRoom: {_NEW: frozenset({_QUEUED})},
    DeadlinePassed: {_QUEUED: frozenset({_NEW})},
    RequestDenied: {_NEW: frozenset({_ENDED}), _QUEUED: frozenset({_ENDED})},
    NodeAdmitted: {_SENT: frozenset({_ADMITTED})},
    NodeRefused: {_SENT: frozenset({_NEW}), _ADMITTED: frozenset({_NEW})},
    FirstTokens: {_SENT: frozenset({_STREAMING}), _ADMITTED: frozenset({_STREAMING})},
    AttemptLost: _map_states(ON_NODE, _NEW, _ENDED),
    AttemptEnded: _map_states(ON_NODE, _ENDED),
    HandedOver: {_NEW: frozenset({_UPSTREAM})},
    UpstreamEnded: {_UPSTREAM: frozenset({_ENDED})},
    Stopped: _map_states(frozenset(RequestState), _ENDED),
}
"""States in which each event is legal, each with the states that may follow."""


def step(life: RequestLife, event: Event, now: float) -> Step:
    """Apply one event to a request at `now` (monotonic seconds). Return its new life and the actions in order.

    An event of an earlier attempt is ignored. Raise `IllegalEventError` if `TABLE` does not allow the event in this
    state. Raise it also for an attempt that was never made, and for a new attempt without a higher number. Raise
    `InvariantError` if the new state is not in `TABLE`, which only a bug can cause.
    """
    kind = type(event)
    transitions, handle, of_attempt = _RULES[kind]
    if of_attempt:
        typed: Any = event
        attempt: int = typed.attempt
        if attempt != life.attempt:
            if attempt > life.newest:
                raise IllegalEventError(f"{kind.__name__} of attempt {attempt}, but the newest is {life.newest}")
            return life, ()
    allowed = transitions.get(life.state)
    if allowed is None:
        raise IllegalEventError(f"the request is {life.state}: {kind.__name__} cannot happen")
    if life.origin is not None and kind is not Undelivered and kind is not Delivered:
        delivered, early = _apply_delivered(life, event, now)  # any other event comes after the frame left
        after, actions = handle(delivered, event, now)
        actions = early + actions
    else:
        after, actions = handle(life, event, now)
    if after.state not in allowed:
        raise InvariantError(f"{life.state} -> {after.state} by {kind.__name__} is not in the table")
    return after, actions


def _apply_placed(life: RequestLife, event: Placed, now: float) -> Step:
    return _begin_attempt(life, event, now, life.in_a_row + 1, life.losses)


def _apply_moved(life: RequestLife, event: Moved, now: float) -> Step:
    return _begin_attempt(life, event, now, 1, life.losses + event.is_loss)


def _begin_attempt(life: RequestLife, event: Placed, now: float, in_a_row: int, losses: int) -> Step:
    if event.attempt <= life.newest:
        raise IllegalEventError(f"attempt {event.attempt} is not newer than {life.newest}")
    after = replace(
        life,
        state=_SENT,
        since=now,
        attempt=event.attempt,
        node=event.chosen.node,
        node_name=event.chosen.name,
        newest=event.attempt,
        attempts=life.attempts + 1,
        in_a_row=in_a_row,
        losses=losses,
        origin=None if life.state is _NEW else life,
    )
    first = not life.attempts
    return after, (StartAttempt(event, first),)


def _apply_delivered(life: RequestLife, _: Event, __: float) -> Step:
    origin = life.origin
    after = replace(life, origin=None)
    if origin is None:
        return after, ()
    if origin.node is None:
        return after, (Dequeue(),)
    return after, (Release(origin.node, origin.attempt), CancelAttempt(origin.node, origin.attempt))


def _apply_undelivered(life: RequestLife, _: Undelivered, now: float) -> Step:
    origin = life.origin
    if origin is None:
        return _leave_node(life, now), _release_attempt(life)
    after = replace(origin, newest=life.newest, attempts=life.attempts, in_a_row=life.in_a_row)
    return after, _release_attempt(life)


def _leave_node(life: RequestLife, now: float) -> RequestLife:
    return replace(life, state=_NEW, since=now, attempt=0, node=None, origin=None)


def _release_attempt(life: RequestLife) -> tuple[Action, ...]:
    return () if life.node is None else (Release(life.node, life.attempt),)


def _apply_no_room(life: RequestLife, event: NoRoom, now: float) -> Step:
    return replace(life, state=_QUEUED, since=now, in_a_row=0), (Enqueue(event.result),)


def _apply_deadline_passed(life: RequestLife, _: DeadlinePassed, now: float) -> Step:
    return replace(life, state=_NEW, since=now, in_a_row=0), (Dequeue(),)


def _apply_denied(life: RequestLife, event: RequestDenied, now: float) -> Step:
    return _end(life, event.outcome, now, ())


def _apply_admitted(life: RequestLife, event: NodeAdmitted, now: float) -> Step:
    node = life.node
    return replace(life, state=_ADMITTED, since=now), () if node is None else (RecordPrompt(node, event.frame),)


def _apply_refused(life: RequestLife, event: NodeRefused, now: float) -> Step:
    actions = _release_attempt(life)
    if event.headroom is not None and life.node is not None:
        actions += (CorrectHeadroom(life.node, event.headroom),)
    return _leave_node(life, now), actions


def _apply_first_tokens(life: RequestLife, event: FirstTokens, now: float) -> Step:
    node, first = life.node, life.first_at is None
    after = replace(life, state=_STREAMING, since=now, first_at=now if first else life.first_at)
    return after, () if node is None else (PrefillDone(node, event.attempt, first),)


def _apply_lost(life: RequestLife, event: AttemptLost, now: float) -> Step:
    is_loss = event.kind in (LossKind.NODE, LossKind.MEMORY)
    counted = replace(
        life,
        losses=life.losses + is_loss,
        crashes=life.crashes + (not is_loss),
        lost_by=event.cause,
        in_a_row=0,
    )
    if not can_recover(event.kind, counted.losses, counted.crashes):
        return _end(counted, event.cause, now, _release_attempt(life))
    if event.stranded is not None:
        return _end(counted, event.stranded, now, _release_attempt(life))
    return _leave_node(counted, now), _release_attempt(life)


def _apply_attempt_ended(life: RequestLife, event: AttemptEnded, now: float) -> Step:
    return _end(life, event.outcome, now, _release_attempt(life))


def _apply_handed_over(life: RequestLife, event: HandedOver, now: float) -> Step:
    return replace(life, state=_UPSTREAM, since=now), (HandOver(event.upstream),)


def _apply_upstream_ended(life: RequestLife, event: UpstreamEnded, now: float) -> Step:
    return _end(life, event.outcome, now, ())


def _apply_stopped(life: RequestLife, event: Stopped, now: float) -> Step:
    if life.state is _ENDED:
        return life, ()
    if life.node is None:
        return _end(life, event.outcome, now, ())
    return _end(life, event.outcome, now, (CancelAttempt(life.node, life.attempt), *_release_attempt(life)))


def _end(life: RequestLife, outcome: Outcome, now: float, actions: tuple[Action, ...]) -> Step:
    if life.state is _QUEUED:
        actions = (Withdraw(),)
    after = replace(life, state=_ENDED, since=now, attempt=0, node=None, origin=None, outcome=outcome)
    return after, (*actions, EndRequest(outcome))


Handler = Callable[[RequestLife, Any, float], Step]
_HANDLERS: Mapping[type[Event], Handler] = {
    Placed: _apply_placed,
    Moved: _apply_moved,
    Delivered: _apply_delivered,
    Undelivered: _apply_undelivered,
    NoRoom: _apply_no_room,
    DeadlinePassed: _apply_deadline_passed,
    RequestDenied: _apply_denied,
    NodeAdmitted: _apply_admitted,
    NodeRefused: _apply_refused,
    FirstTokens: _apply_first_tokens,
    AttemptLost: _apply_lost,
    AttemptEnded: _apply_attempt_ended,
    HandedOver: _apply_handed_over,
    UpstreamEnded: _apply_upstream_ended,
    Stopped: _apply_stopped,
}
_RULES: Mapping[type[Event], tuple[Mapping[RequestState, frozenset[RequestState]], Handler, bool]] = {
    kind: (TABLE[kind], handle, issubclass(kind, OfAttempt)) for kind, handle in _HANDLERS.items()
}
"""Rule of each event: its row of `TABLE`, its handler, and whether it is an event of one attempt."""

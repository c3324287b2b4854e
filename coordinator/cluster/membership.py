"""Who is in the pool and how alive: the state machine, as data. Events in, actions out; the shell obeys.

Covers: states and legal transitions, silence, hysteresis, newest link wins, self-suspicion, forgetting.
Does not cover: who may connect (certificate and deny list: the link server), what is stored (store.py), what a node
can serve (registry.py).

    joining ──first report──► ready ◄──────► draining, paused  (the report says so)
                                │  3 s without a report, no new work
                                ▼
                             suspect ──two reports in a row──► ready, draining or paused
                                │  10 s without a report
                                ▼
    end of the connection ──► lost     goodbye: asleep, left, or lost ("stopped")     a new link ──► joining

Rules that nobody may break
- Liveness is the link and its reports on the receiver's clock; `now` is monotonic seconds and never goes back.
- Links are numbered upwards by the shell. What an older link says is ignored, so a late end of a replaced link cannot
  lose the node that is back already.
- One Tick moves a node one state at most. After a stall of our own loop the shell reads what waits in its sockets
  before it believes a silence.
- A member is kept for ever, greyed when lost. Only who is no member is forgotten, after 10 minutes, and never while
  the coordinator suspects itself: if half of the pool falls silent at once, it is more likely our own cable.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from wire.identity import NodeId

SUSPECT_AFTER = 3.0
"""Seconds without a report until a node gets no new work."""
LOST_AFTER = 10.0
"""Seconds without a report until the link is closed and its streams are resumed elsewhere."""
RETURN_AFTER = 2
"""Reports in a row (none SUSPECT_AFTER apart) that bring a suspect back."""
FORGET_AFTER = 600.0
"""Seconds that a node which is no member is still shown."""
TOGETHER = 5.0
"""Seconds within which falls count as one event."""


class State(StrEnum):
    """Where a node is in its life."""

    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    ASLEEP = "asleep"
    LOST = "lost"
    DRAINING = "draining"
    PAUSED = "paused"
    LEFT = "left"


LINKED = frozenset({State.READY, State.SUSPECT, State.DRAINING, State.PAUSED})
"""States that have a link; a joining node may have one."""
GONE = frozenset({State.ASLEEP, State.LOST, State.LEFT})
"""States that have none."""
ALIVE = frozenset({State.READY, State.DRAINING, State.PAUSED})


class Member(msgspec.Struct, frozen=True):  # replaced at every report: in C
    """One node. `link` 0: none; `newest` is the highest link number seen; `since` and `heard` in seconds of `now`.

    `heard` is the last report or connect, None before the first; `streak` counts reports in a row while suspect;
    `fell` is when a living node last fell silent, None once it is back or said goodbye; `reason` says why it is not
    ready, for people.
    """

    node: NodeId
    state: State
    since: float
    heard: float | None = None
    enrolled: bool = True
    cordoned: bool = False
    link: int = 0
    newest: int = 0
    instance: str = ""
    streak: int = 0
    reason: str = ""
    fell: float | None = None

    @property
    def placeable(self) -> bool:
        """Whether it may get new work."""
        return self.state is State.READY and not self.cordoned

    def check(self) -> None:
        """Raise `InvariantError` when a value contradicts another."""
        wrong = [
            "linked without a link" * (self.state in LINKED and not self.link),
            "gone with a link" * (self.state in GONE and bool(self.link)),
            "link is not the newest" * (bool(self.link) and self.link != self.newest),
            "left but enrolled" * (self.state is State.LEFT and self.enrolled),
            "counts reports but is not suspect" * (self.streak > 0 and self.state is not State.SUSPECT),
            "alive but never heard" * (self.state in LINKED and self.heard is None),
            "fell but is not missing" * (self.fell is not None and self.state not in (State.SUSPECT, State.LOST)),
        ]
        if any(wrong):
            raise InvariantError(f"{self.node}: {', '.join(filter(None, wrong))}: {self}")


class InvariantError(AssertionError):
    """An invariant does not hold: a bug of ours."""


class IllegalEventError(Exception):
    """This event cannot happen in this state: a bug of the shell, or a peer that should have been denied."""


# events


@dataclass(frozen=True, slots=True)
class Enrolled:
    """It was given a certificate and is a member from now on."""


@dataclass(frozen=True, slots=True)
class Connected:
    """A new link is through Hello. `takeover`: the second link of this instance, it replaces the first, which the
    node closes by itself when its requests have moved."""

    link: int
    instance: str
    takeover: bool = False


@dataclass(frozen=True, slots=True)
class Reported:
    """A report came."""

    link: int
    draining: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection ended without a goodbye."""

    link: int
    reason: str = "connection ended"


@dataclass(frozen=True, slots=True)
class SaidGoodbye:
    """It will close its link because it is `stopping`, `asleep` or wants to `leave`."""

    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class Cordoned:
    """A person wants no new work there."""


@dataclass(frozen=True, slots=True)
class Uncordoned:
    """A person wants work there again."""


@dataclass(frozen=True, slots=True)
class Removed:
    """A person took it out of the pool."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


OfLink = Connected | Reported | Disconnected | SaidGoodbye
Event = Enrolled | OfLink | Cordoned | Uncordoned | Removed | Tick


# actions


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close this link."""

    node: NodeId
    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class NodeGone:
    """What ran there through its link must be resumed elsewhere."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Changed:
    """What people and placement see of it is different now."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Forget:
    """It is no longer part of the pool value."""

    node: NodeId


Action = CloseLink | NodeGone | Changed | Forget
Step = tuple[Member, tuple[Action, ...]]

_J, _R, _S, _A, _L, _D, _P, _X = (
    State.JOINING, State.READY, State.SUSPECT, State.ASLEEP, State.LOST, State.DRAINING, State.PAUSED, State.LEFT,
)  # fmt: skip
_NOT_LEFT = (_J, _R, _S, _A, _L, _D, _P)
_TOLD = frozenset({_R, _D, _P})
"""States that a report can put a node in."""

TABLE: dict[type, dict[State, frozenset[State]]] = {
    Enrolled: {_J: frozenset({_J}), _R: frozenset({_R}), _S: frozenset({_S}), _D: frozenset({_D}),
               _P: frozenset({_P}), _A: frozenset({_J}), _L: frozenset({_J}), _X: frozenset({_J})},
    Connected: {state: frozenset({_J, state} if state in LINKED else {_J}) for state in _NOT_LEFT},
    Reported: {_J: _TOLD, _R: _TOLD, _D: _TOLD, _P: _TOLD, _S: _TOLD | {_S}},
    Disconnected: {state: frozenset({_L}) for state in (_J, _R, _S, _D, _P)},
    SaidGoodbye: {state: frozenset({_L, _A, _X}) for state in (_J, _R, _S, _D, _P)},
    Cordoned: {state: frozenset({state}) for state in _NOT_LEFT},
    Uncordoned: {state: frozenset({state}) for state in _NOT_LEFT},
    Removed: {state: frozenset({_X}) for state in _NOT_LEFT},
    Tick: {_J: frozenset({_J, _L}), _R: frozenset({_R, _S}), _D: frozenset({_D, _S}), _P: frozenset({_P, _S}),
           _S: frozenset({_S, _L}), _A: frozenset({_A}), _L: frozenset({_L}), _X: frozenset({_X})},
}  # fmt: skip
"""For each event the states in which it may happen and the states that may follow."""

_GOODBYE = {"asleep": (State.ASLEEP, "asleep"), "leave": (State.LEFT, "left")}
"""Anything else, also from a newer node, means that it stops."""


def step(member: Member, event: Event, now: float) -> Step:
    """Apply one event to one node. Raises IllegalEventError for what the table does not know."""
    if isinstance(event, OfLink) and _stale(member, event):
        return member, ()
    allowed = TABLE[type(event)].get(member.state)
    if allowed is None:
        raise IllegalEventError(f"{member.node} is {member.state}: {event} cannot happen")
    after, actions = _apply(member, event, now)
    if after.state not in allowed:
        raise InvariantError(f"{member.node}: {member.state} -> {after.state} by {event} is not in the table")
    after.check()
    return after, actions


def _stale(member: Member, event: OfLink) -> bool:
    if isinstance(event, Connected):
        if event.link <= member.newest:
            raise IllegalEventError(f"{member.node}: link {event.link} is not newer than {member.newest}")
        return False
    if event.link > member.newest:
        raise IllegalEventError(f"{member.node}: {event} of a link that never connected")
    return event.link != member.link


def _apply(member: Member, event: Event, now: float) -> Step:
    match event:
        case Enrolled():
            return _enrolled(member, now)
        case Connected():
            return _connected(member, event, now)
        case Reported():
            return _reported(member, event, now)
        case Disconnected():
            return _gone(member, State.LOST, event.reason, now, fell=member.state in ALIVE)
        case SaidGoodbye():
            state, reason = _GOODBYE.get(event.reason, (State.LOST, "stopped"))
            return _gone(member, state, reason, now, close=True)
        case Removed():
            return _gone(member, State.LEFT, "removed", now, close=True)
        case Cordoned() | Uncordoned():
            return _mark(member, cordoned=isinstance(event, Cordoned))
        case Tick():
            return _tick(member, now)


def _enrolled(member: Member, now: float) -> Step:
    if member.state not in GONE:
        return _seen(member, replace(member, enrolled=True))
    return _seen(member, replace(member, enrolled=True, state=State.JOINING, since=now, reason="", fell=None))


def _connected(member: Member, event: Connected, now: float) -> Step:
    took_over = event.takeover and member.link != 0 and event.instance == member.instance
    linked = replace(member, link=event.link, newest=event.link, instance=event.instance, heard=now)
    if took_over:
        return linked, (Changed(member.node),)
    after = replace(linked, state=State.JOINING, since=now, streak=0, reason="", fell=None)
    if not member.link:
        return after, (Changed(member.node),)
    node = member.node
    return after, (CloseLink(node, member.link, "replaced by a newer link"), NodeGone(node, "replaced"), Changed(node))


def _reported(member: Member, event: Reported, now: float) -> Step:
    heard = replace(member, heard=now)
    if member.state is State.SUSPECT:
        in_a_row = member.heard is not None and now < member.heard + SUSPECT_AFTER
        streak = member.streak + 1 if in_a_row else 1
        if streak < RETURN_AFTER:
            return replace(heard, streak=streak), ()
    state = State.PAUSED if event.paused else State.DRAINING if event.draining else State.READY
    since = member.since if state is member.state else now
    return _seen(member, replace(heard, state=state, since=since, streak=0, reason="", fell=None))


def _mark(member: Member, *, cordoned: bool) -> Step:
    return _seen(member, replace(member, cordoned=cordoned))


def _seen(before: Member, after: Member) -> Step:
    """Report a change only when something other than the time of the last report differs."""
    changed = replace(before, heard=after.heard) != after
    return after, (Changed(after.node),) if changed else ()


def _gone(member: Member, state: State, reason: str, now: float, *, close: bool = False, fell: bool = False) -> Step:
    """End the life of a node's link, if it has one, and say who must hear of it."""
    node = member.node
    after = replace(
        member, state=state, since=now, link=0, streak=0, reason=reason,
        enrolled=member.enrolled and state is not State.LEFT,
        fell=None if state is not State.LOST else now if fell else member.fell,
    )  # fmt: skip
    closing = (CloseLink(node, member.link, reason),) if close and member.link else ()
    gone = (NodeGone(node, reason),) if member.link else ()
    return after, (*closing, *gone, Changed(node))


def _tick(member: Member, now: float) -> Step:
    deadline = _deadline(member)
    if deadline is None or now < deadline or member.state in GONE:
        return member, ()
    if member.state in ALIVE:
        return _seen(member, replace(member, state=State.SUSPECT, since=now, reason="silent", fell=now))
    reason = f"silent for {LOST_AFTER:g} s" if member.link else "never connected"
    return _gone(member, State.LOST, reason, now, close=True)


def _deadline(member: Member) -> float | None:
    """Say when time alone will move it; None when it will not."""
    if member.state in GONE:
        return None if member.enrolled else member.since + FORGET_AFTER
    heard = member.since if member.heard is None or member.state is State.JOINING else member.heard
    return heard + (SUSPECT_AFTER if member.state in ALIVE else LOST_AFTER)


# the pool


class Pool(msgspec.Struct, frozen=True):
    """All nodes, and since when (seconds of `now`) the coordinator suspects itself, None when it does not."""

    members: Mapping[NodeId, Member] = msgspec.field(default_factory=dict[NodeId, Member])
    doubted: float | None = None

    @property
    def self_suspect(self) -> bool:
        """Whether so many fell silent at once that the fault is probably ours; shown, and nobody is forgotten."""
        return self.doubted is not None

    def check(self) -> None:
        """Raise `InvariantError` when any invariant does not hold."""
        for node, member in self.members.items():
            if node != member.node:
                raise InvariantError(f"{member.node} is kept as {node}")
            member.check()


def restored(nodes: Iterable[NodeId], now: float, cordoned: Iterable[NodeId] = ()) -> Pool:
    """Give the pool at the start of a coordinator: every stored member, lost until it connects."""
    marked = frozenset(cordoned)
    return Pool({
        node: Member(node, State.LOST, now, cordoned=node in marked, reason="not seen since the coordinator started")
        for node in nodes
    })  # fmt: skip


def advance(pool: Pool, node: NodeId, event: Event, now: float) -> tuple[Pool, tuple[Action, ...]]:
    """Apply one event about one node. An unknown node begins with Enrolled (a member) or Connected (none yet)."""
    member = pool.members.get(node)
    if member is None:
        if not isinstance(event, Enrolled | Connected):
            raise IllegalEventError(f"{node} is unknown: {event} cannot happen")
        member = Member(node, State.JOINING, now, enrolled=isinstance(event, Enrolled))
    after, actions = step(member, event, now)
    if node not in pool.members:
        actions = (Changed(node),)
    changed = replace(pool, members={**pool.members, node: after})
    same = (after.state, after.fell) == (member.state, member.fell)
    return (changed if same and pool.doubted is None else _doubt(changed, now)), actions


def tick(pool: Pool, now: float) -> tuple[Pool, tuple[Action, ...]]:
    """Let time pass for everybody; call it at `next_deadline`."""
    members: dict[NodeId, Member] = {}
    actions: list[Action] = []
    for node, member in pool.members.items():
        after, due = step(member, Tick(), now)
        members[node] = after
        actions += due
    after = _doubt(replace(pool, members=members), now)
    forgotten = [] if after.self_suspect else [node for node, member in members.items() if _forgettable(member, now)]
    kept = {node: member for node, member in members.items() if node not in forgotten}
    return replace(after, members=kept), (*actions, *(Forget(node) for node in forgotten))


def next_deadline(pool: Pool, now: float) -> float | None:
    """Say when `tick` will next do something (seconds of `now`, not before it); None when time changes nothing."""
    forgetting = not pool.self_suspect
    deadlines = [
        deadline
        for member in pool.members.values()
        if (deadline := _deadline(member)) is not None and (forgetting or member.state not in GONE)
    ]
    if pool.doubted is not None:
        deadlines.append(pool.doubted + FORGET_AFTER)
    return max(now, min(deadlines)) if deadlines else None


def _forgettable(member: Member, now: float) -> bool:
    deadline = _deadline(member)
    return member.state in GONE and deadline is not None and now >= deadline


def _doubt(pool: Pool, now: float) -> Pool:
    """Suspect ourselves when at least half of two or more living nodes fell within TOGETHER seconds; stop when fewer
    than half of them are still missing, or after FORGET_AFTER: by then it is theirs, or somebody has looked."""
    since = now if pool.doubted is None else pool.doubted
    fallen = sum(1 for member in pool.members.values() if member.fell is not None and member.fell >= since - TOGETHER)
    whole = fallen + sum(1 for member in pool.members.values() if member.state in ALIVE)
    half = whole >= 2 and 2 * fallen >= whole
    if pool.doubted is None:
        return replace(pool, doubted=now) if half else pool
    return pool if half and now < pool.doubted + FORGET_AFTER else replace(pool, doubted=None)

"""State machine of membership and liveness, as data: events in, actions out. The caller performs the actions.

Covers: states and legal transitions, silence, hysteresis, newest link wins, self-suspicion, deletion of former nodes.
Does not cover: permission to connect (certificate and deny list: the link server), storage (`state.database`),
capabilities of a node (`cluster.registry`).

    joining ──first report──► ready ◄──────► draining, paused  (set by the report)
                                │  3 s without a report, no new work
                                ▼
                             suspect ──two reports in a row──► ready, draining or paused
                                │  10 s without a report
                                ▼
    end of the connection ──► lost     goodbye: asleep, left, or lost ("stopped")     a new link ──► joining

Invariants
- A node is alive if its link and its reports are, by the receiver's clock. `now` is monotonic seconds.
- The caller numbers links upwards. Events of an older link are ignored: the late end of a replaced link must
  not mark a node lost that is already back.
- One `MembershipTick` moves a node by one state at most. After a stall of its loop, the caller reads its sockets
  first, and then handles silence.
- A member is never deleted, also if lost. A node that is not a member is deleted after 10 minutes.
- No node is deleted while the coordinator suspects itself. If half of the pool falls silent at once, the
  coordinator's own network is the likelier cause.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from wire.frames import GoodbyeReason
from wire.identity import NodeId
from wire.node_state import ALIVE, GONE, LINKED, NodeState
from wire.state_machine import IllegalEventError, InvariantError

SUSPECT_AFTER_SECONDS = 3.0
"""Seconds without a report until a node gets no new work."""
LOST_AFTER_SECONDS = 10.0
"""Seconds without a report until the link is closed and the requests of the node are resumed on other nodes."""
RETURN_AFTER_REPORTS = 2
"""Consecutive reports, each within `SUSPECT_AFTER_SECONDS` of the last, that end the state suspect."""
DELETE_AFTER_SECONDS = 600.0
"""Seconds for which a node that is not a member stays listed."""
CORRELATION_WINDOW_SECONDS = 5.0
"""Seconds within which losses of several nodes count as one event."""


class Member(msgspec.Struct, frozen=True):  # replaced at every report: in C
    """Membership and liveness of one node. All times are in monotonic seconds, as `now` of `step`."""

    node: NodeId
    state: NodeState
    since: float
    """Start of the current state."""
    last_report_at: float | None = None
    """Time of the last report or connect; None before the first."""
    enrolled: bool = True
    """Whether the node is a member."""
    cordoned: bool = False
    link: int = 0
    """Sequence number of the current link; 0 if there is none."""
    newest: int = 0
    """Highest link number seen."""
    instance: str = ""
    """Id of the agent process of the newest link."""
    streak: int = 0
    """Consecutive reports while suspect."""
    reason: str = ""
    """Why the node is not ready, as text for people."""
    silent_at: float | None = None
    """Time at which a living node became suspect or lost; None after its return or a goodbye."""

    @property
    def placeable(self) -> bool:
        """Whether placement may choose this node for new requests."""
        return self.state is NodeState.READY and not self.cordoned

    def check(self) -> None:
        """Raise `InvariantError` if two values of this member contradict each other."""
        wrong = [
            "linked without a link" * (self.state in LINKED and not self.link),
            "gone with a link" * (self.state in GONE and bool(self.link)),
            "link is not the newest" * (bool(self.link) and self.link != self.newest),
            "left but enrolled" * (self.state is NodeState.LEFT and self.enrolled),
            "counts reports but is not suspect" * (self.streak > 0 and self.state is not NodeState.SUSPECT),
            "alive without a report" * (self.state in LINKED and self.last_report_at is None),
            "fell but is not missing"
            * (self.silent_at is not None and self.state not in (NodeState.SUSPECT, NodeState.LOST)),
        ]
        if any(wrong):
            raise InvariantError(f"{self.node}: {', '.join(filter(None, wrong))}: {self}")


# events


@dataclass(frozen=True, slots=True)
class MemberEnrolled:
    """Event: the node received a certificate and is a member from now on."""


@dataclass(frozen=True, slots=True)
class MemberConnected:
    """Event: the Hello of a new link was accepted."""

    link: int
    instance: str
    takeover: bool = False
    """Whether this is the second link of the same instance. The node closes the first link after its requests have
    moved."""


@dataclass(frozen=True, slots=True)
class MemberReported:
    """Event: a report of the node arrived, with the node's own state."""

    link: int
    draining: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class MemberDisconnected:
    """Event: the connection of a link ended without a goodbye."""

    link: int
    reason: str = "connection ended"


@dataclass(frozen=True, slots=True)
class MemberGoodbye:
    """Event: the node will close its link. `reason` is `stopping`, `asleep` or `leave`."""

    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class MemberCordoned:
    """Event: a person excluded the node from new work."""


@dataclass(frozen=True, slots=True)
class MemberUncordoned:
    """Event: a person admitted the node to new work again."""


@dataclass(frozen=True, slots=True)
class MemberRemoved:
    """Event: a person removed the node from the pool."""


@dataclass(frozen=True, slots=True)
class MembershipTick:
    """Event: time has passed. The deadlines of the node are checked."""


LinkEvent = MemberConnected | MemberReported | MemberDisconnected | MemberGoodbye
Event = MemberEnrolled | LinkEvent | MemberCordoned | MemberUncordoned | MemberRemoved | MembershipTick


# actions


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Action: close this link."""

    node: NodeId
    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class ResumeRequests:
    """Action: resume the requests of this node's link on other nodes."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class PublishMember:
    """Action: publish the node, because a value that people or placement see has changed."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class DeleteMember:
    """Action: delete all data of the node, because the pool no longer contains the node."""

    node: NodeId


Action = CloseLink | ResumeRequests | PublishMember | DeleteMember
Step = tuple[Member, tuple[Action, ...]]

_J, _R, _S, _A, _L, _D, _P, _X = (
    NodeState.JOINING,
    NodeState.READY,
    NodeState.SUSPECT,
    NodeState.ASLEEP,
    NodeState.LOST,
    NodeState.DRAINING,
    NodeState.PAUSED,
    NodeState.LEFT,
)
_NOT_LEFT = (_J, _R, _S, _A, _L, _D, _P)
_REPORTED = frozenset({_R, _D, _P})
"""States that a report can set."""

TABLE: dict[type, dict[NodeState, frozenset[NodeState]]] = {
    MemberEnrolled: {
        _J: frozenset({_J}),
        _R: frozenset({_R}),
        _S: frozenset({_S}),
        _D: frozenset({_D}),
        _P: frozenset({_P}),
        _A: frozenset({_J}),
        _L: frozenset({_J}),
        _X: frozenset({_J}),
    },
    MemberConnected: {state: frozenset({_J, state} if state in LINKED else {_J}) for state in _NOT_LEFT},
    MemberReported: {_J: _REPORTED, _R: _REPORTED, _D: _REPORTED, _P: _REPORTED, _S: _REPORTED | {_S}},
    MemberDisconnected: {state: frozenset({_L}) for state in (_J, _R, _S, _D, _P)},
    MemberGoodbye: {state: frozenset({_L, _A, _X}) for state in (_J, _R, _S, _D, _P)},
    MemberCordoned: {state: frozenset({state}) for state in _NOT_LEFT},
    MemberUncordoned: {state: frozenset({state}) for state in _NOT_LEFT},
    MemberRemoved: {state: frozenset({_X}) for state in _NOT_LEFT},
    MembershipTick: {
        _J: frozenset({_J, _L}),
        _R: frozenset({_R, _S}),
        _D: frozenset({_D, _S}),
        _P: frozenset({_P, _S}),
        _S: frozenset({_S, _L}),
        _A: frozenset({_A}),
        _L: frozenset({_L}),
        _X: frozenset({_X}),
    },
}
"""For each event: the states in which it is legal, and the states that may follow."""

_GOODBYE: Mapping[str, tuple[NodeState, str]] = {
    GoodbyeReason.ASLEEP: (NodeState.ASLEEP, "asleep"),
    GoodbyeReason.LEAVE: (NodeState.LEFT, "left"),
}
"""State and reason by goodbye. Any other reason, also from a newer node, means that the node stops."""


def step(member: Member, event: Event, now: float) -> Step:
    """Apply one event to one node at `now` (monotonic seconds). Return the new membership and the actions in order.

    Ignore an event of an older link. Raise `IllegalEventError` if `TABLE` does not allow the event in the node's state.
    Raise the same for an event of an unknown link, and for a new link without a higher number.
    """
    if isinstance(event, LinkEvent) and _is_stale(member, event):
        return member, ()
    allowed = TABLE[type(event)].get(member.state)
    if allowed is None:
        raise IllegalEventError(f"{member.node} is {member.state}: {event} cannot happen")
    after, actions = _apply(member, event, now)
    if after.state not in allowed:
        raise InvariantError(f"{member.node}: {member.state} -> {after.state} by {event} is not in the table")
    after.check()
    return after, actions


def _is_stale(member: Member, event: LinkEvent) -> bool:
    if isinstance(event, MemberConnected):
        if event.link <= member.newest:
            raise IllegalEventError(f"{member.node}: link {event.link} is not newer than {member.newest}")
        return False
    if event.link > member.newest:
        raise IllegalEventError(f"{member.node}: {event} of a link that never connected")
    return event.link != member.link


def _apply(member: Member, event: Event, now: float) -> Step:
    match event:
        case MemberEnrolled():
            return _apply_enrolled(member, now)
        case MemberConnected():
            return _apply_connected(member, event, now)
        case MemberReported():
            return _apply_reported(member, event, now)
        case MemberDisconnected():
            return _end_link(member, NodeState.LOST, event.reason, now, was_alive=member.state in ALIVE)
        case MemberGoodbye():
            state, reason = _GOODBYE.get(event.reason, (NodeState.LOST, "stopped"))
            return _end_link(member, state, reason, now, close=True)
        case MemberRemoved():
            return _end_link(member, NodeState.LEFT, "removed", now, close=True)
        case MemberCordoned() | MemberUncordoned():
            return _set_cordoned(member, cordoned=isinstance(event, MemberCordoned))
        case MembershipTick():
            return _apply_tick(member, now)


def _apply_enrolled(member: Member, now: float) -> Step:
    if member.state not in GONE:
        return _publish_if_changed(member, replace(member, enrolled=True))
    return _publish_if_changed(
        member, replace(member, enrolled=True, state=NodeState.JOINING, since=now, reason="", silent_at=None)
    )


def _apply_connected(member: Member, event: MemberConnected, now: float) -> Step:
    took_over = event.takeover and member.link != 0 and event.instance == member.instance
    linked = replace(member, link=event.link, newest=event.link, instance=event.instance, last_report_at=now)
    if took_over:
        return linked, (PublishMember(member.node),)
    after = replace(linked, state=NodeState.JOINING, since=now, streak=0, reason="", silent_at=None)
    if not member.link:
        return after, (PublishMember(member.node),)
    node = member.node
    return after, (
        CloseLink(node, member.link, "replaced by a newer link"),
        ResumeRequests(node, "replaced"),
        PublishMember(node),
    )


def _apply_reported(member: Member, event: MemberReported, now: float) -> Step:
    reported = replace(member, last_report_at=now)
    if member.state is NodeState.SUSPECT:
        in_a_row = member.last_report_at is not None and now < member.last_report_at + SUSPECT_AFTER_SECONDS
        streak = member.streak + 1 if in_a_row else 1
        if streak < RETURN_AFTER_REPORTS:
            return replace(reported, streak=streak), ()
    state = NodeState.PAUSED if event.paused else NodeState.DRAINING if event.draining else NodeState.READY
    since = member.since if state is member.state else now
    return _publish_if_changed(member, replace(reported, state=state, since=since, streak=0, reason="", silent_at=None))


def _set_cordoned(member: Member, *, cordoned: bool) -> Step:
    return _publish_if_changed(member, replace(member, cordoned=cordoned))


def _publish_if_changed(before: Member, after: Member) -> Step:
    """Return `after`, with `PublishMember` if more than the time of the last report differs from `before`."""
    changed = replace(before, last_report_at=after.last_report_at) != after
    return after, (PublishMember(after.node),) if changed else ()


def _end_link(
    member: Member, state: NodeState, reason: str, now: float, *, close: bool = False, was_alive: bool = False
) -> Step:
    """End a node's link, if any, and return the actions that follow."""
    node = member.node
    after = replace(
        member,
        state=state,
        since=now,
        link=0,
        streak=0,
        reason=reason,
        enrolled=member.enrolled and state is not NodeState.LEFT,
        silent_at=None if state is not NodeState.LOST else now if was_alive else member.silent_at,
    )
    closing = (CloseLink(node, member.link, reason),) if close and member.link else ()
    gone = (ResumeRequests(node, reason),) if member.link else ()
    return after, (*closing, *gone, PublishMember(node))


def _apply_tick(member: Member, now: float) -> Step:
    deadline = _compute_deadline(member)
    if deadline is None or now < deadline or member.state in GONE:
        return member, ()
    if member.state in ALIVE:
        return _publish_if_changed(
            member, replace(member, state=NodeState.SUSPECT, since=now, reason="silent", silent_at=now)
        )
    reason = f"silent for {LOST_AFTER_SECONDS:g} s" if member.link else "never connected"
    return _end_link(member, NodeState.LOST, reason, now, close=True)


def _compute_deadline(member: Member) -> float | None:
    """Return the time at which time alone changes the state; None if never."""
    if member.state in GONE:
        return None if member.enrolled else member.since + DELETE_AFTER_SECONDS
    reported_at = (
        member.since if member.last_report_at is None or member.state is NodeState.JOINING else member.last_report_at
    )
    return reported_at + (SUSPECT_AFTER_SECONDS if member.state in ALIVE else LOST_AFTER_SECONDS)


# the pool


class Membership(msgspec.Struct, frozen=True):
    """Membership of all nodes of the pool, by node id."""

    members: Mapping[NodeId, Member] = msgspec.field(default_factory=dict[NodeId, Member])
    self_suspect_since: float | None = None
    """Monotonic time since which the coordinator suspects its own network; None if it does not."""

    @property
    def self_suspect(self) -> bool:
        """Whether half of the living nodes fell silent at once. The coordinator's own network is the likely cause, and
        no node is deleted."""
        return self.self_suspect_since is not None

    def check(self) -> None:
        """Raise `InvariantError` if the values of any member contradict each other."""
        for node, member in self.members.items():
            if node != member.node:
                raise InvariantError(f"{member.node} is kept as {node}")
            member.check()


def restore_membership(nodes: Iterable[NodeId], now: float, cordoned: Iterable[NodeId] = ()) -> Membership:
    """Return the pool at the start of a coordinator, at `now` (monotonic seconds).

    The stored members `nodes` are lost until they connect. `cordoned` are the members excluded from new work.
    """
    marked = frozenset(cordoned)
    return Membership(
        {
            node: Member(
                node, NodeState.LOST, now, cordoned=node in marked, reason="not seen since the coordinator started"
            )
            for node in nodes
        }
    )


def advance(pool: Membership, node: NodeId, event: Event, now: float) -> tuple[Membership, tuple[Action, ...]]:
    """Apply one event about one node at `now` (monotonic seconds). Return the new pool and the actions in order.

    An unknown node begins with `MemberEnrolled` (a member) or `MemberConnected` (not yet a member). Raise
    `IllegalEventError` for any other event of an unknown node, and as `step`.
    """
    member = pool.members.get(node)
    if member is None:
        if not isinstance(event, MemberEnrolled | MemberConnected):
            raise IllegalEventError(f"{node} is unknown: {event} cannot happen")
        member = Member(node, NodeState.JOINING, now, enrolled=isinstance(event, MemberEnrolled))
    after, actions = step(member, event, now)
    if node not in pool.members:
        actions = (PublishMember(node),)
    changed = replace(pool, members={**pool.members, node: after})
    same = (after.state, after.silent_at) == (member.state, member.silent_at)
    return (changed if same and pool.self_suspect_since is None else _update_self_suspicion(changed, now)), actions


def tick(pool: Membership, now: float) -> tuple[Membership, tuple[Action, ...]]:
    """Apply the transitions of all nodes that are due at `now` (monotonic seconds). Call it at `next_deadline`.

    Return the new pool and the actions in order.
    """
    members: dict[NodeId, Member] = {}
    actions: list[Action] = []
    for node, member in pool.members.items():
        after, due = step(member, MembershipTick(), now)
        members[node] = after
        actions += due
    after = _update_self_suspicion(replace(pool, members=members), now)
    deleted = [] if after.self_suspect else [node for node, member in members.items() if _is_deletable(member, now)]
    remaining = {node: member for node, member in members.items() if node not in deleted}
    return replace(after, members=remaining), (*actions, *(DeleteMember(node) for node in deleted))


def next_deadline(pool: Membership, now: float) -> float | None:
    """Return the monotonic time at which `tick` is due next, not before `now`. None if time changes nothing."""
    may_delete = not pool.self_suspect
    deadlines = [
        deadline
        for member in pool.members.values()
        if (deadline := _compute_deadline(member)) is not None and (may_delete or member.state not in GONE)
    ]
    if pool.self_suspect_since is not None:
        deadlines.append(pool.self_suspect_since + DELETE_AFTER_SECONDS)
    return max(now, min(deadlines)) if deadlines else None


def _is_deletable(member: Member, now: float) -> bool:
    deadline = _compute_deadline(member)
    return member.state in GONE and deadline is not None and now >= deadline


def _update_self_suspicion(pool: Membership, now: float) -> Membership:
    """Start or end the coordinator's suspicion of itself.

    It starts when at least half of two or more living nodes fell within `CORRELATION_WINDOW_SECONDS`. It ends
    when fewer than half of them are missing, or after `DELETE_AFTER_SECONDS`. By then the fault is the nodes',
    or a person has checked.
    """
    since = now if pool.self_suspect_since is None else pool.self_suspect_since
    fallen = sum(
        1
        for member in pool.members.values()
        if member.silent_at is not None and member.silent_at >= since - CORRELATION_WINDOW_SECONDS
    )
    total = fallen + sum(1 for member in pool.members.values() if member.state in ALIVE)
    half = total >= 2 and 2 * fallen >= total
    if pool.self_suspect_since is None:
        return replace(pool, self_suspect_since=now) if half else pool
    return (
        pool
        if half and now < pool.self_suspect_since + DELETE_AFTER_SECONDS
        else replace(pool, self_suspect_since=None)
    )

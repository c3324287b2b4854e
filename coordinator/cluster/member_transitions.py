"""State machine of one member and its liveness: events in, actions out. The caller performs the actions.

Covers: silence, hysteresis, newest link wins. `member_state` has the table of the legal transitions.
Does not cover: all members together, self-suspicion and deletion (`membership`), permission to connect
(`cluster.links.link_admission`), storage (`state.database`), capabilities of a node (`cluster.registry`).

    joining ──first report──► ready ◄──────► draining, paused  (set by the report)
                                │  3 s without a report, no new work
                                ▼
                             suspect ──two reports in a row──► ready, draining or paused
                                │  10 s without a report
                                ▼
    end of the connection ──► lost     goodbye: asleep, left, or lost ("stopped")     a new link ──► joining

Invariants
- A node is alive if its link is open and its reports arrive in time, by the receiver's clock. `now` is monotonic
  seconds.
- The caller gives each new link a higher number. Events of an older link are ignored: the late end of a replaced link
  must not mark a node lost that is already back.
- One `MembershipTick` moves a node by one state at most. After a stall of its loop, the caller reads its sockets
  first, and then handles silence.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from coordinator.cluster.member_state import (
    TABLE,
    CloseLink,
    Event,
    LinkEvent,
    Member,
    MemberConnected,
    MemberCordoned,
    MemberDisconnected,
    MemberEnrolled,
    MemberGoodbye,
    MemberRemoved,
    MemberReported,
    MembershipTick,
    MemberUncordoned,
    PublishMember,
    ResumeRequests,
    Step,
)
from wire.frames import GoodbyeReason
from wire.node_state import ALIVE, GONE, NodeState
from wire.state_machine import IllegalEventError, InvariantError

SUSPECT_AFTER_SECONDS = 3.0
"""Seconds without a report after which a ready, draining or paused node becomes suspect and gets no new work."""
LOST_AFTER_SECONDS = 10.0
"""Seconds without a report after which a node is lost: its link is closed, and other nodes resume its requests.

A node in the state joining is lost after this time in that state.
"""
RETURN_AFTER_REPORTS = 2
"""Number of consecutive reports, less than `SUSPECT_AFTER_SECONDS` apart, that end the state suspect."""
DELETE_AFTER_SECONDS = 600.0
"""Seconds for which a node that has left or was removed is still listed.

Also the maximum duration of the coordinator's suspicion of itself (`membership`).
"""

_GOODBYE: Mapping[str, tuple[NodeState, str]] = {
    GoodbyeReason.ASLEEP: (NodeState.ASLEEP, "asleep"),
    GoodbyeReason.LEAVE: (NodeState.LEFT, "left"),
}
"""State and reason by goodbye. Any other reason, also from a newer node, means that the node stops."""


def step(member: Member, event: Event, now: float) -> Step:
    """Apply one event to one node at `now` (monotonic seconds). Return the new state of the member and the actions.

    The actions are in the order in which the caller must perform them. An event of an older link is ignored. Raise
    `IllegalEventError` if `TABLE` does not allow the event in the node's state. Raise it also for an event of an
    unknown link, and for a new link without a higher number. Raise `InvariantError` if the new state is not in `TABLE`
    or contradicts itself, which only a bug can cause.
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
    """Return `after`, with `PublishMember` if more than the time of the newest report differs from `before`."""
    changed = replace(before, last_report_at=after.last_report_at) != after
    return after, (PublishMember(after.node),) if changed else ()


def _end_link(
    member: Member, state: NodeState, reason: str, now: float, *, close: bool = False, was_alive: bool = False
) -> Step:
    """End a node's link, if any, and change the node's state to `state`. Return the actions that follow.

    With `close`, the actions close the link. `was_alive`: the node falls silent now (`Member.silent_at`).
    """
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
    resuming = (ResumeRequests(node, reason),) if member.link else ()
    return after, (*closing, *resuming, PublishMember(node))


def _apply_tick(member: Member, now: float) -> Step:
    deadline = compute_deadline(member)
    if deadline is None or now < deadline or member.state in GONE:
        return member, ()
    if member.state in ALIVE:
        return _publish_if_changed(
            member, replace(member, state=NodeState.SUSPECT, since=now, reason="silent", silent_at=now)
        )
    reason = f"silent for {LOST_AFTER_SECONDS:g} s" if member.link else "never connected"
    return _end_link(member, NodeState.LOST, reason, now, close=True)


def compute_deadline(member: Member) -> float | None:
    """Return the monotonic time in seconds at which the node's next deadline passes and a `MembershipTick` is due.

    Return None for a member that is lost or asleep, which time does not change.
    """
    if member.state in GONE:
        return None if member.enrolled else member.since + DELETE_AFTER_SECONDS
    reported_at = (
        member.since if member.last_report_at is None or member.state is NodeState.JOINING else member.last_report_at
    )
    return reported_at + (SUSPECT_AFTER_SECONDS if member.state in ALIVE else LOST_AFTER_SECONDS)

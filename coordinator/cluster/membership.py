"""Membership of all nodes of the pool: transitions of each member, self-suspicion, and deletion. Pure.

Invariants
- A member is never deleted, even if it is lost. A node that is not a member is deleted after 10 minutes.
- No node is deleted while the coordinator suspects itself. If half of the pool falls silent at the same time, the
  coordinator's own network is the likelier cause.
"""

from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from coordinator.cluster.member_state import (
    Action,
    DeleteMember,
    Event,
    Member,
    MemberConnected,
    MemberEnrolled,
    MembershipTick,
    PublishMember,
)
from coordinator.cluster.member_transitions import DELETE_AFTER_SECONDS, compute_deadline, step
from wire.identity import NodeId
from wire.node_state import ALIVE, GONE, NodeState
from wire.state_machine import IllegalEventError, InvariantError

CORRELATION_WINDOW_SECONDS = 5.0
"""Seconds within which nodes must fall silent to count together for self-suspicion."""


class Membership(msgspec.Struct, frozen=True):
    """Membership of all nodes of the pool, by node id."""

    members: Mapping[NodeId, Member] = msgspec.field(default_factory=dict[NodeId, Member])
    self_suspect_since: float | None = None
    """Monotonic time in seconds since which the coordinator suspects its own network; None if it does not."""

    @property
    def self_suspect(self) -> bool:
        """Whether the coordinator suspects its own network. No node is deleted meanwhile."""
        return self.self_suspect_since is not None

    def check(self) -> None:
        """Raise `InvariantError` if the values of any member contradict each other, or if its key is not its id."""
        for node, member in self.members.items():
            if node != member.node:
                raise InvariantError(f"{member.node} is kept as {node}")
            member.check()


def restore_membership(nodes: Iterable[NodeId], now: float, cordoned: Iterable[NodeId] = ()) -> Membership:
    """Return the membership at the start of a coordinator, at `now` (monotonic seconds).

    `nodes` are the stored members, which are lost until they connect. `cordoned` are the members excluded from new
    work.
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
    """Apply one event about one node at `now` (monotonic seconds). Return the new membership and the actions in order.

    The first event of an unknown node is `MemberEnrolled` (a member) or `MemberConnected` (not yet a member). Raise
    `IllegalEventError` for any other event of an unknown node, and for an event that is illegal in the node's state.
    Raise `InvariantError` for a new state that only a bug can cause (`step`).
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
    """Apply the transitions of all nodes that are due at `now` (monotonic seconds). Call this at `next_deadline`.

    Delete the nodes that have not been members for `DELETE_AFTER_SECONDS`, unless the coordinator suspects itself.
    Return the new membership and the actions in order.
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
    """Return the monotonic time in seconds, not before `now`, at which `tick` is due; None if time changes nothing."""
    may_delete = not pool.self_suspect
    deadlines = [
        deadline
        for member in pool.members.values()
        if (deadline := compute_deadline(member)) is not None and (may_delete or member.state not in GONE)
    ]
    if pool.self_suspect_since is not None:
        deadlines.append(pool.self_suspect_since + DELETE_AFTER_SECONDS)
    return max(now, min(deadlines)) if deadlines else None


def _is_deletable(member: Member, now: float) -> bool:
    deadline = compute_deadline(member)
    return member.state in GONE and deadline is not None and now >= deadline


def _update_self_suspicion(pool: Membership, now: float) -> Membership:
    """Start or end the coordinator's suspicion of itself.

    It starts when at least half of two or more living nodes fell silent within `CORRELATION_WINDOW_SECONDS`. It ends
    when fewer than half of them are silent, or after `DELETE_AFTER_SECONDS`. After that time the nodes are assumed to
    be at fault.
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

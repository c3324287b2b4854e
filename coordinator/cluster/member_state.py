"""State of one member: values and invariants, events, actions, and the table of the legal transitions. Pure."""

from dataclasses import dataclass

import msgspec

from wire.identity import NodeId
from wire.node_state import GONE, LINKED, NodeState
from wire.state_machine import InvariantError

START_SECONDS = 20.0
"""Seconds after the start of the coordinator in which its members are expected to connect."""


class Member(msgspec.Struct, frozen=True):  # replaced at every report: in C
    """Membership and liveness of one node.

    All times are in monotonic seconds, from the same clock as `now` of `step`.
    """

    node: NodeId
    state: NodeState
    since: float
    """Monotonic time in seconds at which the current state began."""
    last_report_at: float | None = None
    """Monotonic time in seconds of the newest report or connection; None before the first."""
    enrolled: bool = True
    """Whether the node is a member."""
    cordoned: bool = False
    """Whether a person has excluded the node from new work."""
    link: int = 0
    """Sequence number of the current link; 0 if there is none."""
    newest: int = 0
    """Highest sequence number among all links of the node until now; 0 before the first."""
    instance: str = ""
    """Id of the agent process of the newest link; empty before the first link."""
    streak: int = 0
    """Consecutive reports while the node is suspect; 0 in any other state."""
    reason: str = ""
    """Why the node is suspect, lost, asleep or has left, as text for people; empty in any other state."""
    silent_at: float | None = None
    """Monotonic time in seconds at which a ready, draining or paused node fell silent or lost its connection.

    Kept until the node returns, sleeps or leaves; None otherwise.
    """

    @property
    def placeable(self) -> bool:
        """Whether the membership permits new requests on this node: the node is ready and not cordoned."""
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
    """Event: the node received a certificate, which makes it a member."""


@dataclass(frozen=True, slots=True)
class MemberConnected:
    """Event: the Hello of a new link was accepted. `instance` is the id of the node's process."""

    link: int
    instance: str
    takeover: bool = False
    """Whether this is a second link of the same instance. The node closes the first once its requests have moved."""


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
    """Event: a person cordoned the node, so that it gets no new work."""


@dataclass(frozen=True, slots=True)
class MemberUncordoned:
    """Event: a person ended the cordon of the node, so that it gets new work again."""


@dataclass(frozen=True, slots=True)
class MemberRemoved:
    """Event: a person removed the node from the pool."""


@dataclass(frozen=True, slots=True)
class MembershipTick:
    """Event: time has passed, and the deadlines of the node must be checked."""


LinkEvent = MemberConnected | MemberReported | MemberDisconnected | MemberGoodbye
Event = MemberEnrolled | LinkEvent | MemberCordoned | MemberUncordoned | MemberRemoved | MembershipTick


# actions


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Action: close the link with the number `link`. `reason` is a text for the log."""

    node: NodeId
    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class ResumeRequests:
    """Action: resume the requests of this node's link on other nodes. `reason` is why the link ended."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class PublishMember:
    """Action: publish the node, because a value that people or placement use has changed."""

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

"""Values, events and actions of the state machine of a pull (`pull_state`). Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from wire.frames import ModelOrderEnded, ModelOrderPhase, ModelOrderProgress
from wire.identity import NodeId
from wire.models.files import SourceKind
from wire.state_machine import InvariantError


class PullStage(StrEnum):
    """Stage of a pull on one node."""

    WAITING = "waiting"
    """The node has no open order for the files, and gets one later."""
    PULLING = "pulling"
    """The node has an open order for the files."""
    COMPLETED = "completed"
    """The node has all files."""
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({PullStage.COMPLETED, PullStage.FAILED, PullStage.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePull:
    """Pull on one node. Times are seconds of the controller's clock, sizes are bytes."""

    stage: PullStage = PullStage.WAITING
    order: int = 0
    """Number of the newest order; 0 before the first."""
    source: SourceKind = SourceKind.HUB
    """Source of the newest order. `SourceKind.MIRROR` also if the node reports that another pull of the same files, to
    which the order is attached, gets them from a mirror."""
    is_linked: bool = False
    unlinked_at: float = 0.0
    """Time at which the link was last lost, in seconds of the controller's clock."""
    phase: str = ""
    """Phase that the node reported last for its newest order; empty before a report, and without an open order."""
    done: int = 0
    """Bytes done in the phase, as the node last reported (`ModelOrderProgress.done`); after completion all bytes."""
    total: int = 0
    speed: float = 0.0
    """Bytes per second, as the node last reported; 0 without an open order."""
    fetched: int = 0
    """Bytes received over the network, in all orders."""
    earlier: int = 0
    """Part of `fetched` that belongs to earlier orders."""
    retries: int = 0
    """Number of retried orders since the last progress."""
    retry_at: float = 0.0
    """Time before which no order is sent, in seconds of the controller's clock; 0 if an order may be sent now."""
    rejects_mirror: bool = False
    """Whether a mirror sent wrong content to this node, or was lost too often. The node then gets the files from the
    hub."""
    code: str = ""
    """Code of the newest ended order; empty before the first end."""
    message: str = ""
    """Fault, for a person; empty without one."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """Mirror of a pull: the node that serves the files to the remaining nodes."""

    node: NodeId
    order: int
    """Number of the order to serve."""
    begun: float
    """Time at which the order to serve was sent, in seconds of the controller's clock."""
    addresses: tuple[str, ...] = ()
    """URLs at which the mirror listens; empty until the node has opened it."""


@dataclass(frozen=True, slots=True)
class PullState:
    """State of a pull: its nodes, and the mirror between them. `pull_state.step` changes it by events."""

    nodes: Mapping[NodeId, NodePull]
    """Pull on each node, by the id of the node."""
    next_order: int
    """Number of the next order of this pull."""
    mirror: Mirror | None = None
    """Mirror from which other nodes get the files; None without one."""
    no_mirror: frozenset[NodeId] = field(default_factory=frozenset[NodeId])
    """Nodes that could not open a mirror, or whose mirror failed."""

    @property
    def has_ended(self) -> bool:
        """Whether the pull has ended on every node."""
        return all(node.stage in ENDED for node in self.nodes.values())

    def check(self) -> None:
        """Raise `InvariantError` if two values contradict each other."""
        orders = [node.order for node in self.nodes.values() if node.order]
        orders += [self.mirror.order] if self.mirror else []
        wrong = [
            "an order number twice" * (len(orders) != len(set(orders))),
            "an order number from the future" * any(order >= self.next_order for order in orders),
            "pulling without an order" * any(is_pulling(member) and not member.order for member in self.nodes.values()),
            "a mirror after the end" * (self.has_ended and self.mirror is not None),
            "a mirror without files" * (self.mirror is not None and not has_files(self.nodes[self.mirror.node])),
            "two nodes download from the hub although a mirror is possible"
            * (
                len([member for member in self.nodes.values() if is_downloading(member) and not member.rejects_mirror])
                > 1
            )
            * (not self.no_mirror),
        ]
        if any(wrong):
            raise InvariantError(f"{', '.join(filter(None, wrong))}: {self}")


def is_pulling(node: NodePull) -> bool:
    """Return whether a node has an order to get the files."""
    return node.stage is PullStage.PULLING


def is_downloading(node: NodePull) -> bool:
    """Return whether a node gets the files from the hub."""
    return is_pulling(node) and node.source is SourceKind.HUB


def has_files(node: NodePull) -> bool:
    """Return whether a node can serve: it has all files, or reports that it downloads or verifies them from the hub.

    A node that follows a mirror never serves: two nodes could wait for each other.
    """
    return node.stage is PullStage.COMPLETED or (
        is_downloading(node) and node.phase in (ModelOrderPhase.DOWNLOADING, ModelOrderPhase.VERIFYING)
    )


def list_unfailed(state: PullState) -> frozenset[NodeId]:
    """Return the nodes on which a pull has not failed."""
    return frozenset(name for name, node in state.nodes.items() if node.stage is not PullStage.FAILED)


# events


@dataclass(frozen=True, slots=True)
class NodeLinked:
    """Event: a node has opened a link, possibly in place of an earlier one."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class NodeUnlinked:
    """Event: the link of a node is lost."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class PullNodeRemoved:
    """Event: a node is no member any more."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class OrderProgressed:
    """Event: a node reported progress of an order."""

    node: NodeId
    frame: ModelOrderProgress


@dataclass(frozen=True, slots=True)
class OrderEnded:
    """Event: an order of a node has ended."""

    node: NodeId
    frame: ModelOrderEnded


@dataclass(frozen=True, slots=True)
class PullCancelled:
    """Event: an administrator cancels the pull."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Event: a time of `pull_state.find_deadline` has come."""


Event = NodeLinked | NodeUnlinked | PullNodeRemoved | OrderProgressed | OrderEnded | PullCancelled | TimePassed


# actions


@dataclass(frozen=True, slots=True)
class SendPull:
    """Action: send PullModel to a node. `mirror` is the source if `source` is `SourceKind.MIRROR`; None for the hub."""

    node: NodeId
    order: int
    source: SourceKind
    mirror: Mirror | None = None


@dataclass(frozen=True, slots=True)
class SendServe:
    """Action: send ServeModel to a node. `order` is the number of the order."""

    node: NodeId
    order: int


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Action: send CancelModelOrder to a node. `order` is the number of the order to cancel."""

    node: NodeId
    order: int


@dataclass(frozen=True, slots=True)
class StorePull:
    """Action: write the pull to the disk."""


Action = SendPull | SendServe | SendCancel | StorePull
Step = tuple[PullState, tuple[Action, ...]]

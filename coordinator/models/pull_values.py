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
    """The node has no open order for the files, and will get one."""
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
    """Source of the newest order.

    It becomes `SourceKind.MIRROR` if the node reports that its order joined another pull of the same files, which gets
    them from a mirror.
    """
    is_linked: bool = False
    """Whether the node is currently linked."""
    unlinked_at: float = 0.0
    """Time at which the link was last lost, in seconds of the controller's clock."""
    phase: str = ""
    """Last reported phase of the newest order; empty before a report and without an open order."""
    done: int = 0
    """Completed bytes of the phase, as last reported (`ModelOrderProgress.done`); all bytes after completion."""
    total: int = 0
    """Bytes of `done` at the end of the phase, as last reported; 0 if unknown."""
    speed: float = 0.0
    """Bytes per second, as last reported; 0 without an open order."""
    fetched: int = 0
    """Bytes that the node received over the network, for all orders."""
    earlier: int = 0
    """Part of `fetched` that was received for earlier orders."""
    retries: int = 0
    """Number of retries since the last progress."""
    retry_at: float = 0.0
    """Time before which no order is sent, in seconds of the controller's clock; 0 if an order may be sent now."""
    rejects_mirror: bool = False
    """Whether the node gets the files from the hub only.

    The reason is that a mirror sent wrong content to this node, or was lost too often.
    """
    code: str = ""
    """Code of the newest ended order; empty before the first end."""
    message: str = ""
    """Fault, as text for a person; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """Mirror of a pull: the node that serves the files to the remaining nodes."""

    node: NodeId
    order: int
    """Number of the order to serve."""
    begun: float
    """Time at which the order to serve was sent, in seconds of the controller's clock."""
    addresses: tuple[str, ...] = ()
    """URLs at which the mirror listens; empty until the node has opened the mirror."""


@dataclass(frozen=True, slots=True)
class PullState:
    """State of a pull: its nodes, and the mirror between them. `pull_state.step` applies events to it."""

    nodes: Mapping[NodeId, NodePull]
    """Pull on each node, by the id of the node."""
    next_order: int
    """Number of the next order of this pull."""
    mirror: Mirror | None = None
    """Mirror from which other nodes get the files; None if there is none."""
    no_mirror: frozenset[NodeId] = field(default_factory=frozenset[NodeId])
    """Nodes that could not open a mirror, or whose mirror failed."""

    @property
    def has_ended(self) -> bool:
        """Whether the pull has ended on every node."""
        return all(node.stage in ENDED for node in self.nodes.values())

    def check(self) -> None:
        """Raise `InvariantError` if values contradict each other."""
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
    """Return whether a node has an open order to get the files."""
    return node.stage is PullStage.PULLING


def is_downloading(node: NodePull) -> bool:
    """Return whether a node is getting the files from the hub."""
    return is_pulling(node) and node.source is SourceKind.HUB


def has_files(node: NodePull) -> bool:
    """Return whether a node can serve files to other nodes.

    It can if it has all files, or if it reports that it downloads or verifies them from the hub. A node that gets the
    files from a mirror never serves, because two nodes could wait for each other.
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
    """Event: a node has opened a link, possibly in place of an older link."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class NodeUnlinked:
    """Event: the link of a node is lost."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class PullNodeRemoved:
    """Event: a node has left the pool."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class OrderProgressed:
    """Event: a node reported the progress of an order."""

    node: NodeId
    frame: ModelOrderProgress


@dataclass(frozen=True, slots=True)
class OrderEnded:
    """Event: an order of a node has ended."""

    node: NodeId
    frame: ModelOrderEnded


@dataclass(frozen=True, slots=True)
class PullCancelled:
    """Event: an administrator cancelled the pull."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Event: the time of `pull_state.find_deadline` has passed."""


Event = NodeLinked | NodeUnlinked | PullNodeRemoved | OrderProgressed | OrderEnded | PullCancelled | TimePassed


# actions


@dataclass(frozen=True, slots=True)
class SendPull:
    """Action: send PullModel to a node. `mirror` is the source with `SourceKind.MIRROR`; None with the hub."""

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

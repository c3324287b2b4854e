"""Metrics of the coordinator at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.models.wish_counters import WishSnapshot
from coordinator.video.metrics import VideoSnapshot
from router.dispatch.counters import Counters
from router.placement.cluster_view import ClusterView, NodeView
from wire.identity import NodeId
from wire.node_state import NodeState


@dataclass(frozen=True, slots=True)
class ProcessMetrics:
    """Metrics of the coordinator's process."""

    started: float
    """Start of the process, in Unix seconds."""
    cpu_seconds: float
    """CPU time of the process since its start, in seconds."""
    peak_bytes: int
    """Highest resident memory of the process since its start, in bytes."""
    open_files: int
    """Number of open file descriptors of the process."""
    max_files: int
    """Maximum number of open file descriptors of the process."""


@dataclass(frozen=True, slots=True)
class LinkCounts:
    """Numbers of connections of the cluster port."""

    open: int
    """Links that are open now, without links that a newer link of the same node has replaced."""
    unlinked: int
    """Open connections that are neither links nor relays."""
    linked: int
    """Links established since the start of the coordinator."""
    denied: int
    """Greetings (`Hello`) that the coordinator has denied since its start."""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Metrics of the coordinator at one moment."""

    version: str
    """Version of Macpool that the coordinator runs."""
    python: str
    """Version of Python that the coordinator runs on."""
    wall: float
    """Current time in Unix seconds."""
    now: float
    """Current time in seconds of the loop's clock."""
    view: ClusterView
    states: Mapping[str, int]
    """Number of members by state."""
    self_suspect: bool
    """Whether the coordinator suspects its own network (`Membership.self_suspect`)."""
    unwritten: int
    """Number of changes of the state that wait for the disk; 1 after writing has ended (`Database.count_unwritten`)."""
    counters: Counters
    keys: Mapping[str, str]
    """Names of valid API keys by id."""
    in_flight: Mapping[NodeId, int]
    """Number of requests on each node."""
    unacknowledged: Mapping[NodeId, int]
    """Bytes that are reserved and not in the node's report yet, by node."""
    leaks: int
    """Number of reservations and holds that belong to no request (`Dispatcher.count_leaks`)."""
    barred: frozenset[NodeId]
    """Nodes whose circuit breaker is open, or half open with a running probe."""
    opened_breakers: int
    """Number of times that a circuit breaker opened since the start of the coordinator."""
    waiting: int
    """Number of requests in the queue."""
    queue_limit: int
    """Maximum number of requests in the queue."""
    oldest_wait_seconds: float
    """Seconds for which the oldest queued request has waited; 0 if the queue is empty."""
    keys_refused: int
    """Number of requests with an unknown, wrong or expired API key (`KeyRing.refused`)."""
    certificates: Mapping[str, tuple[float, float]]
    """Validity of the coordinator's certificates: the times of issue and expiry in Unix seconds, by name."""
    node_certificates: Mapping[NodeId, tuple[float, float]]
    """Validity of each linked node's certificate: the times of issue and expiry in Unix seconds."""
    links: LinkCounts
    conditions: Mapping[str, bool]
    """Whether the condition of each alert rule is active, by the name of the rule."""
    process: ProcessMetrics
    video: VideoSnapshot
    wishes: WishSnapshot

    @property
    def members(self) -> tuple[NodeView, ...]:
        """Views of the nodes that have not left, whose names are unique.

        A node that has left is omitted, because a node that joins later may get the same name.
        """
        return tuple(node for node in self.view.nodes if node.state != NodeState.LEFT)

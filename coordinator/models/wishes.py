"""Values of the desired state: the wish for a model, the actions for it, and the plan of one round.

A round is one evaluation of all wishes by the reconciler.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from router.placement.cluster_view import ClusterView
from router.placement.reservations import ReservationLedger
from wire.identity import NodeId

MAX_REPLICAS = 1000
"""Maximum replicas of a wish. The API refuses a higher number with 400."""
MAX_EVICTION_COST = 1000
"""Maximum eviction cost of a wish. The API refuses a higher cost with 400."""
DEFAULT_EVICTION_COST = 10
"""Eviction cost of a wish if none is given. Lower costs are for models that should be evicted first."""


class Wish(msgspec.Struct, frozen=True):
    """Wanted replicas of a model, as an administrator has set them."""

    model: str
    replicas: int = 1
    labels: tuple[str, ...] = ()
    """Labels of which a node must have all to get a replica."""
    allow: tuple[NodeId, ...] = ()
    """Nodes that may load the model for this wish; empty allows all nodes."""
    deny: tuple[NodeId, ...] = ()
    """Nodes on which no action is taken for this wish."""
    idle_unload_seconds: float | None = None
    """Seconds without a request after which all replicas are unloaded, until the next request; None: never."""
    eviction_cost: int = DEFAULT_EVICTION_COST
    """Cost of unloading a replica, which only a wish with a higher cost may do to free memory.

    A surplus replica costs 0. Wishes with a higher cost are served first.
    """
    load_at_boot: bool = True
    """Whether replicas are loaded at the start of the coordinator; if false, after the first request for the model."""


class LoadWish(msgspec.Struct, frozen=True):
    """Action: load a model into free memory of a node."""

    node: NodeId
    name: str
    """Display name of the node."""
    model: str
    seconds: float = 0.0
    """Expected seconds of the load; 0 if unknown."""
    headroom: int = 0
    """Headroom of the node in bytes, from the report on which the action is based."""


class UnloadReason(StrEnum):
    """Reason why the reconciler unloads a model."""

    MEMORY = "memory"
    """Another wished model needs the memory."""
    IDLE = "idle"
    """The idle time of the wish has passed."""


class UnloadWish(msgspec.Struct, frozen=True):
    """Action: unload an unused model from a node."""

    node: NodeId
    name: str
    """Display name of the node."""
    model: str
    why: UnloadReason
    wanted: str = ""
    """Model that needs the memory; empty if `why` is `UnloadReason.IDLE`."""
    seconds: float = 0.0
    """Cost of the swap in seconds; 0 if `why` is `UnloadReason.IDLE`.

    It is the expected time to load `wanted` now, and later all models that are unloaded for it.
    """


WishAction = LoadWish | UnloadWish


class Shortfall(msgspec.Struct, frozen=True):
    """Reason why a wish is not met. `text` names the current actions, and the missing nodes or bytes."""

    model: str
    text: str


class WishState(msgspec.Struct, frozen=True):
    """State of one wish in a round."""

    wish: Wish
    wanted: int
    """Number of currently wanted replicas; 0 while the wish rests without requests."""
    ready: tuple[NodeId, ...] = ()
    """Nodes that have a replica and take requests."""
    coming: tuple[NodeId, ...] = ()
    """Nodes that are loading the model."""
    away: tuple[NodeId, ...] = ()
    """Absent nodes that had a replica, or may have one after the coordinator's start, and are expected back."""

    @property
    def met(self) -> bool:
        """Whether all wanted replicas are ready."""
        return len(self.ready) >= self.wanted


class PoolState(msgspec.Struct, frozen=True):
    """State of the pool that a round uses."""

    view: ClusterView
    ledger: ReservationLedger
    """Reservations and model swaps of the router."""
    now: float
    """Current time in monotonic seconds."""
    in_use: Mapping[NodeId, frozenset[str]] = msgspec.field(default_factory=dict[NodeId, frozenset[str]])
    """Models of the running requests, by node; empty if there are no wishes."""
    requested: frozenset[str] = frozenset()
    """Models of queued requests, and of requests that have ended since the last round."""

    def is_in_use(self, node: NodeId, model: str) -> bool:
        """Return whether a running request uses a model on a node."""
        return model in self.in_use.get(node, ())


class Plan(msgspec.Struct, frozen=True):
    """Result of one round: the actions to take now, the state of each wish, and the shortfall of each unmet wish."""

    actions: tuple[WishAction, ...] = ()
    states: tuple[WishState, ...] = ()
    shortfalls: tuple[Shortfall, ...] = ()

"""Search for the nodes that can load a wished model now, with the reason for every other node. Pure.

A round is one evaluation of all wishes by the reconciler. The memory of a node is judged as for a request of one token
(`router.placement.place.evaluate_node`), because a loaded model needs memory for requests. A node with too little
headroom can unload models first. The headroom and the weights of these models must cover the need, as in a swap of the
router.
"""

from enum import StrEnum

import msgspec

from coordinator.models.action_history import ActionHistory
from coordinator.models.wishes import (
    LoadWish,
    PoolState,
    UnloadReason,
    UnloadWish,
    Wish,
    WishAction,
    WishState,
)
from router.placement.candidate import FIRST, Candidate, ResourceDemand
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.feasibility import find_unavailable_reason
from router.placement.place import evaluate_node
from wire.capacity.arithmetic import compute_most_bytes
from wire.identity import NodeId
from wire.node_state import NodeState
from wire.refusals import RefusalCode
from wire.report import Model
from wire.units import MIB

RECENT_USE_SECONDS = 60.0
"""Seconds after its last request for which a model is not evicted for a wish."""
MIN_HEADROOM_GROWTH_BYTES = 64 * MIB
"""Minimum growth of a node's headroom, in bytes, before a load that was refused for memory is repeated early."""
HEADROOM_GROWTH_SHARE = 0.05
"""Minimum growth of the headroom as a share of the model's weights.

The larger of this growth and `MIN_HEADROOM_GROWTH_BYTES` applies.
"""


class Obstacle(StrEnum):
    """Reason why a node does not act for a wish now."""

    NOT_ON_DISK = "not on disk"
    UNAVAILABLE = "unavailable"
    """The node takes no requests now, or its memory is unknown."""
    CANNOT_LOAD = "cannot load"
    OTHER_MODEL = "other model"
    BUSY = "busy"
    """The node works on another action, a load or room for requests, or was chosen for an action in this round.

    It is also busy until it has reported after its last action.
    """
    SPACED = "spaced"
    """The node has swapped models, and `Swap.cost_seconds` have not passed since then."""
    BACKOFF = "backoff"
    """The node waits after a refused or failed load of the model."""
    MEMORY = "memory"
    """The model does not fit, even after all evictable models are unloaded."""
    HELD = "held"
    """The node already counts for the wish.

    It has a replica of the model, loads one, or is expected back with one (`WishState.away`). Or the node was already
    chosen for this wish in this round.
    """


class NodeOption(msgspec.Struct, frozen=True):
    """Evaluation of one node for a missing replica."""

    node: NodeView
    obstacle: Obstacle | None = None
    """Why the node does not act now; None if it does."""
    why: str = ""
    """Details of the obstacle, to follow the node's name in a text; may be empty.

    For `BACKOFF`, it is the text of the refusal, which already has the node's name.
    """
    action: WishAction | None = None
    """Next action on the node; None if there is an obstacle."""
    rank: tuple[int, int, bool, float, int, str] = (0, 0, False, 0.0, 0, "")
    """Sort key among the nodes that can act, lowest first.

    In order: maximum eviction cost of the models to unload, their number, whether the node had no replica before. Then:
    seconds of all loads, negative headroom, name.
    """
    victims: tuple[str, ...] = ()
    """Models to unload before the load. `action` unloads the first one."""
    need: int = 0
    """Headroom in bytes that the node needs to load the model and serve a request of one token; 0 if not evaluated."""
    obtainable: int = 0
    """Maximum headroom, in bytes, that unloading can provide for a replica; 0 if not evaluated.

    It is the headroom plus the weights of the models that may be unloaded, limited to the headroom of the node without
    models (`compute_most_bytes`). If the replica fits now, no model may be unloaded for it.
    """

    @property
    def waits(self) -> bool:
        """Whether the node may act in a later round without any change of the wish or the pool.

        That is the case if it is busy now, or must wait after an earlier swap.
        """
        return self.obstacle in (Obstacle.BUSY, Obstacle.SPACED)


def may_hold(wish: Wish, node: NodeView) -> bool:
    """Return whether a node may have a replica for a wish.

    It may not if the node has left, or if the lists or labels of the wish exclude it. An empty `allow` excludes no
    node.
    """
    if node.state == NodeState.LEFT or node.id in wish.deny or (wish.allow and node.id not in wish.allow):
        return False
    return node.labels.issuperset(wish.labels)


def has_served_version(model: Model, view: ClusterView) -> bool:
    """Return whether a model on a node is the version that serves new requests under its name."""
    identity = view.identify(model.name)
    return not identity.has_conflict or identity.version.is_same(model.version)


class ReplicaSearch:
    """Search for nodes that can load or unload replicas, for all wishes of one round of the reconciler.

    The search records which nodes already act in this round, and which replicas this round unloads.
    """

    def __init__(self, states: tuple[WishState, ...], pool: PoolState, history: ActionHistory) -> None:
        self._states = {state.wish.model: state for state in states}
        self._pool = pool
        self._history = history
        self._taken: set[NodeId] = set()
        self._leaving: dict[str, int] = {}

    def take(self, option: NodeOption) -> None:
        """Reserve the node of an option for its action, and record the replicas that the node unloads for it."""
        self.reserve_node(option.node.id)
        for name in option.victims:
            self._leaving[name] = self._leaving.get(name, 0) + 1

    def reserve_node(self, node: NodeId) -> None:
        """Reserve a node, so that later wishes do not act on it in this round."""
        self._taken.add(node)

    def list_unloadable(self, state: WishState) -> list[NodeView]:
        """Return the nodes from which the model of `state` can be unloaded now.

        Nodes where the model is pinned or in use are omitted, as are nodes that take no requests. Nodes that are busy
        with an action, or where an action with this model has recently failed, are omitted as well. The caller must
        check that the idle time has passed.
        """
        return [
            node
            for node in self._pool.view.nodes
            if (model := node.models.get(state.wish.model)) is not None
            and model.loaded
            and not model.pinned
            and may_hold(state.wish, node)
            and not self._pool.is_in_use(node.id, model.name)
            and not find_unavailable_reason(node, self._pool.now)[0]
            and not self._find_busy_reason(node)
            and not self._find_backoff(node, model.name, None)
        ]

    def evaluate_nodes(self, state: WishState) -> list[NodeOption]:
        """Return an evaluation of every node that the lists and labels of a wish allow, except nodes that have left.

        A node that is ready, loads a replica or is expected back with one has the obstacle `HELD`.
        """
        held = {*state.ready, *state.coming, *state.away}
        return [
            NodeOption(node, Obstacle.HELD) if node.id in held else self._evaluate(node, state.wish)
            for node in self._pool.view.nodes
            if may_hold(state.wish, node)
        ]

    def _evaluate(self, node: NodeView, wish: Wish) -> NodeOption:
        model = node.models.get(wish.model)
        if model is None:
            return NodeOption(node, Obstacle.NOT_ON_DISK)
        away = find_unavailable_reason(node, self._pool.now)[0]
        if away:
            return NodeOption(node, Obstacle.UNAVAILABLE, away)
        if model.cause:
            return NodeOption(node, Obstacle.CANNOT_LOAD, f"cannot load it: {model.cause}")
        if not has_served_version(model, self._pool.view):
            return NodeOption(node, Obstacle.OTHER_MODEL, "has another model of this name")
        candidate = evaluate_node(
            node, ResourceDemand(wish.model, 0, 1, 1), self._pool.ledger, self._pool.now, {}, FIRST, {}
        )
        return self._evaluate_memory(node, wish, model, candidate)

    def _evaluate_memory(self, node: NodeView, wish: Wish, model: Model, candidate: Candidate) -> NodeOption:
        if candidate.headroom is None or candidate.code is RefusalCode.UNREADABLE:
            return NodeOption(node, Obstacle.UNAVAILABLE, candidate.why)
        evictable = [] if candidate.feasible else self._list_evictable(node, wish)
        victims = choose_victims(candidate, evictable)
        seconds = model.load_seconds + sum(victim.load_seconds for victim in victims or ())
        option = NodeOption(
            node,
            rank=(
                max((self._get_cost(node, victim.name) for victim in victims or ()), default=-1),
                len(victims or ()),
                (node.id, wish.model) not in self._history.replicas,
                seconds,
                -candidate.headroom,
                node.name,
            ),
            victims=tuple(victim.name for victim in victims or ()),
            need=candidate.need,
            obtainable=min(
                compute_most_bytes(node.memory), candidate.headroom + sum(victim.weights for victim in evictable)
            ),
        )
        busy = self._find_busy_reason(node)
        if victims is None:
            return msgspec.structs.replace(option, obstacle=Obstacle.MEMORY)
        backoff = self._find_backoff(node, wish.model, candidate.headroom)
        if backoff:
            return msgspec.structs.replace(option, obstacle=Obstacle.BACKOFF, why=backoff)
        if busy:
            return msgspec.structs.replace(option, obstacle=Obstacle.BUSY, why=busy)
        if not victims:
            action = LoadWish(node.id, node.name, wish.model, model.load_seconds, candidate.headroom)
            return msgspec.structs.replace(option, action=action)
        spaced = self._find_spacing(node, wish.model)
        if spaced:
            return msgspec.structs.replace(option, obstacle=Obstacle.SPACED, why=spaced)
        unload = UnloadWish(node.id, node.name, victims[0].name, UnloadReason.MEMORY, wish.model, seconds)
        return msgspec.structs.replace(option, action=unload)

    def _list_evictable(self, node: NodeView, wish: Wish) -> list[Model]:
        """Return the models of a node that may be unloaded for a wish, the first to unload first."""
        may_leave = [
            model
            for model in node.models.values()
            if model.loaded and model.name != wish.model and self._is_evictable(node, model, wish)
        ]
        used = self._history.used_at
        return sorted(
            may_leave, key=lambda model: (self._get_cost(node, model.name), used.get(model.name, 0.0), model.name)
        )

    def _is_evictable(self, node: NodeView, model: Model, wish: Wish) -> bool:
        used = self._history.used_at.get(model.name)
        if model.pinned or self._pool.is_in_use(node.id, model.name):
            return False
        if used is not None and self._pool.now - used < RECENT_USE_SECONDS:
            return False
        if self._find_backoff(node, model.name, None):
            return False
        return self._get_cost(node, model.name) < wish.eviction_cost

    def _get_cost(self, node: NodeView, model: str) -> int:
        """Return the eviction cost of the replica of a model on a node: 0 for a surplus replica, -1 without a wish."""
        state = self._states.get(model)
        if state is None or node.id not in state.ready:
            return -1
        is_surplus = len(state.ready) - self._leaving.get(model, 0) > state.wanted
        return 0 if is_surplus else state.wish.eviction_cost

    def _find_busy_reason(self, node: NodeView) -> str:
        """Return why no action may begin on a node now; empty if one may."""
        own = self._history.get_node(node.id)
        if own.running is not None:
            return f"is busy with {own.running.model}"
        if node.id in self._taken:
            return "gets another model first"
        turn = self._pool.ledger.turns.get(node.id)
        if turn is not None:
            return f"makes room for requests for {turn.model}"
        loading = next((model.name for model in node.models.values() if model.loading), "")
        if loading:
            return f"loads {loading}"
        return "has not reported since its last action" if node.reported_at <= own.ended_at else ""

    def _find_backoff(self, node: NodeView, model: str, headroom: int | None) -> str:
        """Return why an action with a model is not repeated on a node yet; empty if it may be.

        `headroom` is the node's headroom for a load now, in bytes; None for an unload.
        """
        failure = self._history.failures.get((node.id, model))
        if failure is None or self._pool.now >= failure.until:
            return ""
        if failure.headroom is not None and headroom is not None:
            growth = max(MIN_HEADROOM_GROWTH_BYTES, int(node.models[model].weights * HEADROOM_GROWTH_SHARE))
            if headroom >= failure.headroom + growth:
                return ""
        return f"{failure.why}; the next try is in {failure.until - self._pool.now:.0f} s"

    def _find_spacing(self, node: NodeView, model: str) -> str:
        """Return why a node may not swap models now; empty if it may."""
        swap = self._history.get_node(node.id).swap
        if swap is None or (swap.model == model and not swap.ended):
            return ""
        left = swap.at + swap.cost_seconds - self._pool.now
        return f"swapped models for {swap.model}; the next swap is in {left:.0f} s" if left > 0 else ""


def choose_victims(candidate: Candidate, evictable: list[Model]) -> list[Model] | None:
    """Return the models to unload before a replica is loaded, or an empty list if the replica fits now.

    `evictable` is in the order of unloading. Return None if the replica does not fit even without all of these models.
    """
    if candidate.feasible:
        return []
    missing = candidate.need - (candidate.headroom or 0)
    if candidate.need > compute_most_bytes(candidate.memory):
        return None
    chosen: list[Model] = []
    for model in evictable:
        if missing <= 0:
            break
        chosen.append(model)
        missing -= model.weights
    if missing > 0:
        return None
    for model in reversed(chosen.copy()):  # a later, larger model may make an earlier one unnecessary
        if missing + model.weights <= 0:
            missing += model.weights
            chosen.remove(model)
    return chosen

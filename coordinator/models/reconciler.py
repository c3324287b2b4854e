"""Reconciler of wishes: decides which models to load and unload, so that each wish has its replicas. Pure.

Theory. A round compares the wishes with the newest view and returns actions. `wish_runner` carries them out and records
them in the history. The next round starts from the new view. No plan is kept between rounds: a changed wish, a lost
node or a request of a client changes the next round.

A round serves the wishes in descending order of eviction cost. Each missing replica goes to the best node that can load
the model now. `replica_search` evaluates the nodes, with the arithmetic of placement for a request of one token.

Rules
1. A node has one action at a time. The next one waits for a report that is newer than the end of the last one.
2. A node that takes no requests gets no action: cordoned, draining, paused, suspect, asleep or lost. A node in `deny`,
   outside of `allow`, or without the labels gets no load for the wish.
3. A load needs free memory by the node's own gate. The node then has no reason to evict another model for it.
4. Memory is freed by unloading models that no request uses and no request has used for `RECENT_USE_SECONDS`. They
   are not preloaded, and no other wish with an equal or higher eviction cost needs them.
5. A node that refused a load for memory gets it again when its headroom has grown, or after the wait. After any other
   failure it gets the load again after the wait.
6. After a swap, a node makes no other swap until the time has passed that both loads of the swap take.
7. A ready replica is never moved to another node. Surplus replicas are unloaded only for memory, or when the model is
   idle.
8. A replica on an absent node is replaced after `RETURN_SECONDS`. After the start of the coordinator, members have
   `START_SECONDS` to connect before replicas are loaded in their place.

A wish with an idle time rests once no request has used the model for that time. Its replicas are unloaded, and loaded
again after the next request. A wish without `load_at_boot` rests until the first request.
"""

from collections.abc import Iterable

from coordinator.cluster.member_state import START_SECONDS
from coordinator.models.action_history import ActionHistory
from coordinator.models.replica_search import NodeOption, Obstacle, ReplicaSearch, has_served_version, may_hold
from coordinator.models.shortfall_text import describe_shortfall
from coordinator.models.wishes import (
    LoadWish,
    Plan,
    PoolState,
    Shortfall,
    UnloadReason,
    UnloadWish,
    Wish,
    WishAction,
    WishState,
)
from router.placement.cluster_view import NodeView
from router.placement.feasibility import find_unavailable_reason
from wire.identity import NodeId
from wire.node_state import NodeState

RETURN_SECONDS = 60.0
"""Seconds to wait for the return of an absent node before its replica is replaced."""
_RETURNING = frozenset({NodeState.READY, NodeState.SUSPECT, NodeState.LOST, NodeState.JOINING})
"""States of a node whose return is awaited for `RETURN_SECONDS`. READY: its engine restarts, or its report is late."""


def plan_actions(wishes: Iterable[Wish], pool: PoolState, history: ActionHistory) -> Plan:
    """Return the plan of one round. `history` has the actions up to `pool.now`.

    Wishes with the highest eviction cost choose their nodes first, wishes with equal costs by name. A wish that is met
    has no action, unless its idle time has passed: its replicas are then unloaded.
    """
    ordered = sorted(wishes, key=lambda wish: (-wish.eviction_cost, wish.model))
    states = tuple(_find_state(wish, pool, history) for wish in ordered)
    search = ReplicaSearch(states, pool, history)
    actions: list[WishAction] = []
    shortfalls: list[Shortfall] = []
    for state in states:
        if state.met:
            actions += _unload_idle(state, search) if _is_idle(state.wish, pool, history) else ()
            continue
        chosen, options = _choose_options(state, search)
        actions += [option.action for option in chosen if option.action is not None]
        for option in _choose_waits(state, options, len(chosen)):
            search.reserve_node(option.node.id)
        shortfalls.append(Shortfall(state.wish.model, describe_shortfall(state, options, chosen, pool)))
    return Plan(tuple(actions), states, tuple(shortfalls))


def find_ready_replicas(
    wishes: Iterable[Wish], pool: PoolState, history: ActionHistory
) -> frozenset[tuple[NodeId, str]]:
    """Return the ready replicas of all wishes, as pairs of node and model.

    A replica is ready if requests may use it now and it is not being unloaded.
    """
    return frozenset(
        (node.id, wish.model) for wish in wishes for node in pool.view.nodes if _is_ready(wish, node, pool, history)
    )


def _find_state(wish: Wish, pool: PoolState, history: ActionHistory) -> WishState:
    ready: list[NodeId] = []
    coming: list[NodeId] = []
    away: list[NodeId] = []
    for node in pool.view.nodes:
        if not may_hold(wish, node):
            continue
        if _is_ready(wish, node, pool, history):
            ready.append(node.id)
        elif _is_coming(wish, node, pool, history):
            coming.append(node.id)
        elif _is_return_awaited(wish, node, pool, history):
            away.append(node.id)
    wanted = 0 if _is_idle(wish, pool, history) or _is_awaiting_request(wish, ready, history) else wish.replicas
    return WishState(wish, wanted, tuple(ready), tuple(coming), tuple(away))


def _is_ready(wish: Wish, node: NodeView, pool: PoolState, history: ActionHistory) -> bool:
    """Return whether a node has a replica that requests may use, and that is not being unloaded."""
    model, action = node.models.get(wish.model), history.find_unreported(node)
    return (
        model is not None
        and model.loaded
        and may_hold(wish, node)
        and not (isinstance(action, UnloadWish) and action.model == wish.model)
        and not find_unavailable_reason(node, pool.now)[0]
        and has_served_version(model, pool.view)
    )


def _is_coming(wish: Wish, node: NodeView, pool: PoolState, history: ActionHistory) -> bool:
    """Return whether a node loads a replica, by its report, or by an action that its report does not show yet.

    The node must take requests, or, for such an action, be a node of `_is_returning`.
    """
    model, action = node.models.get(wish.model), history.find_unreported(node)
    if isinstance(action, LoadWish) and action.model == wish.model:
        return _is_returning(node)
    return model is not None and model.loading and not find_unavailable_reason(node, pool.now)[0]


def _is_return_awaited(wish: Wish, node: NodeView, pool: PoolState, history: ActionHistory) -> bool:
    """Return whether a node that takes no requests now probably returns with its replica, or may have one."""
    if not find_unavailable_reason(node, pool.now)[0] or not _is_returning(node):
        return False
    last_seen = history.replicas.get((node.id, wish.model))
    if last_seen is None:
        return not node.reported_at and pool.now - history.started_at < START_SECONDS
    return pool.now - last_seen < RETURN_SECONDS


def _is_returning(node: NodeView) -> bool:
    """Return whether a node is in a state of `_RETURNING`, and is neither cordoned nor draining."""
    return node.state in _RETURNING and not (node.cordoned or node.draining)


def _is_idle(wish: Wish, pool: PoolState, history: ActionHistory) -> bool:
    """Return whether the idle time of a wish has passed since it is known, and since the last request for its model."""
    since = max(history.wished_at.get(wish.model, pool.now), history.used_at.get(wish.model, history.started_at))
    return wish.idle_unload_seconds is not None and pool.now - since >= wish.idle_unload_seconds


def _is_awaiting_request(wish: Wish, ready: list[NodeId], history: ActionHistory) -> bool:
    """Return whether a wish rests until the first request since the coordinator started."""
    return not wish.load_at_boot and not ready and wish.model not in history.used_at


def _unload_idle(state: WishState, search: ReplicaSearch) -> list[WishAction]:
    """Return the unloads of a model whose idle time has passed."""
    actions: list[WishAction] = []
    for node in search.list_unloadable(state):
        search.reserve_node(node.id)
        actions.append(UnloadWish(node.id, node.name, state.wish.model, UnloadReason.IDLE))
    return actions


def _choose_options(state: WishState, search: ReplicaSearch) -> tuple[list[NodeOption], list[NodeOption]]:
    """Return the nodes that act now for the missing replicas, best first, and the last evaluation of all nodes.

    A chosen node that unloads models may take a surplus replica. The nodes are therefore evaluated again after it.
    """
    missing = state.wanted - len(state.ready) - len(state.coming) - len(state.away)
    chosen: list[NodeOption] = []
    options = search.evaluate_nodes(state)
    while len(chosen) < missing:
        able = [option for option in options if option.action is not None]
        if not able:
            break
        best = min(able, key=lambda option: option.rank)
        chosen.append(best)
        search.take(best)
        if best.victims:
            options = search.evaluate_nodes(state)
        acting = {option.node.id for option in chosen}
        options = [NodeOption(option.node, Obstacle.HELD) if option.node.id in acting else option for option in options]
    return chosen, options


def _choose_waits(state: WishState, options: list[NodeOption], chosen: int) -> list[NodeOption]:
    """Return the nodes that wait (`NodeOption.waits`) and could then act for the remaining missing replicas.

    Wishes with a lower eviction cost do not use these nodes meanwhile.
    """
    missing = state.wanted - len(state.ready) - len(state.coming) - len(state.away) - chosen
    waits = sorted((option for option in options if option.waits), key=lambda option: option.rank)
    return waits[: max(0, missing)]

"""History of the reconciler's actions: running actions, swaps, failures, and the use of models. Pure.

A round is one evaluation of all wishes by the reconciler. `step` applies one event. On each node, the start of an
action and its end alternate.

Invariants
- A node has at most one running action.
- A node's swap ends when the load of the model that needed the memory has ended, successfully or not.
- The wait after a failure doubles from `BACKOFF_SECONDS` up to `MAX_BACKOFF_SECONDS`. A success ends it.
"""

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from coordinator.models.wishes import LoadWish, PoolState, UnloadReason, UnloadWish, WishAction
from router.placement.cluster_view import NodeView
from wire.identity import NodeId
from wire.state_machine import IllegalEventError, InvariantError

BACKOFF_SECONDS = 10.0
"""Wait after the first refusal or failure of an action, in seconds. Each consecutive one doubles the wait."""
MAX_BACKOFF_SECONDS = 600.0
MIN_SWAP_SECONDS = 10.0
"""Minimum cost of a swap, in seconds. Without it, a model whose load time is unknown would cost 0 s."""


class Swap(msgspec.Struct, frozen=True):
    """Last swap of a node: the unload of models for another model, and the load of that model."""

    model: str
    """Model that needed the memory of the unloaded models."""
    cost_seconds: float
    """Expected seconds to load `model`, and later the unloaded models again; at least `MIN_SWAP_SECONDS`."""
    ended: bool
    """Whether the load of `model` has ended, successfully or not."""
    at: float
    """Monotonic time in seconds of the last end of an action of this swap, or of the start of a running unload."""


class NodeHistory(msgspec.Struct, frozen=True):
    """History of the actions on one node."""

    running: WishAction | None = None
    """Action that has begun and not ended; None if there is none."""
    ended_at: float = -1.0
    """Monotonic time in seconds at which the last action ended; -1 before the first."""
    done: WishAction | None = None
    """Last ended action, if it succeeded; else None."""
    swap: Swap | None = None
    """Newest swap on the node; None before the first."""


class ActionFailure(msgspec.Struct, frozen=True):
    """Consecutive refusals and failures of loads and unloads of one model on one node."""

    count: int
    """Number of refusals or failures since the last success."""
    until: float
    """Monotonic time in seconds before which neither a load nor an unload is tried again.

    A load that was refused for memory is tried earlier if the headroom of the node has grown.
    """
    why: str
    """Text of the newest refusal or failure."""
    headroom: int | None = None
    """Headroom of the node in bytes if the newest action was refused for memory; else None.

    For a load, it is the larger of the headrooms before the order and after the refusal.
    """


class ActionHistory(msgspec.Struct, frozen=True):
    """History of all nodes since `started_at`. All times are in monotonic seconds."""

    started_at: float
    nodes: Mapping[NodeId, NodeHistory] = msgspec.field(default_factory=dict[NodeId, NodeHistory])
    failures: Mapping[tuple[NodeId, str], ActionFailure] = msgspec.field(
        default_factory=dict[tuple[NodeId, str], ActionFailure]
    )
    """Refusals and failures since the last success, by node and model."""
    used_at: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    """Time of the last round that found a request for each model: queued, running, or ended since the round before."""
    wished_at: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    """Time since which the wish for each model is known, or of the last successful load for it if that is later."""
    replicas: Mapping[tuple[NodeId, str], float] = msgspec.field(default_factory=dict[tuple[NodeId, str], float])
    """Time of the last round in which each replica, by node and model, was ready."""

    def get_node(self, node: NodeId) -> NodeHistory:
        """Return the history of one node. It is empty before the first action on the node."""
        return self.nodes.get(node, _NOTHING)

    def find_unreported(self, node: NodeView) -> WishAction | None:
        """Return the action on a node that its newest report does not show yet; None if there is none.

        That is the running action, or the last one if it has just succeeded.
        """
        own = self.get_node(node.id)
        return own.running or (own.done if node.reported_at <= own.ended_at else None)

    def check(self) -> None:
        """Raise `InvariantError` if two values contradict each other."""
        for node, own in self.nodes.items():
            if own.running is not None and own.running.node != node:
                raise InvariantError(f"{own.running} runs on {node}")
            if own.swap is not None and own.swap.cost_seconds < MIN_SWAP_SECONDS:
                raise InvariantError(f"the swap of {node} costs {own.swap.cost_seconds} s")
        if any(failure.count < 1 for failure in self.failures.values()):
            raise InvariantError("a failure without a count")


_NOTHING = NodeHistory()


class ActionBegan(msgspec.Struct, frozen=True):
    """Event: an action was sent to its node."""

    action: WishAction


class ActionEnded(msgspec.Struct, frozen=True):
    """Event: the running action of a node ended. `why` is the text of the refusal or failure; empty for a success."""

    node: NodeId
    why: str = ""
    headroom: int | None = None
    """Headroom of the node in bytes if the node refused the action for memory; None for any other end."""


class RoundBegan(msgspec.Struct, frozen=True):
    """Event: a round of the reconciler begins, with this state of the pool. `wished` are the models with a wish."""

    pool: PoolState
    wished: frozenset[str]
    ready: frozenset[tuple[NodeId, str]]
    """Replicas that are ready, by node and model."""


Event = ActionBegan | ActionEnded | RoundBegan


def step(history: ActionHistory, event: Event, now: float) -> ActionHistory:
    """Apply one event at `now` (monotonic seconds), and return the new history.

    Raise `IllegalEventError` if an action begins on a busy node, or ends on a node without one.
    """
    match event:
        case ActionBegan():
            return _begin_action(history, event.action, now)
        case ActionEnded():
            return _end_action(history, event, now)
        case RoundBegan():
            return _begin_round(history, event, now)


def _begin_action(history: ActionHistory, action: WishAction, now: float) -> ActionHistory:
    own = history.get_node(action.node)
    if own.running is not None:
        raise IllegalEventError(f"{action} begins on a node that is busy with {own.running}")
    swap = own.swap
    if isinstance(action, UnloadWish) and action.why is UnloadReason.MEMORY:
        before = swap.cost_seconds if swap is not None and swap.model == action.wanted and not swap.ended else 0.0
        swap = Swap(action.wanted, max(MIN_SWAP_SECONDS, before, action.seconds), ended=False, at=now)
    return _put_node(history, action.node, replace(own, running=action, swap=swap))


def _end_action(history: ActionHistory, event: ActionEnded, now: float) -> ActionHistory:
    own = history.get_node(event.node)
    action, swap = own.running, own.swap
    if action is None:
        raise IllegalEventError(f"an action ends on {event.node}, and none runs there")
    if swap is not None and not swap.ended and swap.model == _get_wanted_model(action):
        swap = replace(swap, ended=isinstance(action, LoadWish), at=now)
    failures = dict(history.failures)
    known = failures.pop((event.node, action.model), None)
    if event.why:
        count = 1 if known is None else known.count + 1
        wait = min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0 ** (count - 1))
        headroom = event.headroom
        if headroom is not None and isinstance(action, LoadWish):
            headroom = max(headroom, action.headroom)
        failures[event.node, action.model] = ActionFailure(count, now + wait, event.why, headroom)
    wished_at = history.wished_at
    if isinstance(action, LoadWish) and not event.why and action.model in wished_at:
        wished_at = {**wished_at, action.model: now}
    changed = replace(history, failures=failures, wished_at=wished_at)
    return _put_node(
        changed, event.node, replace(own, running=None, ended_at=now, done=None if event.why else action, swap=swap)
    )


def _begin_round(history: ActionHistory, event: RoundBegan, now: float) -> ActionHistory:
    members = {node.id for node in event.pool.view.nodes}
    known = event.wished.union(*(node.models for node in event.pool.view.nodes))
    used = known & event.pool.requested.union(*event.pool.in_use.values())
    replicas = {place: at for place, at in history.replicas.items() if place[0] in members and place[1] in event.wished}
    return replace(
        history,
        nodes={node: own for node, own in history.nodes.items() if node in members or own.running is not None},
        failures={place: failure for place, failure in history.failures.items() if place[0] in members},
        used_at={
            **{model: at for model, at in history.used_at.items() if model in known},
            **dict.fromkeys(used, now),
        },
        wished_at={model: history.wished_at.get(model, now) for model in event.wished},
        replicas={**replicas, **dict.fromkeys(event.ready, now)},
    )


def _get_wanted_model(action: WishAction) -> str:
    """Return the model for which an action is taken; empty for the unload of an idle model."""
    return action.model if isinstance(action, LoadWish) else action.wanted


def _put_node(history: ActionHistory, node: NodeId, own: NodeHistory) -> ActionHistory:
    return replace(history, nodes={**history.nodes, node: own})

"""Model swaps of a node: load a model that waiting requests need, by unloading models that other requests use.

Theory. To load a model, an engine evicts idle models, never a model in use. During steady traffic for one model,
another would therefore never be loaded. A swap (turn) makes room for it. The router sends the node no new requests for
the models to unload, lets the running requests end, and then sends the waiting request. The engine then evicts the
idle models. No running request is aborted.

    waiting ─► turn (draining) ─► sent ─► done: the node's report shows the model
                   └ dropped: no request waits, the node is away, memory no longer suffices, or timeout

A request waits for a swap if every node that could hold it must unload models first. Such a node lacks only memory
(`RefusalCode.NO_ROOM`), and ceiling − margin − base − weights of the remaining models ≥ need. A request that fits next
to all loaded models waits for rows to end, as usual, and no node swaps models for it.

Rules

A node has at most one turn at a time, and at most one turn at a time loads a model. A pinned (preloaded) model is never
unloaded.

Idle models are unloaded at once. A model in use is unloaded for a request that has waited `SWAP_AFTER_SECONDS`, once
the slice of that model has ended. Every request for the model in use that has waited longer goes first.

A slice begins when the model is loaded. It lasts `MIN_SLICE_SECONDS` plus `SLICE_LOAD_FACTOR` times the load time,
because each slice costs a load. If the keys that use the model or wait for it weigh more than those that wait for the
other model, the slice is longer. The factor is the quotient of the two weights, at most `MAX_SLICE_KEYS`. A slice lasts
at most a quarter of the timeout of a turn.

The oldest request goes first. It gets the node where keys of the least weight lose the last node with their model.
Of several such nodes, it gets the one that is ready first, after its running answers and the load.

A turn is dropped at its timeout, and the models to unload begin another slice.

`step` computes actions from its input and the times of loads, and the dispatcher executes them.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from router.placement.candidate import Candidate
from router.placement.cluster_view import NodeView
from router.placement.feasibility import find_unavailable_reason
from router.placement.reservations import SwapTurn
from wire.capacity.fairness import WeightedKey
from wire.identity import NodeId
from wire.refusals import RefusalCode
from wire.report import Model

SWAP_AFTER_SECONDS = 5.0
"""Minimum seconds from the arrival of a request until a model in use is unloaded for it."""
MIN_SLICE_SECONDS = 5.0
"""Seconds of a slice that do not depend on the load."""
SLICE_LOAD_FACTOR = 8
"""Seconds of a slice for each second of the load, in addition to `MIN_SLICE_SECONDS`."""
MAX_SLICE_KEYS = 4
"""Maximum factor by which a slice is longer because the keys of its model have more weight."""
WAIT_SLICES = 4
"""Quotient of the timeout of a turn and the longest slice."""


class ModelUse(msgspec.Struct, frozen=True, gc=False):
    """Request that uses a model on a node. `request` is its number, `weighted_key` its API key."""

    request: int
    weighted_key: WeightedKey
    seconds: float
    """Expected seconds until the request ends."""


class SwapCandidate(msgspec.Struct, frozen=True, gc=False):
    """Queued request with the candidates for it: the nodes that serve its model. `request` is its number."""

    request: int
    weighted_key: WeightedKey
    model: str
    since: float
    """Arrival of the request at the router, in monotonic seconds."""
    candidates: tuple[Candidate, ...]
    refused: frozenset[NodeId] = frozenset()
    """Nodes that refused the request and have not reported since then."""


class SwapInput(msgspec.Struct, frozen=True, gc=False):
    """Input of `SwapPlanner.step`."""

    nodes: Mapping[NodeId, NodeView]
    waiting: Sequence[SwapCandidate]
    """Oldest queued requests, at most `swap_input.MAX_REQUESTS_EXAMINED` of each model, oldest first."""
    keys: Mapping[str, Mapping[str, int]]
    """Weight of each key that has a waiting request, by model and key."""
    running: Mapping[NodeId, Mapping[str, Sequence[ModelUse]]]
    """Requests on every node, by model."""
    turns: Mapping[NodeId, SwapTurn]


class BeginTurn(msgspec.Struct, frozen=True, gc=False):
    """Action: begin a turn, or assign a running turn to another request of the same model."""

    turn: SwapTurn
    hold: int
    """Bytes to hold for the request in addition to the memory of the models to unload."""


class SendRequest(msgspec.Struct, frozen=True, gc=False):
    """Action: send the turn's request to its node, because it fits once the idle models are evicted."""

    turn: SwapTurn
    candidate: Candidate


class EndTurn(msgspec.Struct, frozen=True, gc=False):
    """Action: end a turn, because its model is loaded or because the turn was dropped."""

    turn: SwapTurn
    why: str = ""
    """Reason why the turn was dropped; empty when the model is loaded."""


Action = BeginTurn | SendRequest | EndTurn


class SwapPlan(msgspec.Struct, frozen=True, gc=False):
    """Result of `SwapPlanner.step`."""

    actions: tuple[Action, ...]
    """Actions to execute now."""
    waits: Mapping[str, SwapTurn | None]
    """Models whose requests wait for a swap, each with its turn; None while no node may begin one."""


class SwapPlanner:
    """Planner of model swaps. `timeout_seconds` is the maximum duration of a turn, and also bounds the slices."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._loaded_since: dict[NodeId, dict[str, float]] = {}

    def remove_node(self, node: NodeId) -> None:
        """Remove the state of a node that is no longer a member."""
        self._loaded_since.pop(node, None)

    def update_loaded(self, nodes: Iterable[NodeView], now: float) -> None:
        """Record `now` (monotonic seconds) as the load time of models that these nodes have newly loaded."""
        for node in nodes:
            before = self._loaded_since.get(node.id, {})
            loaded = [model.name for model in node.models.values() if model.loaded]
            self._loaded_since[node.id] = {name: before.get(name, now) for name in loaded}

    def step(self, snapshot: SwapInput, now: float) -> SwapPlan:
        """Return the actions that are due at `now` (monotonic seconds), and the models that wait for a swap.

        A turn that has timed out begins another slice of the models that it would have unloaded.
        """
        actions: list[Action] = []
        turns = dict(snapshot.turns)
        for turn in snapshot.turns.values():
            followed = self._follow(turn, snapshot, now)
            if isinstance(followed, EndTurn):
                del turns[turn.node]
            else:
                turns[turn.node] = followed.turn
            if isinstance(followed, EndTurn) or followed.turn != turn:
                actions.append(followed)
        waits: dict[str, SwapTurn | None] = {turn.model: turn for turn in turns.values()}
        for queued in snapshot.waiting:
            if waits.get(queued.model) is not None:
                continue
            options = _find_options(queued, snapshot, turns)
            if options is None:
                continue
            waits[queued.model] = None
            begun = self._begin_turn(queued, options, snapshot, now)
            if begun is not None:
                turns[begun.turn.node] = waits[queued.model] = begun.turn
                actions.append(begun)
        for turn in turns.values():
            candidate = _find_ready_candidate(turn, snapshot)
            if candidate is not None:
                actions.append(SendRequest(msgspec.structs.replace(turn, sent_at=now), candidate))
        return SwapPlan(tuple(actions), waits)

    def _follow(self, turn: SwapTurn, snapshot: SwapInput, now: float) -> BeginTurn | EndTurn:
        """Return a running turn with its current request, or the end of the turn."""
        node = snapshot.nodes.get(turn.node)
        model = None if node is None else node.models.get(turn.model)
        if node is None or model is None or find_unavailable_reason(node, now)[0]:
            return EndTurn(turn, "the node is unavailable")
        if now - turn.began > self._timeout_seconds:
            self._loaded_since.setdefault(turn.node, {}).update(dict.fromkeys(turn.leaving, now))
            return EndTurn(turn, f"the models were in use for {self._timeout_seconds:.0f} s")
        if turn.sent_at is not None:
            if (model.loaded or model.loading) and node.reported_at > turn.sent_at:
                return EndTurn(turn)
            if any(use.request == turn.request for use in snapshot.running.get(node.id, {}).get(turn.model, ())):
                return BeginTurn(turn, 0)
        for queued in snapshot.waiting:
            candidate = _find_candidate(queued, node.id)
            if queued.model != turn.model or candidate is None or _needs_no_swap(queued, snapshot, snapshot.turns):
                continue
            if _compute_spare_bytes(node, candidate, turn.leaving) >= candidate.need:
                changed = msgspec.structs.replace(turn, request=queued.request, sent_at=None)
                return BeginTurn(changed, _compute_hold_bytes(node, candidate, turn.leaving))
        return EndTurn(turn, "no request needs it any more")

    def _begin_turn(
        self, queued: SwapCandidate, options: Sequence["_Option"], snapshot: SwapInput, now: float
    ) -> BeginTurn | None:
        """Return the turn that begins now for a request; None if no node may begin one."""
        allowed = [option for option in options if self._can_unload(queued, option, snapshot, now)]
        if not allowed:
            return None
        best = min(allowed, key=lambda option: option.cost)
        turn = SwapTurn(best.node.id, best.node.name, queued.model, best.leaving, queued.request, now)
        return BeginTurn(turn, _compute_hold_bytes(best.node, best.candidate, best.leaving))

    def _can_unload(self, queued: SwapCandidate, option: "_Option", snapshot: SwapInput, now: float) -> bool:
        """Return whether a node may now unload the models of an option that are in use, for a request."""
        if not option.busy:
            return True
        if now - queued.since < SWAP_AFTER_SECONDS or not all(
            self._has_slice_ended(name, queued, option, snapshot, now) for name in option.busy
        ):
            return False
        older = (other for other in snapshot.waiting if other.since < queued.since and other.model in option.busy)
        return not any(_find_candidate(other, option.node.id) for other in older)

    def _has_slice_ended(
        self, name: str, queued: SwapCandidate, option: "_Option", snapshot: SwapInput, now: float
    ) -> bool:
        """Return whether the slice of a loaded model on a node has ended; False for a model that is not loaded."""
        since = self._loaded_since.get(option.node.id, {}).get(name)
        return since is not None and now - since >= self.compute_slice_seconds(
            name, queued.model, option.node, snapshot
        )

    def compute_slice_seconds(self, name: str, model_to_load: str, node: NodeView, snapshot: SwapInput) -> float:
        """Return the seconds of the slice of the model `name` on a node, while requests wait for `model_to_load`.

        Raise `KeyError` if the node does not have both models.
        """
        load = max(node.models[name].load_seconds, node.models[model_to_load].load_seconds)
        mine = {
            use.weighted_key.name: use.weighted_key.weight for use in snapshot.running.get(node.id, {}).get(name, ())
        }
        mine |= snapshot.keys.get(name, {})
        ratio = sum(mine.values()) / max(1, sum(snapshot.keys.get(model_to_load, {}).values()))
        return min(
            self._timeout_seconds / WAIT_SLICES,
            (MIN_SLICE_SECONDS + SLICE_LOAD_FACTOR * load) * min(MAX_SLICE_KEYS, max(1.0, ratio)),
        )


class _Option(msgspec.Struct, frozen=True, gc=False):
    """Node that could swap for a request."""

    node: NodeView
    candidate: Candidate
    leaving: frozenset[str]
    busy: frozenset[str]
    cost: tuple[int, float]
    """Weight of the keys that lose the last node with their model, then seconds."""


def fits_next_to_loaded(node: NodeView, candidate: Candidate) -> bool:
    """Return whether a request fits on a node next to all loaded models, once all other requests there have ended."""
    return _compute_spare_bytes(node, candidate, frozenset()) >= candidate.need


def _needs_no_swap(queued: SwapCandidate, snapshot: SwapInput, turns: Mapping[NodeId, SwapTurn]) -> bool:
    """Return whether a request needs no swap, because some node can take it without one.

    The request fits next to all models of the node, now or later, or another request is about to load its model there.
    """
    for candidate in queued.candidates:
        node, turn = snapshot.nodes[candidate.node], turns.get(candidate.node)
        if not candidate.why:
            return True
        if candidate.code is RefusalCode.NO_ROOM and (turn is None or turn.model == queued.model):
            coming = candidate.weights and snapshot.running.get(node.id, {}).get(queued.model)
            if coming or fits_next_to_loaded(node, candidate):
                return True
    return False


def _find_options(
    queued: SwapCandidate, snapshot: SwapInput, turns: Mapping[NodeId, SwapTurn]
) -> "list[_Option] | None":
    """Return the nodes that could swap for a request; empty if all have a turn; None if no swap is needed or helps."""
    if _needs_no_swap(queued, snapshot, turns):
        return None
    options: list[_Option] = []
    has_turn = False
    for candidate in queued.candidates:
        node, turn = snapshot.nodes[candidate.node], turns.get(candidate.node)
        if candidate.code is not RefusalCode.NO_ROOM:
            continue
        if turn is not None:
            has_turn = True
            continue
        running = snapshot.running.get(node.id, {})
        leaving = _choose_models_to_unload(node, candidate, running)
        if leaving is not None:
            busy = frozenset(name for name in leaving if running.get(name) or node.models[name].loading)
            seconds = max((use.seconds for name in busy for use in running.get(name, ())), default=0.0)
            cost = _sum_last_node_weights(node, busy, snapshot), seconds + node.models[queued.model].load_seconds
            options.append(_Option(node, candidate, leaving, busy, cost))
    return options if options or has_turn else None


def _compute_spare_bytes(node: NodeView, candidate: Candidate, leaving: frozenset[str]) -> int:
    """Return the bytes available to a request on a node without the `leaving` models and without any other rows."""
    memory, model = node.memory, candidate.model
    stays = sum(
        loaded_model.weights
        for loaded_model in node.models.values()
        if (loaded_model.loaded or loaded_model.loading)
        and loaded_model.name not in leaving
        and (model is None or loaded_model.name != model.name)
    )
    own = model.weights if model is not None and not candidate.weights else 0
    return memory.ceiling - memory.margin - memory.base - stays - own


def _choose_models_to_unload(
    node: NodeView, candidate: Candidate, running: Mapping[str, Sequence[ModelUse]]
) -> frozenset[str] | None:
    """Return the models to unload to make room for a request, preferably idle ones; None if that cannot make room."""

    def rank(model: Model) -> tuple[bool, int, float]:
        uses = running.get(model.name, ())
        keys = {use.weighted_key.name: use.weighted_key.weight for use in uses}
        return model.loading or bool(uses), sum(keys.values()), max((use.seconds for use in uses), default=0.0)

    own = candidate.model.name if candidate.model is not None else ""
    movable = [
        model
        for model in node.models.values()
        if (model.loaded or model.loading) and model.name != own and not model.pinned
    ]
    chosen: dict[str, int] = {}
    missing = candidate.need - _compute_spare_bytes(node, candidate, frozenset())
    for model in sorted(movable, key=rank):
        if missing <= 0:
            break
        chosen[model.name] = model.weights
        missing -= model.weights
    if missing > 0:
        return None
    for name, weights in reversed(chosen.copy().items()):  # a later, larger model may make an earlier one unnecessary
        if missing + weights <= 0:
            missing += chosen.pop(name)
    return frozenset(chosen)


def _sum_last_node_weights(node: NodeView, busy: frozenset[str], snapshot: SwapInput) -> int:
    """Return the total weight of the keys that use or wait for `busy` models that only this node has loaded."""
    keys: dict[str, int] = {}
    for name in busy:
        if not any(
            other.models[name].loaded for other in snapshot.nodes.values() if other is not node and name in other.models
        ):
            keys |= {
                use.weighted_key.name: use.weighted_key.weight
                for use in snapshot.running.get(node.id, {}).get(name, ())
            }
            keys |= snapshot.keys.get(name, {})
    return sum(keys.values())


def _find_candidate(queued: SwapCandidate, node: NodeId) -> Candidate | None:
    """Return the candidate of one node; None if something other than memory excludes the node."""
    return next((at for at in queued.candidates if at.node == node and at.code in (None, RefusalCode.NO_ROOM)), None)


def _compute_hold_bytes(node: NodeView, candidate: Candidate, leaving: frozenset[str]) -> int:
    """Return the bytes to hold for a request in addition to the memory of the models to unload."""
    freed = sum(node.models[name].weights for name in leaving if name in node.models and node.models[name].loaded)
    return max(0, candidate.need - freed)


def _find_ready_candidate(turn: SwapTurn, snapshot: SwapInput) -> Candidate | None:
    """Return the candidate to which to send a turn's request; None until the request fits in place of idle models."""
    entry = next((queued for queued in snapshot.waiting if queued.request == turn.request), None)
    if turn.sent_at is not None or entry is None:
        return None
    node, running = snapshot.nodes[turn.node], snapshot.running.get(turn.node, {})
    candidate = _find_candidate(entry, turn.node)
    if candidate is None or turn.node in entry.refused:
        return None
    idle = sum(
        model.weights
        for model in node.models.values()
        if model.loaded and not model.pinned and model.name != turn.model and not running.get(model.name)
    )
    headroom = candidate.headroom
    return candidate if headroom is not None and headroom + idle >= candidate.need else None

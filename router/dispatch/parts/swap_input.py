"""Build the input of `model_swaps.SwapPlanner` from the requests of the dispatcher."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from router.dispatch.active_request import ActiveRequest
from router.dispatch.model_swaps import (
    ModelUse,
    SwapCandidate,
    SwapInput,
)
from router.placement.candidate import Candidate
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.reservations import ReservationLedger
from wire.capacity.arithmetic import KV_GROWTH_TOKENS
from wire.identity import NodeId
from wire.report import ROW_COST

MAX_REQUESTS_EXAMINED, MAX_NODES_EXAMINED = 4, 32
"""Maximum requests examined for each model, oldest first, and maximum nodes examined for each request."""


def build_swap_input(
    view: ClusterView,
    queued: Sequence[ActiveRequest],
    live: Iterable[ActiveRequest],
    ledger: ReservationLedger,
    judge: Callable[[ActiveRequest, NodeView], Candidate],
) -> SwapInput:
    """Return the input of `SwapPlanner.step`.

    `queued` has the queued requests, oldest first. `live` has the requests on nodes. `judge` returns a node as a
    candidate for a request.
    """
    nodes = {node.id: node for node in view.nodes}
    served: dict[str, list[NodeView]] = {}
    keys: dict[str, dict[str, int]] = {}
    examined: dict[str, int] = {}
    waiting: list[SwapCandidate] = []
    for request in queued:
        model, key = request.demand.model, request.weighted_key
        keys.setdefault(model, {})[key.name] = key.weight
        examined[model] = examined.get(model, 0) + 1
        if examined[model] <= MAX_REQUESTS_EXAMINED:
            if model not in served:
                serving = [node for node in view.nodes if model in node.models]
                served[model] = sorted(serving, key=partial(_rank, model, ledger))[:MAX_NODES_EXAMINED]
            candidates = tuple(judge(request, node) for node in served[model])
            refused = frozenset(
                node.id for node in served[model] if request.tried.refused.get(node.id) == node.reported_at
            )
            waiting.append(SwapCandidate(request.number, key, model, request.arrived, candidates, refused))
    running: dict[NodeId, dict[str, list[ModelUse]]] = {}
    for request in live:
        node = None if request.node is None else nodes.get(request.node)
        if node is not None:
            use = ModelUse(request.number, request.weighted_key, _estimate_seconds_left(request, node, ledger))
            running.setdefault(node.id, {}).setdefault(request.demand.model, []).append(use)
    return SwapInput(nodes, waiting, keys, running, ledger.turns)


def _rank(model: str, ledger: ReservationLedger, node: NodeView) -> tuple[bool, bool, int]:
    """Return the rank of a node; nodes with lower ranks are examined first.

    Nodes with a turn rank first, then nodes that have loaded or load the model, then the least busy nodes.
    """
    here = node.models[model]
    return node.id not in ledger.turns, not (here.loaded or here.loading), ledger.count_in_flight(node.id)


def _estimate_seconds_left(request: ActiveRequest, node: NodeView, ledger: ReservationLedger) -> float:
    """Return the expected remaining seconds of a request on a node; 0 if its model or decode speed is unknown."""
    model, account = node.models.get(request.demand.model), ledger.get_account(node.id)
    if model is None or model.decode_speed <= 0:
        return 0.0
    expected = request.demand.estimate_output_tokens(model, request.demand.estimate_prompt_tokens(model))
    answer = (
        max(expected - request.tokens.longest, KV_GROWTH_TOKENS) / model.decode_speed * (1.0 + ROW_COST * account.rows)
    )
    pending = account.pending_prefills.get(request.attempt)
    return answer + (0.0 if pending is None else pending.seconds)

"""Choose the idle node that unloads models to load a requested model, by the cost of the unloads. Pure."""

from collections.abc import Mapping

from router.placement.candidate import AttemptHistory, Candidate, ResourceDemand
from router.placement.cluster_view import ClusterView, NodeView
from wire.refusals import RefusalCode

_MEMORY = frozenset({RefusalCode.NO_ROOM, RefusalCode.UNREADABLE})


def choose_unloading_node(
    view: ClusterView,
    request: ResourceDemand,
    serving: list[NodeView],
    offers: list[Candidate],
    trials: AttemptHistory,
    rates: Mapping[str, float],
) -> Candidate | None:
    """Return the idle node that should unload unused models for a request; None if no node is suitable.

    A suitable node is large enough for the request once it has unloaded models. The node with the lowest
    `compute_unload_cost` is chosen, and of nodes with equal costs the node with the most headroom.

    `serving` are the nodes with the model, and `offers` are these nodes as candidates for the request. `trials` are the
    earlier attempts of the request. `rates` are the expected requests per second of each model.

    Return None also while a node that lacks only memory has loaded or is loading the model, because the request then
    only has to wait.
    """
    short = [candidate.model for candidate in offers if candidate.code in _MEMORY]
    if any(model.loaded or model.loading for model in short if model is not None):
        return None
    idle = {
        node.id
        for node in serving
        if not node.engine.running + node.engine.waiting and any(model.loaded for model in node.models.values())
    }
    able = [
        candidate
        for candidate in offers
        if candidate.code is RefusalCode.NO_ROOM
        and candidate.node in idle
        and not candidate.in_flight
        and candidate.need <= candidate.most_bytes
        and candidate.node not in trials.refused
    ]
    nodes = {node.id: node for node in serving}

    def rank(candidate: Candidate) -> tuple[float, int]:
        spare = (candidate.headroom or 0) - candidate.need
        return compute_unload_cost(view, nodes[candidate.node], request.model, -spare, rates), -spare

    return min(able, key=rank, default=None)


def compute_unload_cost(
    view: ClusterView, node: NodeView, keep: str, missing: int, rates: Mapping[str, float]
) -> float:
    """Return the cost of the unloads that free `missing` bytes on a node: expected seconds of later loads per second.

    Models with the least demand are unloaded first, pinned models never. A model that another node has loaded costs
    nothing. `keep` is the model that needs the memory. `rates` are the expected requests per second of each model.
    """
    loaded = [model for model in node.models.values() if model.loaded and not model.pinned and model.name != keep]
    cost = 0.0
    for model in sorted(loaded, key=lambda model: rates.get(model.name, 0.0)):
        if missing <= 0:
            break
        missing -= model.weights
        if not any(other is not node and _has_loaded(other, model.name) for other in view.nodes):
            cost += rates.get(model.name, 0.0) * model.load_seconds
    return cost


def _has_loaded(node: NodeView, name: str) -> bool:
    model = node.models.get(name)
    return model is not None and model.loaded

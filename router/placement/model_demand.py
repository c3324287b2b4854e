"""Recent demand for each model, and the cost of unloading models. Pure.

The demand is an exponentially weighted count of requests: one that arrived `HALF_LIFE_SECONDS` ago counts as a half.
"""

from collections.abc import Mapping
from math import log

from router.placement.cluster_view import ClusterView, NodeView

HALF_LIFE_SECONDS = 300.0
"""Age at which a request counts as a half."""
MAX_MODELS = 1000
"""Maximum models with a recorded demand. The least demanded one is forgotten first."""


class ModelDemand:
    """Recent demand for models, by name. Times are in monotonic seconds."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}

    def record_request(self, model: str, now: float) -> None:
        """Record a request for a model."""
        self._counts[model] = (self._get_count(model, now) + 1.0, now)
        if len(self._counts) > MAX_MODELS:
            del self._counts[min(self._counts, key=lambda name: self._get_count(name, now))]

    def compute_rates(self, now: float) -> Mapping[str, float]:
        """Return the expected requests per second of each model."""
        return {model: self._get_count(model, now) * log(2.0) / HALF_LIFE_SECONDS for model in self._counts}

    def _get_count(self, model: str, now: float) -> float:
        count, at = self._counts.get(model, (0.0, now))
        return count * 0.5 ** ((now - at) / HALF_LIFE_SECONDS)


NO_DEMAND = ModelDemand()
"""Demand without any request."""


def compute_unload_cost(
    view: ClusterView, node: NodeView, keep: str, missing: int, rates: Mapping[str, float]
) -> float:
    """Return the expected load seconds per second that a node causes by unloading models for `missing` bytes.

    The models with the least demand leave first. A model that another node has loaded costs nothing. `keep` is the
    model that needs the memory.
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

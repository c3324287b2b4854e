"""Count the recent demand for each model. Pure.

The demand is an exponentially weighted count of requests: a request of `HALF_LIFE_SECONDS` ago counts as 0.5.
"""

from collections.abc import Mapping
from math import log

HALF_LIFE_SECONDS = 300.0
"""Age at which a request counts as 0.5, in seconds."""
MAX_MODELS = 1000
"""Maximum number of models with a recorded demand. Above it, the model with the least demand is removed."""


class ModelDemand:
    """Counter of the recent demand for models, by name. Times are in monotonic seconds."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}

    def record_request(self, model: str, now: float) -> None:
        """Record a request for a model that arrived at `now`."""
        last = self._counts.get(model)
        if last is not None:
            self._counts[model] = (1.0 + last[0] * 0.5 ** ((now - last[1]) / HALF_LIFE_SECONDS), now)
            return
        self._counts[model] = (1.0, now)
        if len(self._counts) > MAX_MODELS:
            del self._counts[min(self._counts, key=lambda name: self._get_count(name, now))]

    def compute_rates(self, now: float) -> Mapping[str, float]:
        """Return the expected requests per second of each model at `now`, by the recent demand."""
        return {model: self._get_count(model, now) * log(2.0) / HALF_LIFE_SECONDS for model in self._counts}

    def _get_count(self, model: str, now: float) -> float:
        count, at = self._counts.get(model, (0.0, now))
        return count * 0.5 ** ((now - at) / HALF_LIFE_SECONDS)


NO_DEMAND = ModelDemand()
"""Demand without any request."""

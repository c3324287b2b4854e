"""Labels that metric families of the coordinator share, and functions that read their rows."""

from collections.abc import Callable, Mapping

from coordinator.metrics.families import HistogramValue, Row
from coordinator.metrics.pool_snapshot import PoolSnapshot
from router.dispatch.counters import MAX_MODELS, OTHER, ModelCounts
from wire.identity import NodeId

NODE_LABEL = (("node", "a member's name"),)
MODEL_LABEL = (
    (
        "model",
        "a model that some member has, or the upstream that took the request (`upstream:NAME/MODEL`); "
        f"`{OTHER}` for names that clients make up, and for models after the first {MAX_MODELS}",
    ),
)


def read_by_node(values: Callable[[PoolSnapshot], Mapping[NodeId, float]]) -> Callable[[PoolSnapshot], list[Row]]:
    """Return a function that reads one row for each member in the result of `values`."""

    def rows(snapshot: PoolSnapshot) -> list[Row]:
        known = values(snapshot)
        return [((node.name,), known[node.id]) for node in snapshot.members if node.id in known]

    return rows


def read_by_model(read: Callable[[ModelCounts], float | HistogramValue]) -> Callable[[PoolSnapshot], list[Row]]:
    """Return a function that reads one row for each model in `PoolSnapshot.counters`, with the value of `read`."""
    return lambda picture: [((name,), read(counts)) for name, counts in picture.counters.models.items()]

"""Choice of the node that unloads models, and its cost."""

import pytest

from router.placement.candidate import NoPlacement, ResourceDemand
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.model_demand import ModelDemand
from router.placement.place import place
from router.placement.reservations import ReservationLedger
from router.placement.unload_choice import compute_unload_cost
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.identity import NodeId
from wire.report import EngineState
from wire.units import GIB

NOW = 1000.0


def node(name: str, *loaded: str, room: int = 2, **facts: object) -> NodeView:
    models = {
        one: a_model(one, **{"loaded": one in loaded, "weights": 8 * GIB, "load_seconds": 10.0} | facts)
        for one in ("new", "hot", "cold")
    }
    memory, engine = a_memory(room * GIB), EngineState("mlx", "ready")
    return NodeView(NodeId(name), name, "ready", reported_at=NOW, memory=memory, engine=engine, models=models)


def demand(**counts: int) -> ModelDemand:
    made = ModelDemand()
    for model, count in counts.items():
        for _ in range(count):
            made.record_request(model, NOW)
    return made


def test_unloading_costs_the_loads_of_the_requests_that_follow():
    rates = {"hot": 0.5, "cold": 0.1}
    full = node("a", "hot", "cold")
    assert compute_unload_cost(ClusterView((full,)), full, "new", 8 * GIB, rates) == pytest.approx(1.0)
    assert compute_unload_cost(ClusterView((full,)), full, "new", 9 * GIB, rates) == pytest.approx(6.0)
    assert compute_unload_cost(ClusterView((full,)), full, "new", 0, rates) == 0.0


def test_a_model_that_another_node_has_loaded_costs_nothing():
    both = ClusterView((node("a", "hot"), node("b", "hot")))
    assert compute_unload_cost(both, both.nodes[0], "new", 8 * GIB, {"hot": 0.5}) == 0.0


def test_a_preloaded_model_does_not_count_because_it_stays():
    held = node("a", "hot", pinned=True)
    assert compute_unload_cost(ClusterView((held,)), held, "new", 8 * GIB, {"hot": 0.5}) == 0.0


@pytest.mark.parametrize("first", [True, False])
def test_a_request_unloads_the_model_with_the_least_demand(first: bool):
    nodes = (node("a", "hot", room=3), node("b", "cold"))
    result = place(
        ClusterView(nodes if first else nodes[::-1]),
        ResourceDemand("new", 0, 1, 1),
        ReservationLedger(),
        now=NOW,
        draw=lambda: 0.5,
        demand=demand(hot=5, cold=1),
    )
    assert isinstance(result, NoPlacement)
    assert result.candidate is not None
    assert result.candidate.name == "b", "the roomiest one has the model that is used most"

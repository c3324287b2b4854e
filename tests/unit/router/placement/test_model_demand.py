"""Recent demand for models, and the cost of unloading them."""

import pytest

from router.placement.candidate import NoPlacement, ResourceDemand
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.model_demand import HALF_LIFE_SECONDS, MAX_MODELS, ModelDemand, compute_unload_cost
from router.placement.place import place
from router.placement.reservations import ReservationLedger
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


def test_demand_halves_within_its_half_life_and_adds_up():
    made = demand(hot=4)
    now = made.compute_rates(NOW)["hot"]
    assert made.compute_rates(NOW + HALF_LIFE_SECONDS)["hot"] == pytest.approx(now / 2)
    made.record_request("hot", NOW + HALF_LIFE_SECONDS)
    assert made.compute_rates(NOW + HALF_LIFE_SECONDS)["hot"] == pytest.approx(now * 3 / 4)


def test_steady_requests_have_the_rate_at_which_they_arrive():
    made = ModelDemand()
    for second in range(0, 10_000, 20):
        made.record_request("m", float(second))
    assert made.compute_rates(9_990.0)["m"] == pytest.approx(0.05, rel=0.05)


def test_the_models_of_made_up_names_are_bounded():
    made = demand(hot=3)
    for at in range(2 * MAX_MODELS):
        made.record_request(f"m{at}", NOW)
    rates = made.compute_rates(NOW)
    assert len(rates) == MAX_MODELS
    assert "hot" in rates


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

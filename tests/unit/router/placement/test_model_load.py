"""The choice of the node that loads a model."""

from collections.abc import Mapping
from typing import Any

import pytest

from router.placement.cluster_view import ClusterView, NodeView
from router.placement.model_load import LoadPlacement, choose_load_node
from router.placement.policies import POLICIES
from router.placement.reservations import ReservationLedger
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.identity import NodeId
from wire.models.version import ModelVersion
from wire.refusals import RefusalCode, Refused
from wire.report import EngineState, Memory, Model
from wire.units import GIB

NOW = 1000.0


def node(name: str, model: Model | None, memory: Memory | None = None, **changes: Any) -> NodeView:
    facts: dict[str, Any] = {
        "state": "ready",
        "reported_at": NOW,
        "memory": memory or a_memory(),
        "engine": EngineState("mlx", "ready"),
        "models": {model.name: model} if model else {},
    } | changes
    return NodeView(NodeId(name), name, **facts)


def known(**changes: Any) -> Model:
    facts: dict[str, Any] = {"loaded": False, "weights": 4 * GIB}
    return a_model(**facts | changes)


def pick(
    *nodes: NodeView, tried: Mapping[NodeId, Refused] | None = None, version: ModelVersion | None = None
) -> LoadPlacement | Refused:
    return choose_load_node(
        ClusterView(nodes),
        "tiny",
        ReservationLedger(),
        now=NOW,
        draw=lambda: 0.5,
        policy=POLICIES["balanced"],
        corrections={},
        tried=tried or {},
        version=version,
    )


def name(choice: LoadPlacement | Refused) -> str:
    assert isinstance(choice, LoadPlacement), choice
    return choice.name


def test_choose_load_node_takes_a_node_with_room_without_the_model():
    small = node("small", known(), a_memory(3 * GIB))
    assert name(pick(small, node("has", a_model()), node("can", known()))) == "can"


def test_choose_load_node_takes_the_faster_node():
    slow, fast = known(load_seconds=60.0), known(load_seconds=5.0)
    assert name(pick(node("slow", slow), node("fast", fast))) == "fast"


def test_choose_load_node_falls_back_to_a_node_with_the_model():
    small = node("small", known(), a_memory(3 * GIB))
    assert pick(small, node("has", a_model(), a_memory(0))) == LoadPlacement(NodeId("has"), "has", loaded=True)


def test_choose_load_node_takes_a_node_that_loads_the_model():
    assert pick(node("at-it", known(loading=True), a_memory(0))) == LoadPlacement(NodeId("at-it"), "at-it")


def test_choose_load_node_prefers_a_loaded_model_to_one_that_is_being_loaded_and_then_the_most_headroom():
    loading, loaded = node("loading", known(loading=True), a_memory(2 * GIB)), node("loaded", a_model(), a_memory(GIB))
    roomier = node("roomier", a_model(), a_memory(2 * GIB))
    assert pick(loading, loaded) == LoadPlacement(NodeId("loaded"), "loaded", loaded=True)
    assert name(pick(loaded, roomier)) == name(pick(roomier, loaded)) == "roomier"


def test_choose_load_node_takes_a_node_with_the_model_whose_memory_cannot_be_read():
    unreadable = a_memory(phys=None, current=None, headroom=None)
    assert name(pick(node("blind", a_model(), unreadable))) == "blind"


def test_choose_load_node_takes_only_the_served_version():
    nodes = node("a", known(fingerprint="x", load_seconds=1.0)), node("b", known(fingerprint="y", load_seconds=9.0))
    assert name(pick(*nodes)) == "a"
    assert name(pick(*nodes, version=ModelVersion("y"))) == "b"


def test_choose_load_node_takes_a_full_node_with_idle_models():
    assert name(pick(node("full", known(), a_memory(1 * GIB)), node("fuller", known(), a_memory(0)))) == "full"


def test_choose_load_node_skips_a_cap_below_the_weights():
    answer = pick(node("mini", known(weights=30 * GIB)))
    assert isinstance(answer, Refused)
    assert (answer.code, answer.status) == (RefusalCode.TOO_LARGE, 400)
    assert answer.message == (
        "tiny needs 30.0 GiB in memory, mini can give 24.0 GiB at most and has 8.0 GiB now: use a smaller variant, or "
        "raise memory.cap"
    )
    assert answer.numbers is not None


def test_a_load_by_order_needs_no_margin():
    assert name(pick(node("mini", known(weights=23 * GIB)))) == "mini", "of 24 GiB, 2 of them margin"


def test_choose_load_node_retries_a_named_node_after_a_failure():
    broken = node("broken", known(cause="truncated"))
    assert name(pick(broken)) == "broken"
    assert name(pick(broken, node("sound", known()))) == "sound"


@pytest.mark.parametrize("change", [{"state": "lost"}, {"cordoned": True}, {"draining": True}])
@pytest.mark.parametrize("model", [known(), a_model(), known(loading=True), known(cause="truncated")])
def test_choose_load_node_skips_unavailable_nodes(change: dict[str, Any], model: Model):
    answer = pick(node("a", model, **change))
    assert isinstance(answer, Refused)
    assert answer.code in (RefusalCode.NOT_READY, RefusalCode.DRAINING, RefusalCode.LOAD_FAILED)


def test_choose_load_node_skips_nodes_that_refused():
    first, second = node("first", known(load_seconds=1.0)), node("second", known(load_seconds=9.0))
    told = Refused(RefusalCode.NO_ROOM, "a spike", None, 5.0)
    assert name(pick(first, second, tried={NodeId("first"): told})) == "second"
    answer = pick(first, second, tried={NodeId("first"): told, NodeId("second"): told})
    assert isinstance(answer, Refused)
    assert (answer.code, answer.retry_after) == (RefusalCode.NO_ROOM, 5.0)


def test_an_unknown_model_is_a_404():
    answer = pick(node("a", a_model("other")))
    assert isinstance(answer, Refused)
    assert answer.code is RefusalCode.NO_MODEL

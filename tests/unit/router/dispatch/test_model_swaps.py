"""The rules of `router.dispatch.model_swaps` for swaps of models, one by one and in thousands of generated views."""

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dispatch import model_swaps
from router.dispatch.active_request import ActiveRequest
from router.dispatch.model_swaps import (
    MAX_SLICE_KEYS,
    MIN_SLICE_SECONDS,
    SLICE_LOAD_FACTOR,
    SWAP_AFTER_SECONDS,
    WAIT_SLICES,
    BeginTurn,
    EndTurn,
    ModelUse,
    SendRequest,
    SwapInput,
    SwapPlanner,
)
from router.dispatch.parts.swap_input import MAX_REQUESTS_EXAMINED, build_swap_input
from router.dispatch.request import RequestSpec
from router.placement.candidate import FIRST, Candidate, ResourceDemand
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.place import evaluate_node
from router.placement.reservations import ReservationLedger, SwapTurn
from tests.support.requests import send
from wire.capacity.fairness import WeightedKey
from wire.frames import Delta, GenerationParams
from wire.identity import NodeId
from wire.report import ROW_COST, EngineState, Memory, Model
from wire.units import GIB, MIB

LONGEST = 300.0
N1, N2, N3 = NodeId("n1"), NodeId("n2"), NodeId("n3")
LOAD = 2.0
SLICE = MIN_SLICE_SECONDS + SLICE_LOAD_FACTOR * LOAD
START = 1000.0


def model(name: str, *, weights: int = 10 * GIB, load: float = LOAD, **more: object) -> Model:
    return Model(
        name,
        weights=weights,
        kv_per_token=MIB // 8,
        context=32768,
        load_seconds=load,
        prefill_speed=500.0,
        decode_speed=20.0,
        expected_output=200,
        **more,  # pyright: ignore
    )


class World:
    """Nodes with memory for `room` bytes of weights and rows, and models of 10 GiB; some of them loaded."""

    def __init__(self, *names: str, room: int = 14 * GIB) -> None:
        self.now = START
        self.room = room
        self.models = {name: model(name) for name in names}
        self.loaded: dict[NodeId, set[str]] = {}
        self.loading: dict[NodeId, set[str]] = {}
        self.states: dict[NodeId, str] = {}
        self.waiting: list[tuple[int, WeightedKey, str, float]] = []
        self.demands: dict[int, ResourceDemand] = {}
        self.refused: dict[int, frozenset[NodeId]] = {}
        self.load_seconds: dict[NodeId, float] = {}
        self.running: dict[NodeId, dict[str, list[ModelUse]]] = {}
        self.ledger = ReservationLedger()
        self.swaps = SwapPlanner(LONGEST)
        self.count = 0

    def node(self, node: NodeId, *loaded: str) -> None:
        self.loaded[node] = set(loaded)

    def waits(self, name: str, key: str = "bob", since: float | None = None, weight: int = 4) -> int:
        self.count += 1
        self.waiting.append((self.count, WeightedKey(key, weight), name, self.now if since is None else since))
        return self.count

    def runs(self, node: NodeId, name: str, key: str = "ada", seconds: float = 5.0, ticket: int = 0) -> None:
        self.count += 1
        use = ModelUse(ticket or self.count, WeightedKey(key, 4), seconds)
        self.running.setdefault(node, {}).setdefault(name, []).append(use)

    def view(self, node: NodeId) -> NodeView:
        loading, loaded = self.loading.get(node, set[str]()), self.loaded[node]
        models = {
            name: msgspec.structs.replace(
                one,
                loaded=name in loaded,
                loading=name in loading,
                load_seconds=self.load_seconds.get(node, one.load_seconds),
            )
            for name, one in self.models.items()
        }
        taken = sum(self.models[name].weights for name in loaded | loading) + GIB
        memory = Memory(self.room + 2 * GIB, self.room + 2 * GIB, GIB, taken, taken, base=GIB, armed=True)
        return NodeView(
            node,
            str(node),
            self.states.get(node, "ready"),
            reported_at=self.now,
            memory=memory,
            engine=EngineState("x", "ready"),
            models=models,
        )

    def picture(self) -> SwapInput:
        nodes = {node: self.view(node) for node in self.loaded}
        self.swaps.update_loaded(nodes.values(), self.now)
        waiting: list[model_swaps.SwapCandidate] = []
        keys: dict[str, dict[str, int]] = {}
        for ticket, key, name, since in sorted(self.waiting, key=lambda one: one[3]):
            demand = self.demands.get(ticket, ResourceDemand(name, 400, 100))
            trials = msgspec.structs.replace(FIRST, waiting=ticket)
            seen = tuple(evaluate_node(node, demand, self.ledger, self.now, {}, trials, {}) for node in nodes.values())
            refused = self.refused.get(ticket, frozenset())
            waiting.append(model_swaps.SwapCandidate(ticket, key, name, since, seen, refused))
            keys.setdefault(name, {})[key.name] = key.weight
        return SwapInput(nodes, waiting, keys, self.running, self.ledger.turns)

    def step(self, seconds: float = 0.0) -> list[model_swaps.Action]:
        """Advance the time, take a step and carry out its actions."""
        if seconds:
            self.picture()
        self.now += seconds
        actions = self.swaps.step(self.picture(), self.now).actions
        for action in actions:
            if isinstance(action, EndTurn):
                del self.ledger.turns[action.turn.node]
            else:
                self.ledger.turns[action.turn.node] = action.turn
            if isinstance(action, SendRequest):
                ticket = action.turn.request
                self.waiting = [one for one in self.waiting if one[0] != ticket]
                self.runs(action.turn.node, action.turn.model, ticket=ticket)
        return list(actions)

    def begun(self, seconds: float = 0.0) -> list[tuple[NodeId, str, set[str]]]:
        actions = self.step(seconds)
        return [(one.turn.node, one.turn.model, set(one.turn.leaving)) for one in actions if isinstance(one, BeginTurn)]


def busy() -> World:
    """Return one node with memory for one of two models: a request runs on model a, another waits for model b."""
    world = World("a", "b")
    world.node(N1, "a")
    world.runs(N1, "a")
    world.waits("b")
    return world


def test_model_in_use_is_unloaded_after_slice_and_wait():
    world = busy()
    assert world.begun(SWAP_AFTER_SECONDS) == [], "model a has been there for five seconds only"
    assert world.begun(SLICE - SWAP_AFTER_SECONDS) == [(N1, "b", {"a"})]
    world = World("a", "b")
    world.node(N1, "a")
    world.step(10 * SLICE)
    world.runs(N1, "a")
    world.waits("b")
    assert world.begun() == []
    assert world.begun(SWAP_AFTER_SECONDS) == [(N1, "b", {"a"})]


def test_model_that_a_report_omits_gets_a_new_slice_when_it_returns():
    world = busy()
    world.step(SLICE - 1.0)
    world.loaded[N1] = set()
    omitted = world.models.pop("a")
    world.picture()
    world.models["a"] = omitted
    world.loaded[N1] = {"a"}
    assert world.begun(SLICE - 1.0) == []
    assert world.begun(1.0) == [(N1, "b", {"a"})]


def test_idle_model_is_unloaded_at_once():
    world = World("a", "b", "c", room=25 * GIB)
    world.node(N1, "a", "c")
    world.runs(N1, "a")
    world.waits("b")
    began, asked = world.step()
    assert isinstance(began, BeginTurn)
    assert began.turn.leaving == {"c"}
    assert isinstance(asked, SendRequest)


def test_nothing_is_sent_before_the_last_answer_has_ended():
    world = busy()
    world.runs(N1, "a")
    world.step(SLICE)
    for _ in range(2):
        assert world.step(1.0) == []
        world.running[N1]["a"].pop()
    (asked,) = world.step(1.0)
    assert isinstance(asked, SendRequest)
    assert (asked.turn.request, asked.candidate.node) == (2, N1)
    assert world.step(0.1) == [], "its report does not show the model yet"
    world.loaded[N1], world.loading[N1] = set(), {"b"}
    (ended,) = world.step(0.1)
    assert isinstance(ended, EndTurn)
    assert not ended.why


def test_report_from_before_the_request_does_not_end_a_swap():
    world = busy()
    world.step(SLICE)
    world.running.clear()
    (asked,) = world.step(0.1)
    assert isinstance(asked, SendRequest)
    world.loaded[N1] = {"b"}
    assert world.step() == []
    (ended,) = world.step(0.1)
    assert isinstance(ended, EndTurn)
    assert not ended.why


def test_keys_that_wait_for_a_model_lose_it_as_those_do_that_use_it():
    world = World("a", "b", "c")
    world.node(N1, "a")
    world.node(N2, "c")
    world.runs(N1, "a", "ada", seconds=1.0)
    world.runs(N2, "c", "bea", seconds=90.0)
    world.waits("b")
    for key in ("eve", "fay"):
        world.waits("a", key)
    assert world.begun(MAX_SLICE_KEYS * SLICE) == [(N2, "b", {"c"})], (
        "node 1 is free sooner, but three keys would lose it"
    )


@pytest.mark.parametrize("elsewhere", [False, True])
def test_keys_lose_nothing_on_a_node_whose_model_another_node_has_loaded(elsewhere: bool):
    world = World("a", "b", "c", room=14 * GIB)
    world.node(N1, "a")
    world.node(N2, "c")
    world.node(N3, *(["a"] if elsewhere else []))
    world.states[N3] = "draining"
    for key in ("ada", "eve"):
        world.runs(N1, "a", key, seconds=9.0)
    world.runs(N2, "c", "bea", seconds=90.0)
    world.waits("b")
    assert world.begun(MAX_SLICE_KEYS * SLICE) == [(N1, "b", {"a"}) if elsewhere else (N2, "b", {"c"})]


def test_unloaded_model_is_swapped_in_by_the_same_rule():
    world = busy()
    world.step(SLICE)
    world.running.clear()
    world.step(0.1)
    world.loaded[N1] = {"b"}
    world.step(0.1)
    world.waits("a", "ada")
    assert world.begun(SLICE - 1.0) == []
    assert world.begun(1.1) == [(N1, "a", {"b"})]


def test_a_pinned_model_is_never_unloaded():
    world = busy()
    world.models["a"] = model("a", pinned=True)
    world.running.clear()
    assert world.step(LONGEST) == []


def test_request_that_fits_without_a_swap_waits_for_rows():
    world = World("a", "b", room=21 * GIB)
    world.node(N1, "a")
    world.runs(N1, "a")
    world.waits("b")
    world.ledger.reserve(N1, 7, 7, 9 * GIB)
    plan = world.swaps.step(world.picture(), world.now + LONGEST)
    assert not plan.actions
    assert not plan.waits


def test_each_node_swaps_to_one_model_at_a_time():
    world = World("a", "b", "c", "d")
    world.node(N1, "a")
    world.runs(N1, "a")
    world.waits("b")
    world.waits("c")
    assert world.begun(SLICE) == [(N1, "b", {"a"})]
    assert world.begun(SLICE) == [], "the memory is reserved"
    world.node(N2, "d")
    world.runs(N2, "d")
    world.step()
    assert world.begun(SLICE) == [(N2, "c", {"d"})]


def test_two_requests_for_one_model_swap_one_node():
    world = World("a", "b")
    for node in (N1, N2):
        world.node(node, "a")
        world.runs(node, "a")
        world.waits("b", f"key of {node}")
    assert len(world.begun(SLICE)) == 1
    assert world.begun(SLICE) == []


def test_the_node_swaps_that_fewest_keys_lose_and_that_is_free_soonest():
    world = World("a", "b", "c")
    world.node(N1, "a")
    world.node(N2, "c")
    for key in ("ada", "eve"):
        world.runs(N1, "a", key, seconds=1.0)
    world.runs(N2, "c", "ada", seconds=90.0)
    world.waits("b")
    assert world.begun(MAX_SLICE_KEYS * SLICE) == [(N2, "b", {"c"})], (
        "two keys would lose the last model a, one key model c"
    )
    world = World("a", "b")
    for node, seconds in ((N1, 60.0), (N2, 20.0)):
        world.node(node, "a")
        world.runs(node, "a", seconds=seconds)
    world.waits("b")
    assert world.begun(SLICE) == [(N2, "b", {"a"})]


def test_older_requests_for_the_model_in_use_run_first():
    world = busy()
    world.waits("a", "ada", since=world.now - 1.0)
    assert world.begun(SLICE) == []
    world.waiting.pop()
    world.waits("a", "ada", since=world.now)
    assert world.begun() == [(N1, "b", {"a"})]


def test_a_model_that_more_keys_use_stays_longer():
    world = busy()
    for key in ("eve", "fay"):
        world.runs(N1, "a", key)
    assert world.begun(3 * SLICE - 0.1) == []
    assert world.begun(0.2) == [(N1, "b", {"a"})]
    world = busy()
    for number in range(20):
        world.runs(N1, "a", f"key {number}")
    assert world.begun(MAX_SLICE_KEYS * SLICE) == [(N1, "b", {"a"})]


@pytest.mark.parametrize(("load", "other_load"), [(3.0, 1.0), (1.0, 3.0)])
def test_a_slice_lasts_by_the_longer_load_and_by_the_weight_of_all_keys_of_its_model(load: float, other_load: float):
    world = busy()
    world.models |= {"a": model("a", load=load), "b": model("b", load=other_load)}
    whole = MIN_SLICE_SECONDS + SLICE_LOAD_FACTOR * 3.0

    def compute() -> float:
        picture = world.picture()
        return world.swaps.compute_slice_seconds("a", "b", picture.nodes[N1], picture)

    assert compute() == whole
    world.waits("a", "eve", weight=2)
    assert compute() == whole * 1.5, "ada with weight 4 uses it, eve with weight 2 waits for it, and bob has 4"
    world.waits("b", "fay", weight=16)
    assert compute() == whole
    world.waiting.clear()
    world.runs(N1, "a", "gus")
    assert compute() == min(whole * MAX_SLICE_KEYS, LONGEST / WAIT_SLICES), "without waiting keys, two weigh 8"


def test_slice_ends_before_the_deadline_of_a_waiting_request():
    world = busy()
    world.models = {name: msgspec.structs.replace(one, load_seconds=500.0) for name, one in world.models.items()}
    assert world.begun(LONGEST / WAIT_SLICES - 0.1) == []
    assert world.begun(0.2) == [(N1, "b", {"a"})]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("left", "no request needs it any more"),
        ("another model", "no request needs it any more"),
        ("another node", "no request needs it any more"),
        ("elsewhere", "no request needs it any more"),
        ("smaller", "no request needs it any more"),
        ("away", "the node is unavailable"),
        ("removed", "the node is unavailable"),
        ("deleted", "the node is unavailable"),
    ],
)
def test_a_swap_ends_when_no_request_waits_or_the_node_is_lost_or_another_has_headroom(case: str, why: str):
    world = busy()
    world.models["c"] = model("c")
    second = world.waits("b", "eve")
    world.step(SLICE)
    if case == "left":
        world.waiting.clear()
    elif case == "another model":
        world.waiting.clear()
        world.waits("c")
    elif case == "another node":
        del world.waiting[0]
        world.demands[second] = ResourceDemand("b", 400, 100, node=N2)
    elif case == "elsewhere":
        world.node(N2, "b")
    elif case == "smaller":
        world.room = 9 * GIB
    elif case == "away":
        world.states[N1] = "suspect"
    elif case == "removed":
        del world.loaded[N1]
    else:
        del world.models["b"]
    (ended,) = world.step(0.1)
    assert isinstance(ended, EndTurn)
    assert ended.why == why
    assert not world.ledger.turns


def test_swap_continues_for_the_next_request_after_a_cancel():
    world = busy()
    second = world.waits("b", "eve")
    world.step(SLICE)
    del world.waiting[0]
    (changed,) = world.step(0.1)
    assert isinstance(changed, BeginTurn)
    assert changed.turn.request == second
    assert changed.turn.began == world.now - 0.1
    assert changed.hold == world.picture().waiting[0].candidates[0].need - 10 * GIB


def test_a_refused_request_is_sent_again():
    world = busy()
    world.step(SLICE)
    world.running.clear()
    world.step(0.1)
    world.running.clear()
    world.waits("b", since=START)
    actions = world.step(0.6)
    assert [type(action) for action in actions] == [BeginTurn, SendRequest]


def test_a_refused_request_is_not_sent_again_before_the_next_report():
    world = busy()
    world.step(SLICE)
    world.running.clear()
    world.refused[2] = frozenset({N1})
    assert world.step(0.1) == []
    world.refused.clear()
    (asked,) = world.step(0.1)
    assert isinstance(asked, SendRequest)


def test_a_swap_ends_when_another_request_loads_the_model():
    world = busy()
    world.step(SLICE)
    world.running.clear()
    world.step(0.1)
    world.running = {N1: {"b": [ModelUse(9, WeightedKey("eve", 4), 5.0)]}}
    world.waits("b")
    (ended,) = world.step(0.1)
    assert isinstance(ended, EndTurn)
    assert ended.why == "no request needs it any more"


def test_the_request_of_a_turn_is_sent_and_not_an_older_one_for_another_node():
    world = World("a", "b", "c")
    world.node(N1, "a")
    world.runs(N1, "a")
    world.demands[world.waits("c", since=START - 1.0)] = ResourceDemand("c", 400, 100, node=N2)
    world.waits("b")
    world.step(SLICE)
    world.running.clear()
    (asked,) = world.step(0.1)
    assert isinstance(asked, SendRequest)
    assert asked.candidate.model is not None
    assert asked.candidate.model.name == "b"


def test_slow_swap_ends_and_begins_another_slice():
    world = busy()
    assert world.begun(SLICE)
    assert world.step(LONGEST) == []
    (ended,) = world.step(0.1)
    assert isinstance(ended, EndTurn)
    assert "300 s" in ended.why
    assert world.begun(SLICE - 1.0) == []
    assert world.begun(1.1)


@pytest.mark.parametrize("used", [False, True])
def test_a_large_request_makes_idle_models_leave_although_its_own_is_loaded(used: bool):
    world = World("a", "b", room=21 * GIB)
    world.node(N1, "a", "b")
    if used:
        world.runs(N1, "b")
    picture = world.picture()
    demand = ResourceDemand("b", 0, 16000)
    world.waiting.clear()
    candidate = evaluate_node(picture.nodes[N1], demand, world.ledger, world.now, {}, FIRST, {})
    one = model_swaps.SwapCandidate(1, WeightedKey("bob", 4), "b", world.now, (candidate,))
    begun, asked = world.swaps.step(msgspec.structs.replace(picture, waiting=(one,)), world.now).actions
    assert isinstance(begun, BeginTurn)
    assert begun.turn.leaving == {"a"}
    assert isinstance(asked, SendRequest)


def test_hold_is_the_need_minus_unloaded_bytes():
    world = busy()
    (begun,) = world.step(SLICE)
    assert isinstance(begun, BeginTurn)
    (one,) = world.picture().waiting
    assert begun.hold == one.candidates[0].need - 10 * GIB > 0
    world.models["a"] = model("a", weights=13 * GIB)
    world.models["b"] = model("b", weights=GIB)
    world.ledger.turns.clear()
    (begun,) = world.step(SLICE)
    assert isinstance(begun, BeginTurn)
    assert begun.hold == 0, "it needs less than that"


def test_an_idle_pinned_model_is_not_unloaded_for_a_request():
    world = World("a", "b", "pinned", room=25 * GIB)
    world.models["pinned"] = model("pinned", pinned=True)
    world.node(N1, "a", "pinned")
    world.runs(N1, "a")
    world.waits("b")
    (begun,) = world.step(SLICE)
    assert isinstance(begun, BeginTurn)
    assert begun.turn.leaving == {"a"}
    assert world.step(1.0) == [], "model a is in use, and the pinned one stays"
    world.running.clear()
    (asked,) = world.step(1.0)
    assert isinstance(asked, SendRequest)


def test_a_request_swaps_and_is_sent_where_the_memory_just_suffices():
    world = busy()
    world.room = need = world.picture().waiting[0].candidates[0].need
    assert world.begun(SLICE) == [(N1, "b", {"a"})]
    assert world.step(0.1) == []
    world.running.clear()
    (asked,) = world.step(0.1)
    assert isinstance(asked, SendRequest)
    world = busy()
    world.room = need - 1
    assert world.begun(SLICE) == []


def test_only_the_weights_of_loaded_idle_models_make_room():
    world = World("a", "b", "on disk")
    world.node(N1, "a")
    world.runs(N1, "a")
    world.waits("b")
    assert world.begun(SLICE) == [(N1, "b", {"a"})]
    assert world.step(1.0) == [], "model a is in use"
    world = World("a", "b", room=21 * GIB)
    world.node(N1, "a", "b")
    world.runs(N1, "a")
    world.demands[world.waits("b")] = ResourceDemand("b", 0, 16000)
    assert world.begun(SLICE) == [(N1, "b", {"a"})]
    assert world.step(1.0) == [], "the request needs its own model, and model a is in use"


@pytest.mark.parametrize(
    ("uses", "leaves"),
    [
        ([("a", "ada", 5.0)], "b"),
        ([("b", "ada", 5.0)], "a"),
        ([("a", "ada", 1.0), ("a", "eve", 1.0), ("b", "ada", 90.0)], "b"),
        ([("a", "ada", 90.0), ("a", "ada", 1.0), ("b", "eve", 20.0)], "b"),
    ],
)
def test_the_model_leaves_that_is_idle_or_that_fewest_keys_use_or_that_is_free_soonest(
    uses: list[tuple[str, str, float]], leaves: str
):
    world = World("a", "b", "c", room=24 * GIB)
    world.node(N1, "a", "b")
    for name, key, seconds in uses:
        world.runs(N1, name, key, seconds)
    world.waits("c")
    assert world.begun(MAX_SLICE_KEYS * SLICE) == [(N1, "c", {leaves})]


def test_a_model_that_is_being_loaded_stays_until_it_is_loaded():
    world = World("loading", "b")
    world.node(N1)
    world.loading[N1] = {"loading"}
    world.waits("b")
    plan = world.swaps.step(world.picture(), world.now + LONGEST)
    assert (plan.actions, plan.waits) == ((), {"b": None})
    world.loading.clear()
    world.node(N1, "loading")
    assert world.begun(SLICE) == [(N1, "b", {"loading"})]


def test_an_idle_model_leaves_before_one_that_is_being_loaded():
    world = World("loading", "idle", "b", room=24 * GIB)
    world.node(N1, "idle")
    world.loading[N1] = {"loading"}
    world.waits("b")
    assert world.begun() == [(N1, "b", {"idle"})]


def test_a_model_that_is_being_loaded_leaves_before_one_in_use():
    world = World("loading", "used", "b", room=24 * GIB)
    world.node(N1, "used")
    world.runs(N1, "used")
    world.loading[N1] = {"loading"}
    world.waits("b")
    assert world.begun(LONGEST) == [], "it is not unloaded before it is loaded"
    world.loading.clear()
    world.node(N1, "loading", "used")
    assert world.begun(SLICE) == [(N1, "b", {"loading"})]


@pytest.mark.parametrize(
    ("spare", "leaving"),
    [
        (GIB - 1, {"1 GiB", "2 GiB", "10 GiB"}),
        (GIB, {"2 GiB", "10 GiB"}),
        (2 * GIB, {"1 GiB", "10 GiB"}),
        (10 * GIB - 1, {"10 GiB"}),
    ],
)
def test_no_model_leaves_that_a_larger_one_makes_unnecessary(spare: int, leaving: set[str]):
    """`spare` bytes are left once all models have made room for the request."""
    world = World("1 GiB", "2 GiB", "10 GiB", "b")
    for name in ("1 GiB", "2 GiB"):
        world.models[name] = model(name, weights=int(name[0]) * GIB)
    world.node(N1, "1 GiB", "2 GiB", "10 GiB")
    world.waits("b")
    world.room = world.picture().waiting[0].candidates[0].need + spare
    assert world.begun() == [(N1, "b", leaving)]


def test_requests_wait_for_a_swap_where_one_will_be_possible_only():
    world = busy()
    world.models["c"] = model("c")
    world.step(SLICE)
    world.waits("c")
    plan = world.swaps.step(world.picture(), world.now)
    assert plan.waits == {"b": world.ledger.turns[N1], "c": None}, "the node swaps to model b first"
    world = busy()
    world.models["a"] = model("a", pinned=True)
    assert world.swaps.step(world.picture(), world.now + LONGEST).waits == {}


def test_the_time_of_a_swap_is_the_longest_answer_and_the_load():
    world = World("a", "b")
    for node, uses in ((N1, (60.0, 5.0)), (N2, (20.0,))):
        world.node(node, "a")
        for seconds in uses:
            world.runs(node, "a", seconds=seconds)
    world.waits("b")
    assert world.begun(SLICE) == [(N2, "b", {"a"})]
    world = World("a", "b")
    for node, load, seconds in ((N1, 20.0, 5.0), (N2, 2.0, 10.0)):
        world.node(node, "a")
        world.load_seconds[node] = load
        world.runs(node, "a", seconds=seconds)
    world.waits("b")
    assert world.begun(LONGEST) == [(N2, "b", {"a"})]


def test_an_idle_model_leaves_before_one_that_is_in_use_for_half_a_second():
    world = World("a", "b", "idle", "pinned")
    world.models["pinned"] = model("pinned", pinned=True)
    world.node(N1, "a")
    world.runs(N1, "a", seconds=0.5)
    world.node(N2, "idle")
    world.node(N3, "a", "pinned")
    world.step(SLICE)
    world.waits("b", since=START)
    assert world.begun() == [(N2, "b", {"idle"})], "no key loses the last model a, and still it takes longer"


# views


def ticket(number: int, name: str, key: str = "bob", weight: int = 4) -> ActiveRequest:
    job = RequestSpec(ResourceDemand(name, 400, 100), key, "r", (), GenerationParams(), 0, stream=False)
    return ActiveRequest(job, WeightedKey(key, weight), number, START + number)


def judged(
    view: ClusterView, queued: list[ActiveRequest], ledger: ReservationLedger, live: Iterable[ActiveRequest] = ()
) -> SwapInput:
    return build_swap_input(view, queued, live, ledger, lambda _, node: Candidate(node.id, node.name, node.state))


def test_snapshot_has_the_oldest_requests_of_each_model_and_key(monkeypatch: pytest.MonkeyPatch):
    world = World("a", "b")
    for node in (N1, N2, N3):
        world.node(node)
    world.node(N2, "b")
    view = ClusterView(tuple(world.view(node) for node in world.loaded))
    queued = [ticket(number, "b", f"key {number}", number) for number in range(1, MAX_REQUESTS_EXAMINED + 3)]
    queued += [ticket(9, "a"), ticket(10, "gone")]
    for node, reported_at in ((N2, START), (N3, START - 1.0)):
        queued[0].tried.mark_refused(node, reported_at)
    world.ledger.reserve(N1, 1, 1, GIB)
    monkeypatch.setattr("router.dispatch.parts.swap_input.MAX_NODES_EXAMINED", 2)
    picture = judged(view, queued, world.ledger)
    assert [one.request for one in picture.waiting] == [1, 2, 3, 4, 9, 10]
    assert [[at.node for at in one.candidates] for one in picture.waiting] == [[N2, N3]] * 4 + [[N2, N3], []]
    assert picture.keys == {
        "b": {f"key {number}": number for number in range(1, MAX_REQUESTS_EXAMINED + 3)},
        "a": {"bob": 4},
        "gone": {"bob": 4},
    }
    assert [set(one.refused) for one in picture.waiting[:2]] == [{N2}, set()], "since its newest report"
    assert (picture.waiting[0].since, picture.waiting[0].weighted_key) == (START + 1, WeightedKey("key 1", 1))
    world.loading[N3] = {"b"}
    world.ledger.turns[N1] = SwapTurn(N1, "n1", "b", frozenset(), 1, START)
    view = ClusterView(tuple(world.view(node) for node in world.loaded))
    turned = judged(view, queued[:1], world.ledger).waiting[0]
    assert [at.node for at in turned.candidates] == [N1, N2], "a node with a turn is looked at first"
    world.ledger.turns.clear()
    world.ledger.reserve(N2, 2, 2, GIB)
    loading = judged(view, queued[:1], world.ledger).waiting[0]
    assert [at.node for at in loading.candidates] == [N3, N2], "one that loads the model has it"


def test_snapshot_has_running_requests_with_remaining_seconds():
    world = World("a", "slow")
    world.models["slow"] = msgspec.structs.replace(model("slow"), decode_speed=0.0)
    world.node(N1, "a", "slow")
    live = [ticket(number, name) for number, name in ((1, "a"), (2, "a"), (3, "slow"), (4, "a"), (5, "a"))]
    live[1].add_delta(Delta(12, 0, tuple(range(100)), ()))
    for number, one in enumerate(live[:4], 1):
        send(one, N2 if number == 4 else N1, 10 + number)
        world.ledger.reserve(N1, one.attempt, number, GIB, 400, seconds=2.0)
    world.ledger.mark_prefilled(12)
    picture = judged(ClusterView((world.view(N1),)), [], world.ledger, live)
    answer = 200 / 20.0 * (1 + 4 * ROW_COST)
    assert picture.running == {
        N1: {
            "a": [ModelUse(1, WeightedKey("bob", 4), answer + 2.0), ModelUse(2, WeightedKey("bob", 4), answer / 2)],
            "slow": [ModelUse(3, WeightedKey("bob", 4), 0.0)],
        }
    }


# generated views

NAMES = "abcde"
drawn_nodes = st.lists(st.sets(st.sampled_from(NAMES), max_size=3), min_size=1, max_size=3)
drawn_uses = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(NAMES), st.sampled_from("xyz")), max_size=12)
drawn_waits = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from("xyz"), st.floats(0, 120)), min_size=1, max_size=8
)


def drawn(
    nodes: Iterable[set[str]],
    uses: list[tuple[int, str, str]],
    waits: list[tuple[str, str, float]],
    room: int,
    pinned: set[str],
) -> World:
    world = World(*NAMES, room=room * GIB)
    for name in pinned:
        world.models[name] = model(name, pinned=True)
    for node, loaded in zip((N1, N2, N3), nodes, strict=False):
        world.node(node, *loaded)
    present = list(world.loaded)
    for at, name, key in uses:
        node = present[at % len(present)]
        if name in world.loaded[node]:
            world.runs(node, name, key)
    world.step(MAX_SLICE_KEYS * LONGEST)
    for name, key, ago in waits:
        world.waits(name, key, since=world.now - ago)
    return world


@given(drawn_nodes, drawn_uses, drawn_waits, st.integers(5, 40), st.sets(st.sampled_from(NAMES), max_size=2))
def test_any_swap_keeps_the_rules(
    nodes: list[set[str]],
    uses: list[tuple[int, str, str]],
    waits: list[tuple[str, str, float]],
    room: int,
    pinned: set[str],
):
    world = drawn(nodes, uses, waits, room, pinned)
    wanted = {name for _, _, name, _ in world.waiting}
    actions = world.step()
    turns = [action.turn for action in actions if isinstance(action, BeginTurn)]
    assert len({turn.node for turn in turns}) == len(turns), "one for each node"
    assert len({turn.model for turn in turns}) == len(turns), "one for each model"
    for turn in turns:
        assert not turn.leaving & pinned
        assert turn.leaving <= world.loaded[turn.node]
        assert turn.model not in turn.leaving
        stays = sum(world.models[name].weights for name in world.loaded[turn.node] - turn.leaving - {turn.model})
        assert stays + world.models[turn.model].weights <= room * GIB, "it fits when they have left"
        assert turn.model in wanted
    for action in actions:
        if isinstance(action, SendRequest):
            in_use = {name for name, here in world.running.get(action.turn.node, {}).items() if here}
            assert not action.turn.leaving & in_use, "nothing that runs is cut"


@given(drawn_nodes, drawn_uses, drawn_waits, st.integers(11, 30), st.data())
def test_any_swap_ends(
    nodes: list[set[str]],
    uses: list[tuple[int, str, str]],
    waits: list[tuple[str, str, float]],
    room: int,
    data: st.DataObject,
):
    """Nodes and clients do anything meanwhile, or nothing."""
    world = drawn(nodes, uses, waits, room, set())
    for _ in range(12):
        world.step(data.draw(st.sampled_from([0.25, 5.0, 60.0])))
        assert all(world.now - turn.began <= LONGEST for turn in world.ledger.turns.values())
        if world.running and data.draw(st.booleans()):
            world.running.pop(data.draw(st.sampled_from(sorted(world.running))))
        if world.waiting and data.draw(st.booleans()):
            world.waiting.pop()
    world.waiting.clear()
    world.running.clear()
    world.step(LONGEST + 1.0)
    assert not world.ledger.turns


def test_keys_that_wait_do_not_shorten_the_slice_of_a_model():
    world = busy()
    for key in ("eve", "fay"):
        world.waits("b", key)
    assert world.begun(SLICE - 0.1) == []
    assert world.begun(0.2) == [(N1, "b", {"a"})]


def test_a_model_that_is_loaded_again_has_a_whole_slice():
    world = busy()
    world.waiting.clear()
    world.step(SLICE)
    world.loaded[N1] = set()
    world.step(1.0)
    world.loaded[N1] = {"a"}
    world.waits("b", since=START)
    assert world.begun(SLICE - 0.1) == []
    assert world.begun(0.2) == [(N1, "b", {"a"})]


def test_a_removed_node_that_joins_again_has_whole_slices_and_other_nodes_keep_theirs():
    world = World("a", "b")
    for node, seconds in ((N1, 1.0), (N2, 60.0)):
        world.node(node, "a")
        world.runs(node, "a", seconds=seconds)
    world.step(SLICE)
    world.swaps.remove_node(N1)
    world.waits("b", since=START)
    assert world.begun() == [(N2, "b", {"a"})], "node 1 would be free sooner, but has a new slice"


def test_models_in_use_leave_together_when_all_their_slices_have_ended():
    world = World("a", "b", "c", room=25 * GIB)
    world.models["c"] = model("c", weights=20 * GIB)
    world.node(N1, "a")
    world.runs(N1, "a")
    world.step(SLICE - 1.0)
    world.loaded[N1].add("b")
    world.runs(N1, "b")
    world.waits("c", since=START)
    assert world.begun(1.0) == []
    assert world.begun(SLICE) == [(N1, "c", {"a", "b"})]

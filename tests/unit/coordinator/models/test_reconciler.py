"""The reconciler: its loads and unloads for wishes, its limits, and the missing number of each shortfall."""

from typing import Any

import pytest

from coordinator.models.action_history import ActionHistory
from coordinator.models.reconciler import find_ready_replicas, plan_actions
from coordinator.models.wishes import LoadWish, Plan, UnloadReason, UnloadWish, Wish
from router.placement.reservations import SwapTurn
from tests.support.cluster.wish_pool import WishNode, WishPool
from wire.identity import NodeId
from wire.report import EngineState
from wire.units import GIB

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def disk(**gibibytes: float) -> dict[str, dict[str, Any]]:
    return {name: {"weights": int(size * GIB)} for name, size in gibibytes.items()}


def node(name: str, cap: float = 24, *loaded: str, **sizes: float) -> WishNode:
    return WishNode(name, int(cap * GIB), disk(**sizes or {"m": 8}), set(loaded))


def text(plan: Plan, model: str = "m") -> str:
    return next(one.text for one in plan.shortfalls if one.model == model)


def test_a_missing_replica_is_loaded_and_then_the_wish_is_met():
    pool = WishPool([node("a"), node("b")], [Wish("m", 2)])
    first = pool.plan()
    assert {action.node for action in first.actions} == {A, B}
    assert all(isinstance(action, LoadWish) and action.model == "m" for action in first.actions)
    last = pool.settle()
    assert last.states[0].met
    assert last.shortfalls == ()
    assert pool.loads() == [("a", "m"), ("b", "m")]


@pytest.mark.parametrize("is_loaded", [True, False], ids=["ready", "coming"])
def test_plan_actions_loads_only_the_missing_replicas(is_loaded: bool):
    pool = WishPool([node("a"), node("b"), node("c")], [Wish("m", 2)])
    (pool.nodes[A].loaded if is_loaded else pool.nodes[A].loading).add("m")
    pool.refresh()
    assert len(pool.plan().actions) == 1


def test_a_model_without_a_wish_makes_room_for_the_cheapest_wish():
    pool = WishPool([node("a", 18, "x", x=10, m=10)], [Wish("m", eviction_cost=0)])
    pool.settle()
    assert pool.loads() == [("a", "m")]


def test_of_two_wishes_with_one_cost_the_first_by_name_gets_the_memory():
    pool = WishPool([node("a", 18, m=10, k=10)], [Wish("m"), Wish("k")])
    assert [action.model for action in pool.plan().actions] == ["k"]


def test_replicas_above_the_wish_stay_loaded():
    pool = WishPool([node("a", 24, "m"), node("b", 24, "m")], [Wish("m", 1)])
    assert pool.settle().actions == ()
    assert pool.nodes[A].loaded == pool.nodes[B].loaded == {"m"}


def test_a_node_without_the_model_on_disk_is_named_with_the_numbers():
    pool = WishPool([node("a"), node("b", 24, x=1)], [Wish("m", 2)])
    assert text(pool.settle()) == "needs 2 nodes with the model on disk, 1 has it: pull it to another node"
    without_copies = WishPool([node("a", 24, x=1)], [Wish("m")])
    assert text(without_copies.settle()) == "needs 1 node with the model on disk, none have it: pull it to another node"


def test_missing_memory_is_named_with_the_numbers_of_the_best_node():
    pool = WishPool([node("a", 33, m=43.5), node("b", 20, m=43.5)], [Wish("m")])
    assert text(pool.settle()) == (
        "needs 43.6 GiB, best node a has 31.0 GiB: unload a model there, raise memory.cap, or want a smaller variant"
    )


def test_a_pool_that_is_too_small_is_named_with_the_numbers():
    assert text(WishPool([node("a")], [Wish("m", 2)]).settle()) == (
        "needs 2 nodes, the pool has 1: join another Mac, or want fewer replicas"
    )
    pool = WishPool([node("a"), node("b")], [Wish("m", 2, deny=(B,))])
    assert text(pool.settle()) == "needs 2 nodes, its labels and node lists allow 1: change the wish"
    former = node("b")
    former.facts["state"] = "left"
    assert text(WishPool([node("a"), former], [Wish("m", 2)]).settle()).startswith("needs 2 nodes, the pool has 1: ")


@pytest.mark.parametrize(
    "wish",
    [Wish("m", allow=(B,)), Wish("m", deny=(A, C)), Wish("m", labels=("fast",))],
    ids=["allow", "deny", "labels"],
)
def test_only_nodes_that_the_wish_allows_load_it(wish: Wish):
    fast = node("b")
    fast.facts["labels"] = frozenset({"fast"})
    pool = WishPool([node("a"), fast, node("c")], [wish])
    pool.settle()
    assert pool.loads() == [("b", "m")]


@pytest.mark.parametrize(
    "facts",
    [
        {"cordoned": True},
        {"draining": True},
        {"state": "draining"},
        {"state": "suspect"},
        {"state": "asleep"},
        {"state": "paused"},
        {"state": "lost"},
        {"state": "failing"},
        {"reported_at": 0.5},
        {"engine": EngineState("mlx", "starting")},
    ],
    ids=str,
)
def test_a_node_that_takes_no_requests_gets_no_action(facts: dict[str, Any]):
    away = node("a", 24, "x", m=20, x=8)
    away.facts |= facts
    idle = node("b", 24, "y", y=1)
    pool = WishPool([away, idle], [Wish("m"), Wish("x", idle_unload_seconds=5.0)])
    pool.settle()
    assert pool.actions == []


def test_a_replica_that_serves_stays_where_it_is():
    pool = WishPool([node("a", 24, "m"), node("b", 64)], [Wish("m", 1)])
    assert pool.settle().actions == ()


def test_of_two_nodes_the_one_with_the_shorter_load_is_chosen():
    slow, fast = node("a"), node("b")
    slow.disk["m"]["load_seconds"], fast.disk["m"]["load_seconds"] = 60.0, 5.0
    pool = WishPool([slow, fast], [Wish("m")])
    pool.settle()
    assert pool.loads() == [("b", "m")]


def test_of_two_nodes_the_one_with_more_free_memory_is_chosen():
    pool = WishPool([node("a"), node("b", 64)], [Wish("m")])
    pool.settle()
    assert pool.loads() == [("b", "m")]


def test_a_node_with_free_memory_comes_before_one_that_must_unload():
    full, free = node("a", 24, "x", m=20, x=8), node("b", 24, m=20)
    full.disk["m"]["load_seconds"], free.disk["m"]["load_seconds"] = 1.0, 60.0
    pool = WishPool([full, free], [Wish("m")])
    pool.settle()
    assert pool.loads() == [("b", "m")]
    assert pool.unloads() == []


def test_an_unused_model_makes_room_and_only_as_many_as_needed():
    pool = WishPool([node("a", 24, "x", "y", "z", m=10, x=2, y=4, z=8)], [Wish("m")])
    first = pool.plan()
    assert [(action.model, getattr(action, "why", None)) for action in first.actions] == [("y", UnloadReason.MEMORY)]
    assert text(first) == "a unloads y for it"
    pool.settle()
    assert pool.unloads() == [("a", "y")]
    assert pool.nodes[A].loaded == {"m", "x", "z"}


def test_a_node_that_acts_for_a_wish_is_not_named_as_missing():
    pool = WishPool([node("a", 24, "x", m=20, x=8), node("b", 16, m=20)], [Wish("m", 2)])
    assert text(pool.plan()) == (
        "a unloads x for it; needs 20.1 GiB, best node b has 14.0 GiB: unload a model there, raise memory.cap, "
        "or want a smaller variant"
    )


def test_the_least_recently_used_model_is_unloaded_first():
    pool = WishPool([node("a", 24, "x", "y", m=14, x=7, y=7)], [Wish("m")])
    pool.requested = {"x"}
    pool.plan()
    pool.now += 30.0
    pool.requested = {"y"}
    pool.refresh()
    pool.plan()
    pool.now += 100.0
    pool.refresh()
    pool.settle()
    assert pool.unloads() == [("a", "x")]


def test_a_model_in_use_is_not_evicted():
    busy = node("a", 24, "x", m=20, x=8)
    busy.in_use = {"x"}
    pool = WishPool([busy], [Wish("m", eviction_cost=1000)])
    plan = pool.settle()
    assert pool.actions == []
    assert text(plan).startswith("needs 20.1 GiB, best node a has 14.0 GiB: ")
    forgetful = plan_actions(pool.wishes, pool.read(), ActionHistory(0.0))
    assert forgetful.actions == (), "also where the history does not know of the request"
    busy.in_use.clear()
    pool.now += 61.0
    pool.refresh()
    pool.settle()
    assert pool.nodes[A].loaded == {"m"}


def test_a_model_that_was_used_within_a_minute_is_not_evicted():
    pool = WishPool([node("a", 24, "x", m=20, x=8)], [Wish("m")])
    pool.requested = {"x"}
    assert pool.plan().actions == ()
    pool.now += 59.0
    pool.refresh()
    assert pool.plan().actions == ()
    pool.now += 1.0
    pool.refresh()
    assert len(pool.plan().actions) == 1


def test_a_preloaded_model_is_not_evicted():
    held = node("a", 24, "x", m=20, x=8)
    held.disk["x"]["pinned"] = True
    pool = WishPool([held], [Wish("m")])
    pool.settle()
    assert pool.actions == []


@pytest.mark.parametrize(("cost", "leaves"), [(9, True), (10, False), (11, False)])
def test_a_replica_is_evicted_only_for_a_wish_with_a_higher_cost(cost: int, leaves: bool):
    pool = WishPool([node("a", 24, "x", m=20, x=8)], [Wish("m", eviction_cost=10), Wish("x", eviction_cost=cost)])
    plan = pool.settle()
    assert pool.unloads() == ([("a", "x")] if leaves else [])
    assert [one.model for one in plan.shortfalls] == (["x"] if leaves else ["m"])


def test_a_surplus_replica_makes_room_for_a_wish_with_a_lower_cost():
    nodes = [node("a", 24, "x", x=8), node("b", 24, "x", m=20, x=8)]
    pool = WishPool(nodes, [Wish("m", eviction_cost=1), Wish("x", 1, eviction_cost=100)])
    pool.settle()
    assert pool.unloads() == [("b", "x")]


def test_two_wishes_do_not_take_the_same_surplus_replica():
    nodes = [node(name, 24, "x", **{model: 20, "x": 8}) for name, model in zip("abc", "mno", strict=True)]
    for count in (2, 3):
        pool = WishPool(nodes[:count], [Wish("m"), Wish("n"), Wish("o"), Wish("x", 1)])
        assert len(pool.plan().actions) == count - 1


def test_one_wish_does_not_take_more_surplus_replicas_than_there_are():
    nodes = [node(name, 24, "x", m=20, x=8) for name in "ab"]
    pool = WishPool(nodes, [Wish("m", 2), Wish("x", 1, eviction_cost=100)])
    plan = pool.plan()
    assert [(action.node, action.model) for action in plan.actions] == [(A, "x")]
    assert text(plan).startswith("a unloads x for it; needs 20.1 GiB, best node b has 14.0 GiB: ")


def test_a_model_without_a_wish_leaves_before_a_surplus_replica():
    nodes = [node("a", 24, "x", "y", m=10, x=7, y=7), node("b", 24, "x", x=7)]
    pool = WishPool(nodes, [Wish("m"), Wish("x", 1)])
    assert [(action.node, action.model) for action in pool.plan().actions] == [(A, "y")]


def test_a_replica_that_its_wish_does_not_allow_has_no_cost():
    pool = WishPool([node("a", 24, "x", m=20, x=8)], [Wish("m", eviction_cost=1), Wish("x", deny=(A,))])
    assert [(action.node, action.model) for action in pool.plan().actions] == [(A, "x")]


def test_a_replica_that_is_being_unloaded_does_not_count():
    nodes = [node("a", 24, "x", m=20, x=8), node("b", 24, "x", x=8), node("c", 24, "x", n=20, x=8)]
    pool = WishPool(nodes, [Wish("m"), Wish("x", 2)])
    (unload,) = pool.plan().actions
    pool.begin(unload)
    pool.wishes.append(Wish("n"))
    assert pool.plan().actions == ()
    pool.now += 1.0
    pool.end(unload)
    assert not [action for action in pool.plan().actions if isinstance(action, UnloadWish)]


def test_the_wish_with_the_higher_cost_gets_the_memory():
    pool = WishPool([node("a", 24, m=16, n=16)], [Wish("m", eviction_cost=1), Wish("n", eviction_cost=2)])
    plan = pool.settle()
    assert pool.loads() == [("a", "n")]
    assert [one.model for one in plan.shortfalls] == ["m"]


def test_a_node_has_one_action_at_a_time():
    pool = WishPool([node("a", 24, m=4, n=4)], [Wish("m"), Wish("n")])
    (load,) = pool.plan().actions
    pool.begin(load)
    plan = pool.plan()
    assert plan.actions == ()
    assert text(plan, "n") == "needs 1 more node: a is busy with m"


def test_the_next_action_waits_for_a_report_after_the_last_one():
    pool = WishPool([node("a", 24, m=4, n=4)], [Wish("m"), Wish("n")])
    (load,) = pool.plan().actions
    pool.begin(load)
    pool.now += 1.0
    pool.end(load)
    plan = pool.plan()
    assert plan.actions == ()
    assert text(plan, "m") == "a loads it"
    pool.now += 0.1
    pool.refresh()
    assert [action.model for action in pool.plan().actions] == ["n"]


def test_nothing_is_done_on_a_node_that_loads_for_a_request():
    loads = node("a", 24, m=4, n=4)
    loads.loading = {"n"}
    pool = WishPool([loads], [Wish("m")])
    assert pool.plan().actions == ()
    counted = WishPool([loads], [Wish("n")]).plan()
    assert counted.actions == ()
    assert text(counted, "n") == "a loads it"


def test_nothing_is_done_on_a_node_that_swaps_models_for_a_request():
    pool = WishPool([node("a", 24, m=4, n=4)], [Wish("m")])
    pool.ledger.begin_turn(SwapTurn(A, "a", "n", frozenset({"x"}), 1, 0.0), 0)
    plan = pool.plan()
    assert plan.actions == ()
    assert text(plan) == "needs 1 more node: a makes room for requests for n"


def test_reserved_memory_of_requests_is_not_free_for_a_wish():
    pool = WishPool([node("a", 24, m=8)], [Wish("m")])
    pool.ledger.hold_memory(1, A, 15 * GIB)
    assert pool.plan().actions == ()


def refused(pool: WishPool, *, for_memory: bool) -> None:
    (load,) = pool.plan().actions
    pool.begin(load)
    pool.end(load, "a: needs more", for_memory=for_memory)
    pool.now += 1.0
    pool.refresh()


def test_a_refused_load_waits_twice_as_long_each_time():
    pool = WishPool([node("a")], [Wish("m")])
    for wait in (10.0, 20.0, 40.0):
        refused(pool, for_memory=True)
        plan = pool.plan()
        assert plan.actions == ()
        assert text(plan) == f"needs 1 more node: a: needs more; the next try is in {wait - 1:.0f} s"
        pool.now += wait - 1.5
        pool.refresh()
        assert pool.plan().actions == ()
        pool.now += 0.5
        pool.refresh()
    assert len(pool.plan().actions) == 1


@pytest.mark.parametrize(
    ("size", "grown", "again"), [(8, 0.3, False), (8, 0.5, True), (1, 0.05, False), (1, 0.07, True)]
)
def test_a_load_refused_for_memory_is_repeated_when_the_numbers_have_changed(size: float, grown: float, again: bool):
    full = node("a", 24, m=size)
    full.other = 2 * GIB
    pool = WishPool([full], [Wish("m")])
    refused(pool, for_memory=True)
    full.other -= int(grown * GIB)
    pool.refresh()
    assert bool(pool.plan().actions) is again


def test_a_failed_load_is_not_repeated_because_memory_has_changed():
    full = node("a", 24, m=8)
    full.other = 2 * GIB
    pool = WishPool([full], [Wish("m")])
    refused(pool, for_memory=False)
    full.other = 0
    pool.refresh()
    assert pool.plan().actions == ()


def test_another_node_loads_what_one_node_has_refused():
    slow = node("b")
    slow.disk["m"]["load_seconds"] = 60.0
    pool = WishPool([node("a"), slow], [Wish("m")])
    refused(pool, for_memory=True)
    pool.settle()
    assert pool.loads() == [("a", "m"), ("b", "m")]


def test_a_model_that_a_node_could_not_unload_is_not_tried_again_at_once():
    pool = WishPool([node("a", 24, "x", m=20, x=8)], [Wish("m")])
    (unload,) = pool.plan().actions
    pool.begin(unload)
    pool.end(unload, "x is in use")
    pool.now += 9.0
    pool.refresh()
    assert pool.plan().actions == ()
    pool.now += 1.0
    pool.refresh()
    assert len(pool.plan().actions) == 1


def test_a_node_does_not_swap_twice_within_the_cost_of_both_loads():
    swaps = node("a", 24, "x", m=20, x=8)
    swaps.disk["m"]["load_seconds"], swaps.disk["x"]["load_seconds"] = 30.0, 20.0
    pool = WishPool([swaps], [Wish("m")])
    pool.round(1.0)
    pool.round(1.0)
    ended = pool.now - 0.5
    assert pool.nodes[A].loaded == {"m"}
    swaps.loaded = {"x"}  # a request made the node load x in place of m
    pool.refresh()
    plan = pool.plan()
    assert plan.actions == ()
    assert text(plan).startswith("needs 1 more node: a swapped models for m; the next swap is in ")
    pool.now = ended + 30.0
    pool.refresh()
    assert text(pool.plan()).endswith("; the next swap is in 20 s")
    pool.now = ended + 49.9
    pool.refresh()
    assert pool.plan().actions == ()
    pool.now = ended + 50.0
    pool.refresh()
    assert len(pool.plan().actions) == 1


def test_a_swap_of_several_models_is_one_swap():
    pool = WishPool([node("a", 24, "x", "y", m=20, x=8, y=8)], [Wish("m")])
    assert text(pool.plan()) == "a unloads x, y for it"
    for _ in range(3):
        pool.round(1.0)
    assert pool.unloads() == [("a", "x"), ("a", "y")]
    assert pool.nodes[A].loaded == {"m"}


def test_a_node_that_waits_for_a_swap_is_not_filled_for_a_lesser_wish():
    swaps = node("a", 24, "x", m=20, x=8, n=4)
    pool = WishPool([swaps], [Wish("m", eviction_cost=20)])
    pool.round(1.0)
    pool.round(1.0)
    swaps.loaded = {"x"}
    pool.wishes.append(Wish("n"))
    pool.refresh()
    plan = pool.plan()
    assert plan.actions == ()
    assert text(plan, "n") == "needs 1 more node: a gets another model first"


@pytest.mark.parametrize(("is_awaited", "expected"), [(False, A), (True, B)])
def test_the_best_of_the_waiting_nodes_is_kept_for_a_missing_replica(is_awaited: bool, expected: NodeId):
    nodes = [node(name, 24, "x", m=20, x=8, n=4) for name in "ab"]
    nodes[1].disk["m"]["load_seconds"] = 1.0
    nodes[1].disk["n"]["load_seconds"] = 1.0
    pool = WishPool([*nodes, node("c")], [Wish("m", 2, deny=(C,), eviction_cost=20)])
    pool.round(1.0)
    pool.round(1.0)
    for one in nodes:
        one.loaded = {"x"}
    pool.wishes = [Wish("m", deny=() if is_awaited else (C,), eviction_cost=20), Wish("n")]
    if is_awaited:  # the replica that is expected back needs no node
        pool.nodes[C].loaded.add("m")
        pool.refresh()
        pool.plan()
        pool.nodes[C].facts["state"] = "lost"
    pool.refresh()
    plan = pool.plan()
    assert [(action.node, action.model) for action in plan.actions] == [(expected, "n")]


def test_a_lost_node_may_return_within_a_minute_before_its_replica_is_replaced():
    pool = WishPool([node("a", 24, "m"), node("b")], [Wish("m")])
    pool.plan()
    pool.nodes[A].facts["state"] = "lost"
    pool.now += 59.0
    pool.refresh()
    plan = pool.plan()
    assert plan.actions == ()
    assert text(plan) == "the return of a is awaited"
    pool.now += 1.0
    pool.refresh()
    assert [action.node for action in pool.plan().actions] == [B]


@pytest.mark.parametrize(
    "facts",
    [{"cordoned": True}, {"draining": True}, {"state": "asleep"}, {"state": "paused"}, {"state": "left"}],
    ids=str,
)
def test_a_replica_on_a_node_that_takes_no_requests_for_long_is_replaced_at_once(facts: dict[str, Any]):
    pool = WishPool([node("a", 24, "m"), node("b")], [Wish("m")])
    pool.plan()
    pool.nodes[A].facts |= facts
    pool.refresh()
    assert [action.node for action in pool.plan().actions] == [B]


def test_a_node_that_was_seen_without_a_replica_is_not_awaited_after_the_start():
    pool = WishPool([node("a"), node("b")], [Wish("m")])
    pool.nodes[A].facts["state"] = "suspect"
    pool.refresh()
    assert [action.node for action in pool.plan().actions] == [B]


@pytest.mark.parametrize("is_reported", [True, False])
@pytest.mark.parametrize("facts", [{"cordoned": True}, {"draining": True}, {"state": "paused"}], ids=str)
def test_a_load_on_a_node_that_takes_no_requests_does_not_count(facts: dict[str, Any], is_reported: bool):
    pool = WishPool([node("a"), node("b")], [Wish("m")])
    (load,) = pool.plan().actions
    assert load == LoadWish(A, "a", "m", seconds=5.0, headroom=22 * GIB)
    pool.begin(load)
    if is_reported:
        pool.end(load)
        pool.now += 1.0
        pool.nodes[A].loaded.clear()
        pool.nodes[A].loading.add("m")
    pool.nodes[A].facts |= facts
    pool.refresh()
    assert [action.node for action in pool.plan().actions] == [B]


def test_a_node_that_returns_without_its_replica_loads_it_again():
    fast = node("b")
    fast.disk["m"]["load_seconds"] = 1.0
    pool = WishPool([node("a", 24, "m"), fast], [Wish("m")])
    pool.plan()
    pool.nodes[A].loaded.clear()
    pool.refresh()
    assert [action.node for action in pool.plan().actions] == [A]


@pytest.mark.parametrize("state", ["lost", "joining"])
def test_members_have_time_to_connect_after_the_start_of_the_coordinator(state: str):
    pool = WishPool([node("a"), node("b")], [Wish("m")])
    pool.nodes[A].facts |= {"state": state, "reported_at": 0.0}
    pool.refresh()
    assert pool.plan().actions == ()
    pool.now += 20.0
    pool.refresh()
    assert [action.node for action in pool.plan().actions] == [B]


def test_an_idle_model_is_unloaded_and_rests_until_the_next_request():
    pool = WishPool([node("a", 24, "m"), node("b", 24, "m")], [Wish("m", 2, idle_unload_seconds=1800.0)])
    pool.requested = {"m"}
    pool.plan()
    pool.now += 1799.0
    pool.refresh()
    assert pool.plan().actions == ()
    pool.now += 1.0
    pool.refresh()
    plan = pool.round()
    assert pool.unloads() == [("a", "m"), ("b", "m")]
    assert all(isinstance(action, UnloadWish) and action.why is UnloadReason.IDLE for action in plan.actions)
    assert pool.settle().shortfalls == ()
    assert pool.loads() == []
    pool.requested = {"m"}
    pool.settle()
    assert sorted(pool.loads()) == [("a", "m"), ("b", "m")]


def test_the_idle_time_of_a_model_begins_at_the_end_of_its_load():
    pool = WishPool([node("a")], [Wish("m", idle_unload_seconds=60.0)])
    (load,) = pool.plan().actions
    pool.begin(load)
    pool.now += 50.0
    pool.end(load)
    pool.refresh()
    pool.now += 59.0
    pool.refresh()
    assert pool.plan().actions == ()
    pool.now += 1.0
    pool.refresh()
    (unload,) = pool.plan().actions
    assert isinstance(unload, UnloadWish)


def test_a_model_in_use_is_not_idle():
    pool = WishPool([node("a", 24, "m")], [Wish("m", idle_unload_seconds=10.0)])
    pool.nodes[A].in_use = {"m"}
    pool.now += 100.0
    pool.refresh()
    assert pool.plan().actions == ()


def test_an_idle_model_stays_on_nodes_that_the_wish_does_not_allow():
    pool = WishPool([node("a", 24, "m"), node("b", 24, "m")], [Wish("m", deny=(A,), idle_unload_seconds=10.0)])
    pool.plan()
    pool.now += 100.0
    pool.refresh()
    assert [action.node for action in pool.plan().actions] == [B]


def test_an_idle_preloaded_model_stays():
    held = node("a", 24, "m")
    held.disk["m"]["pinned"] = True
    pool = WishPool([held], [Wish("m", idle_unload_seconds=10.0)])
    pool.plan()
    pool.now += 100.0
    pool.refresh()
    assert pool.plan().actions == ()


def test_a_wish_without_load_at_boot_waits_for_the_first_request():
    pool = WishPool([node("a"), node("b")], [Wish("m", 2, load_at_boot=False)])
    plan = pool.settle()
    assert (pool.actions, plan.shortfalls) == ([], ())
    pool.requested = {"m"}
    pool.settle()
    assert sorted(pool.loads()) == [("a", "m"), ("b", "m")]


def test_a_wish_without_load_at_boot_is_completed_where_a_replica_is_loaded():
    pool = WishPool([node("a", 24, "m"), node("b")], [Wish("m", 2, load_at_boot=False)])
    assert [action.node for action in pool.plan().actions] == [B]


def test_only_the_model_that_serves_requests_is_loaded():
    nodes = [node("a", 24, "m"), node("b"), node("c")]
    for one, fingerprint in zip(nodes, ("new", "old", "new"), strict=True):
        one.disk["m"]["fingerprint"] = fingerprint
    pool = WishPool(nodes, [Wish("m", 3)])
    plan = pool.settle()
    assert pool.loads() == [("c", "m")]
    assert text(plan) == "needs 1 more node: b has another model of this name"


def test_a_model_that_a_node_cannot_load_is_named_with_the_cause():
    broken = node("a")
    broken.disk["m"]["cause"] = "truncated file"
    plan = WishPool([broken], [Wish("m")]).settle()
    assert text(plan) == "needs 1 more node: a cannot load it: truncated file"


def find_ready(pool: WishPool) -> set[NodeId]:
    """Return the nodes with a ready replica of model m."""
    return {node for node, model in find_ready_replicas(pool.wishes, pool.read(), pool.history) if model == "m"}


def test_only_replicas_that_the_wish_allows_and_that_serve_requests_are_ready():
    nodes = [node(name, 24, "m") for name in "abc"]
    assert find_ready(WishPool(nodes, [Wish("m", deny=(A,))])) == {B, C}
    for one, fingerprint in zip(nodes, ("new", "old", "new"), strict=True):
        one.disk["m"]["fingerprint"] = fingerprint
    assert find_ready(WishPool(nodes, [Wish("m", 3)])) == {A, C}


def test_a_replica_is_ready_while_another_model_of_its_node_is_unloaded():
    pool = WishPool([node("a", 32, "m", "x", m=8, x=8, n=16)], [Wish("m"), Wish("n")])
    (unload,) = pool.plan().actions
    assert isinstance(unload, UnloadWish)
    assert unload.model == "x"
    pool.begin(unload)
    assert find_ready(pool) == {A}

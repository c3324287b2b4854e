"""The history of the reconciler's actions: illegal events, waits after failures, swaps, and its bounds."""

import pytest

from coordinator.models.action_history import (
    BACKOFF_SECONDS,
    MAX_BACKOFF_SECONDS,
    ActionBegan,
    ActionEnded,
    ActionHistory,
    NodeHistory,
    RoundBegan,
    Swap,
    step,
)
from coordinator.models.wishes import LoadWish, PoolState, UnloadReason, UnloadWish
from router.placement.cluster_view import ClusterView
from router.placement.reservations import ReservationLedger
from tests.support.cluster.wish_pool import WishNode
from wire.identity import NodeId
from wire.state_machine import IllegalEventError, InvariantError

A = NodeId("a")
LOAD = LoadWish(A, "a", "m", 5.0, 100)


def after(*events: tuple[float, ActionBegan | ActionEnded]) -> ActionHistory:
    history = ActionHistory(0.0)
    for now, event in events:
        history = step(history, event, now)
        history.check()
    return history


def test_a_second_action_on_a_busy_node_is_illegal():
    with pytest.raises(IllegalEventError, match="busy"):
        after((0.0, ActionBegan(LOAD)), (1.0, ActionBegan(LOAD)))


def test_the_end_of_an_action_that_did_not_begin_is_illegal():
    with pytest.raises(IllegalEventError, match="none runs there"):
        after((0.0, ActionEnded(A)))


def test_the_wait_after_failures_doubles_to_its_bound_and_a_success_ends_it():
    events: list[tuple[float, ActionBegan | ActionEnded]] = []
    waits: list[float] = []
    for _ in range(9):
        events += [(0.0, ActionBegan(LOAD)), (0.0, ActionEnded(A, "no"))]
        waits.append(after(*events).failures[A, "m"].until)
    assert waits[:3] == [BACKOFF_SECONDS, 2 * BACKOFF_SECONDS, 4 * BACKOFF_SECONDS]
    assert waits[-1] == MAX_BACKOFF_SECONDS
    assert after(*events, (0.0, ActionBegan(LOAD)), (0.0, ActionEnded(A))).failures == {}


def test_a_refusal_keeps_the_larger_headroom():
    for known in (50, 150):
        history = after((0.0, ActionBegan(LOAD)), (0.0, ActionEnded(A, "no", known)))
        assert history.failures[A, "m"].headroom == max(100, known)


def test_a_swap_costs_all_its_loads_and_ends_with_the_load():
    unloads = [UnloadWish(A, "a", name, UnloadReason.MEMORY, "m", cost) for name, cost in (("x", 40.0), ("y", 30.0))]
    events: list[tuple[float, ActionBegan | ActionEnded]] = []
    for at, unload in enumerate(unloads):
        events += [(at, ActionBegan(unload)), (at + 0.5, ActionEnded(A))]
    assert after(*events).nodes[A].swap == Swap("m", 40.0, ended=False, at=1.5)
    events += [(2.0, ActionBegan(LOAD)), (7.0, ActionEnded(A, "refused"))]
    assert after(*events).nodes[A].swap == Swap("m", 40.0, ended=True, at=7.0)


def test_a_node_that_is_no_member_any_more_is_forgotten():
    history = after((0.0, ActionBegan(LOAD)), (1.0, ActionEnded(A, "no")))
    pool = PoolState(
        ClusterView((WishNode("b").view(),)), ReservationLedger(), 2.0, requested=frozenset({"m", "made-up"})
    )
    history = step(history, RoundBegan(pool, frozenset({"m"}), frozenset({(A, "m")})), 2.0)
    assert (dict(history.nodes), dict(history.failures)) == ({}, {})
    assert history.used_at == {"m": 2.0}, "names that clients make up are not kept"


def test_values_that_contradict_each_other_are_found():
    with pytest.raises(InvariantError, match="runs on b"):
        ActionHistory(0.0, {NodeId("b"): NodeHistory(LOAD)}).check()
    with pytest.raises(InvariantError, match="costs"):
        ActionHistory(0.0, {A: NodeHistory(swap=Swap("m", 1.0, ended=True, at=0.0))}).check()

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
from coordinator.models.wishes import LoadWish, PoolState, UnloadReason, UnloadWish, WishAction
from router.placement.cluster_view import ClusterView
from router.placement.reservations import ReservationLedger
from tests.support.cluster.wish_pool import WishNode
from wire.identity import NodeId
from wire.state_machine import IllegalEventError, InvariantError

A = NodeId("a")
LOAD = LoadWish(A, "a", "m", 5.0, 100)
UNLOAD = UnloadWish(A, "a", "x", UnloadReason.IDLE)


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
    assert waits[-1] == MAX_BACKOFF_SECONDS == 600.0
    assert after(*events, (0.0, ActionBegan(LOAD)), (0.0, ActionEnded(A))).failures == {}


def test_the_wait_begins_at_the_end_of_the_failed_action():
    history = after((0.0, ActionBegan(LOAD)), (7.0, ActionEnded(A, "no")))
    assert history.failures[A, "m"].until == 7.0 + BACKOFF_SECONDS


def test_a_refusal_keeps_the_larger_headroom():
    for known in (50, 150):
        history = after((0.0, ActionBegan(LOAD)), (0.0, ActionEnded(A, "no", known)))
        assert history.failures[A, "m"].headroom == max(100, known)
    history = after((0.0, ActionBegan(UNLOAD)), (0.0, ActionEnded(A, "no", 50)))
    assert history.failures[A, "x"].headroom == 50, "an unload has no headroom of its own"


@pytest.mark.parametrize(
    ("action", "why", "expected"),
    [
        (LOAD, "", {"m": 9.0, "x": 1.0}),
        (LOAD, "refused", {"m": 1.0, "x": 1.0}),
        (UNLOAD, "", {"m": 1.0, "x": 1.0}),
        (LoadWish(A, "a", "unwished"), "", {"m": 1.0, "x": 1.0}),
    ],
)
def test_only_a_successful_load_of_a_wished_model_renews_the_time_of_its_wish(
    action: WishAction, why: str, expected: dict[str, float]
):
    history = ActionHistory(0.0, wished_at={"m": 1.0, "x": 1.0})
    history = step(step(history, ActionBegan(action), 2.0), ActionEnded(A, why), 9.0)
    assert history.wished_at == expected


def test_a_swap_costs_all_its_loads_and_ends_with_the_load():
    unloads = [UnloadWish(A, "a", name, UnloadReason.MEMORY, "m", cost) for name, cost in (("x", 40.0), ("y", 30.0))]
    events: list[tuple[float, ActionBegan | ActionEnded]] = []
    for at, unload in enumerate(unloads):
        events += [(at, ActionBegan(unload)), (at + 0.5, ActionEnded(A))]
    assert after(*events).nodes[A].swap == Swap("m", 40.0, ended=False, at=1.5)
    events += [(2.0, ActionBegan(LOAD)), (7.0, ActionEnded(A, "refused"))]
    assert after(*events).nodes[A].swap == Swap("m", 40.0, ended=True, at=7.0)
    events += [(8.0, ActionBegan(LOAD)), (9.0, ActionEnded(A))]
    assert after(*events).nodes[A].swap == Swap("m", 40.0, ended=True, at=7.0), "the end of a swap is not moved"


def test_a_load_of_another_model_does_not_end_a_swap():
    unload = UnloadWish(A, "a", "x", UnloadReason.MEMORY, "m", 40.0)
    other = LoadWish(A, "a", "other")
    history = after((0.0, ActionBegan(unload)), (1.0, ActionEnded(A)), (2.0, ActionBegan(other)), (3.0, ActionEnded(A)))
    assert history.nodes[A].swap == Swap("m", 40.0, ended=False, at=1.0)


def test_an_action_is_unreported_until_a_report_is_newer_than_its_end():
    before, after_end = (WishNode("a", reported_at=at).view() for at in (7.0, 7.5))
    running = after((0.0, ActionBegan(LOAD)))
    assert running.find_unreported(after_end) == LOAD
    done = after((0.0, ActionBegan(LOAD)), (7.0, ActionEnded(A)))
    assert (done.find_unreported(before), done.find_unreported(after_end)) == (LOAD, None)
    assert after((0.0, ActionBegan(LOAD)), (7.0, ActionEnded(A, "refused"))).find_unreported(before) is None


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


def test_a_new_swap_for_a_model_does_not_cost_what_an_ended_one_did():
    first, second = (UnloadWish(A, "a", "x", UnloadReason.MEMORY, "m", cost) for cost in (40.0, 30.0))
    history = after(
        (0.0, ActionBegan(first)),
        (1.0, ActionEnded(A)),
        (2.0, ActionBegan(LOAD)),
        (3.0, ActionEnded(A)),
        (4.0, ActionBegan(second)),
    )
    assert history.nodes[A].swap == Swap("m", 30.0, ended=False, at=4.0)


def test_an_action_ends_also_after_its_node_is_no_member_any_more():
    history = after((0.0, ActionBegan(LOAD)))
    empty = PoolState(ClusterView(), ReservationLedger(), 1.0)
    history = step(history, RoundBegan(empty, frozenset(), frozenset()), 1.0)
    history = step(history, ActionEnded(A, "the node has left"), 2.0)
    history = step(history, RoundBegan(empty, frozenset(), frozenset()), 3.0)
    assert (dict(history.nodes), dict(history.failures)) == ({}, {})


def test_a_round_keeps_what_is_wished_and_notes_what_is_in_use():
    view = ClusterView((WishNode("a").view(),))
    ready = frozenset({(A, "m"), (A, "x")})
    pool = PoolState(view, ReservationLedger(), 2.0, in_use={A: frozenset({"m"})})
    history = step(ActionHistory(0.0), RoundBegan(pool, frozenset({"m", "x"}), ready), 2.0)
    assert (history.used_at, history.replicas) == ({"m": 2.0}, dict.fromkeys(ready, 2.0))
    history = step(history, RoundBegan(PoolState(view, ReservationLedger(), 3.0), frozenset({"m"}), frozenset()), 3.0)
    assert (history.replicas, history.wished_at) == ({(A, "m"): 2.0}, {"m": 2.0})
    assert history.used_at == {"m": 2.0}

"""Values of wishes: the meaning of unset fields, and the condition for a met wish."""

import pytest

from coordinator.models.wishes import PoolState, Wish, WishState
from router.placement.cluster_view import ClusterView
from router.placement.reservations import ReservationLedger
from wire.identity import NodeId

A, B = NodeId("a"), NodeId("b")


def test_a_wish_without_fields_is_for_one_replica_anywhere_that_stays_loaded():
    wish = Wish("tiny")
    assert (wish.replicas, wish.labels, wish.allow, wish.deny) == (1, (), (), ())
    assert (wish.idle_unload_seconds, wish.eviction_cost, wish.load_at_boot) == (None, 10, True)


@pytest.mark.parametrize(
    ("wanted", "ready", "met"), [(1, (), False), (1, (A,), True), (2, (A,), False), (1, (A, B), True), (0, (), True)]
)
def test_a_wish_is_met_by_replicas_that_take_requests(wanted: int, ready: tuple[NodeId, ...], met: bool):
    assert WishState(Wish("tiny", 2), wanted, ready, coming=(A, B), away=(A, B)).met is met


def test_a_model_is_in_use_on_the_nodes_of_its_running_requests():
    pool = PoolState(ClusterView(), ReservationLedger(), 0.0, {A: frozenset({"tiny"})})
    used = [pool.is_in_use(node, model) for node in (A, B) for model in ("tiny", "big")]
    assert used == [True, False, False, False]

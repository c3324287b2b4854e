"""Counts of the ended actions for wishes."""

from coordinator.models.wish_counters import ActionOutcome, WishCounters
from coordinator.models.wishes import LoadWish, UnloadReason, UnloadWish
from wire.identity import NodeId

A, B = NodeId("a"), NodeId("b")


def test_ends_are_counted_by_kind_model_and_outcome():
    counters = WishCounters()
    for node in (A, B, A):
        counters.count_end(LoadWish(node, node, "m"), ActionOutcome.DONE)
    counters.count_end(LoadWish(A, "a", "m"), ActionOutcome.FAILED)
    for _ in range(2):
        counters.count_end(UnloadWish(A, "a", "x", UnloadReason.MEMORY, "m"), ActionOutcome.REFUSED)
    counters.count_end(LoadWish(A, "a", "x"), ActionOutcome.REFUSED)
    assert counters.loads == {
        ("m", ActionOutcome.DONE): 3,
        ("m", ActionOutcome.FAILED): 1,
        ("x", ActionOutcome.REFUSED): 1,
    }
    assert counters.unloads == {("x", ActionOutcome.REFUSED): 2}, "the unloaded model, not the one that needs memory"

"""What the router counts: histograms as Prometheus reads them, gaps of the same reader only, rows that are bounded."""

from hypothesis import given
from hypothesis import strategies as st

from router.metrics import ITL_BOUNDS, MOST_MODELS, OTHER, Counters
from wire.identity import NodeId
from wire.measures import Buckets

A, B = NodeId("a"), NodeId("b")


@given(st.lists(st.floats(0, 10), max_size=50))
def test_each_value_falls_into_the_first_bucket_that_holds_it(values: list[float]):
    buckets = Buckets((0.5, 1.0, 5.0))
    for value in values:
        buckets.observe(value)
    for bound, upto in ((0.5, 1), (1.0, 2), (5.0, 3)):
        assert sum(buckets.tally().counts[:upto]) == sum(value <= bound for value in values)
    assert sum(buckets.counts) == len(values)


def gaps(counters: Counters, model: str = "m") -> tuple[int, float]:
    tally = counters.model(model).itl.tally()
    return sum(tally.counts), round(tally.total, 6)


def test_a_step_is_one_gap_for_all_streams_in_it():
    counters = Counters()
    counters.stepped(A, "m", 7, 1, 1.0)
    counters.stepped(A, "m", 7, 3, 1.02)
    assert gaps(counters) == (3, 0.06)


def test_nobody_waited_between_two_requests():
    counters = Counters()
    counters.stepped(A, "m", 7, 1, 1.0)
    counters.stepped(A, "m", 8, 1, 100.0)
    assert gaps(counters) == (0, 0.0)


def test_nodes_and_models_have_paces_of_their_own():
    counters = Counters()
    for at in (1.0, 1.1):
        counters.stepped(A, "m", 1, 1, at)
        counters.stepped(B, "m", 2, 1, at + 0.05)
        counters.stepped(A, "n", 3, 1, at + 0.02)
    assert gaps(counters) == (2, 0.2)
    assert gaps(counters, "n") == (1, 0.1)


def test_a_node_that_is_forgotten_leaves_nothing():
    counters = Counters()
    counters.placed(A)
    counters.stepped(A, "m", 1, 1, 1.0)
    counters.forget(A)
    counters.stepped(A, "m", 1, 1, 9.0)
    assert gaps(counters) == (0, 0.0)
    assert counters.placements == {}


def test_names_beyond_the_bound_are_one_row():
    counters = Counters()
    for number in range(MOST_MODELS + 100):
        counters.first(f"m{number}", 0.1)
    assert len(counters.models) <= MOST_MODELS + 1
    assert sum(counters.models[OTHER].ttft.counts) == 100
    assert sum(sum(one.ttft.counts) for one in counters.models.values()) == MOST_MODELS + 100


def test_bounds_rise():
    assert list(ITL_BOUNDS) == sorted(ITL_BOUNDS)

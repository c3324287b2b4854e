"""Counting values in buckets."""

import pytest

from wire.histogram import PREDICTED_BOUNDS, TRANSIENT_BOUNDS, Histogram, HistogramSnapshot
from wire.units import GIB, MIB


def test_a_value_counts_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    assert histogram.tally() == HistogramSnapshot((0, 0, 0, 0), 0.0)
    for value in (0.5, 1.0, 1.5, 4.0, 4.5, 100.0):
        histogram.observe(value)
    assert histogram.tally() == HistogramSnapshot((2, 1, 1, 2), 111.5)


def test_a_value_counts_several_times_in_its_bucket_and_in_the_total() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(2.0, 3)
    before = histogram.tally()
    histogram.observe(0.25, 2)
    histogram.observe(1.0, 0)
    assert before == HistogramSnapshot((0, 3, 0), 6.0), "a snapshot does not change"
    assert (histogram.bounds, histogram.counts, histogram.total) == ((1.0, 2.0), [2, 3, 0], 6.5)


@pytest.mark.parametrize(
    ("bounds", "first", "last"), [(PREDICTED_BOUNDS, 0.3, 1.25), (TRANSIENT_BOUNDS, 16.0 * MIB, 16.0 * GIB)]
)
def test_bounds_of_nodes_ascend(bounds: tuple[float, ...], first: float, last: float) -> None:
    assert list(bounds) == sorted(set(bounds))
    assert (bounds[0], bounds[-1], len(bounds)) == (first, last, 10)

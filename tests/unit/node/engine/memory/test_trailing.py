"""Bytes that are freed and still in the footprint, estimated from readings."""

import pytest

from node.engine.memory.trailing import PERIOD_SECONDS, TRAILING_SECONDS, TrailingFootprint
from wire.units import GIB, MIB

OTHER = 300 * MIB
"""Memory of the process that is not MLX's."""


def update(footprint: TrailingFootprint, counted: int, late: int, now: float, other: int = OTHER) -> int:
    """Update with a reading that contains `late` bytes in addition to those of MLX and the process."""
    return footprint.update(counted + late + other, counted, 0, now)


def test_bytes_trail_until_the_footprint_has_fallen():
    footprint = TrailingFootprint()
    assert update(footprint, 8 * GIB, 0, 100.0) == 0
    assert update(footprint, 5 * GIB, 3 * GIB, 100.1) == 3 * GIB
    assert update(footprint, 5 * GIB, GIB, 100.3) == GIB
    assert update(footprint, 5 * GIB, GIB // 4, 100.4) == 0, "the rest is less than an eighth"
    assert update(footprint, 5 * GIB, 0, 100.5) == 0


def test_memory_that_never_returns_stops_to_trail():
    footprint = TrailingFootprint()
    update(footprint, 8 * GIB, 0, 100.0)
    assert update(footprint, 5 * GIB, 3 * GIB, 100.0 + TRAILING_SECONDS - 0.1) == 3 * GIB
    assert update(footprint, 5 * GIB, 3 * GIB, 100.0 + TRAILING_SECONDS) == 0


def test_no_more_trails_than_was_released_and_than_the_footprint_has_above_the_rest():
    footprint = TrailingFootprint()
    update(footprint, 8 * GIB, 0, 100.0)
    assert update(footprint, 7 * GIB, GIB, 100.1, other=OTHER + 2 * GIB) == GIB, "the process grew as well"
    assert update(footprint, 8 * GIB, 0, 100.2, other=OTHER + 2 * GIB) == 0, "MLX released nothing in the end"
    other = TrailingFootprint()
    update(other, 8 * GIB, 0, 100.0)
    assert update(other, 5 * GIB, 0, 100.1, other=OTHER - 50 * MIB) == 0


@pytest.mark.parametrize("pause", [0.05, PERIOD_SECONDS])
def test_a_second_release_does_not_take_the_first_for_other_memory(pause: float):
    footprint = TrailingFootprint()
    update(footprint, 8 * GIB, 0, 100.0)
    assert update(footprint, 7 * GIB, GIB, 100.0 + pause) == GIB
    assert update(footprint, 6 * GIB, 2 * GIB, 100.0 + 2 * pause) == 2 * GIB
    assert update(footprint, 6 * GIB, GIB, 100.0 + 3 * pause) == GIB


def test_memory_that_a_forward_took_and_freed_between_two_readings_trails():
    footprint = TrailingFootprint()
    footprint.update(8 * GIB + OTHER, 8 * GIB, 8 * GIB, 100.0)
    after = footprint.update(10 * GIB + OTHER, 8 * GIB, 11 * GIB, 100.1)
    assert after == 2 * GIB, "one of three has left the footprint"
    assert footprint.update(10 * GIB + OTHER, 8 * GIB, 11 * GIB, 100.0 + TRAILING_SECONDS) == 0


def test_bytes_that_trailed_are_no_other_memory_once_the_first_reading_is_too_old():
    footprint = TrailingFootprint()
    update(footprint, 8 * GIB, 0, 100.0)
    assert update(footprint, 7 * GIB, GIB, 100.0 + TRAILING_SECONDS - 0.1) == GIB
    assert update(footprint, 6 * GIB, GIB, 100.0 + TRAILING_SECONDS + 0.1) == GIB, "the first release has returned"

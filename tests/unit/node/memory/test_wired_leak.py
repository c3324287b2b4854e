"""Wired memory of an ended process that was not released."""

import pytest

from node.memory.wired_leak import WiredLeaks, WiredReadings
from wire.units import GIB


def missing(before: int | None, last: int | None, after: int | None, weights: int) -> int:
    """Return the missing memory; all values in GiB."""
    size = [None if one is None else one * GIB for one in (before, last, after)]
    return WiredReadings(size[0], size[1], weights * GIB).compute_leaked_bytes(size[2]) // GIB


@pytest.mark.parametrize(
    ("before", "last", "after", "weights", "lost"),
    [
        (3, 103, 3, 100, 0),
        (3, 103, 103, 100, 100),
        (3, 103, 60, 100, 57),
        (3, 103, 53, 100, 0),
        (3, 103, 54, 100, 51),
        (3, 5, 5, 100, 0),
        (3, None, 90, 100, 87),
        (None, 103, 103, 100, 0),
        (3, 103, None, 100, 0),
        (3, 43, 43, 0, 0),
        (3, 5, 203, 100, 100),
    ],
    ids=[
        "all came back",
        "nothing came back",
        "part came back",
        "half of it is not yet a leak",
        "more than half is",
        "at rest nothing was wired",
        "never read while it lived",
        "not read before",
        "cannot be read now",
        "no model",
        "others wired more than the weights meanwhile",
    ],
)
def test_a_leak(before: int | None, last: int | None, after: int | None, weights: int, lost: int):
    assert missing(before, last, after, weights) == lost


def test_what_another_program_wired_meanwhile_is_no_leak_of_an_engine_that_was_at_work():
    """Another program wired 40 GiB; the 40 GiB of the engine were released at its end."""
    assert missing(before=3, last=83, after=43, weights=40) == 0


def test_what_another_program_gave_back_meanwhile_hides_no_leak():
    assert missing(before=23, last=63, after=63, weights=40) == 40


def test_little_is_no_leak_however_small_the_model():
    assert WiredReadings(0, GIB, GIB // 2).compute_leaked_bytes(GIB) == 0
    assert WiredReadings(0, 3 * GIB, 3 * GIB).compute_leaked_bytes(3 * GIB) == 3 * GIB


def lost(leaks: WiredLeaks, before: int, after: int) -> int:
    """End a process with 40 GiB of weights, and return the memory that it left wired. All values are in GiB."""
    return leaks.add(WiredReadings(before * GIB, None, 40 * GIB), after * GIB) // GIB


def test_leaks_add_up_and_their_text_has_a_remedy():
    leaks = WiredLeaks()
    assert leaks.describe_leak() == ""
    assert lost(leaks, 3, 4) == 0
    assert leaks.count == 0
    assert lost(leaks, 3, 43) == 40
    assert lost(leaks, 43, 73) == 30
    assert (leaks.count, leaks.missing) == (2, 70 * GIB)
    assert leaks.describe_leak() == (
        "70.0 GiB of ended engines stayed wired (this Mac had 43.0 GiB wired before the last one started and has "
        "73.0 GiB now): restart this Mac to free the memory"
    )


def test_memory_that_is_released_later_is_no_leak():
    leaks = WiredLeaks()
    lost(leaks, 3, 43)
    lost(leaks, 43, 83)
    for wired in (83 * GIB, 43 * GIB, None):
        leaks.update(wired)
        assert leaks.count == 2
    leaks.update(43 * GIB - 1)
    assert (leaks.count, leaks.missing, leaks.describe_leak()) == (0, 0, "")
    assert lost(leaks, 13, 53) == 40
    leaks.update(34 * GIB)
    assert leaks.count == 1, "judged by what was there before the first of these"

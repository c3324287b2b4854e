import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.memory.reading import (
    POLL_PERIOD_SECONDS,
    RECENT_POLLS,
    STALE_AFTER_SECONDS,
    LastGood,
    MemoryReading,
    RecentPeak,
)


def test_recent_is_the_highest_of_the_last_five_polls():
    recent = RecentPeak()
    for second, phys in enumerate([9, 1, 2, 3, 4]):
        recent = recent.with_reading(phys, float(second))
    assert recent.find_highest(4.0) == 9
    assert recent.with_reading(2, 5.0).find_highest(5.0) == 4


def test_readings_within_one_period_are_one_poll_of_which_the_highest_counts():
    recent = RecentPeak()
    for tick in range(100):
        recent = recent.with_reading(100 - tick, tick * POLL_PERIOD_SECONDS / 200)
    assert len(recent.polls) == 1
    assert recent.find_highest(0.5) == 100


def test_recent_falls_by_time_alone_without_polls():
    recent = RecentPeak().with_reading(9, 10.0)
    assert recent.find_highest(10.0 + RECENT_POLLS * POLL_PERIOD_SECONDS - 0.01) == 9
    assert recent.find_highest(10.0 + RECENT_POLLS * POLL_PERIOD_SECONDS) == 0
    assert recent.compute_peak_expiry(5, 11.0) == 10.0 + RECENT_POLLS * POLL_PERIOD_SECONDS
    assert recent.compute_peak_expiry(9, 11.0) is None


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 1000)), min_size=1, max_size=50))
def test_recent_is_never_below_the_newest_reading_nor_above_the_highest(steps: list[tuple[float, int]]):
    recent, now = RecentPeak(), 0.0
    for pause, phys in steps:
        now += pause
        recent = recent.with_reading(phys, now)
        assert phys <= recent.find_highest(now) <= max(height for _, height in steps)
        assert len(recent.polls) <= RECENT_POLLS


@pytest.mark.parametrize(
    ("phys", "age", "live"),
    [(1, 0.0, True), (1, STALE_AFTER_SECONDS, True), (1, STALE_AFTER_SECONDS + 1, False), (None, 0.0, False)],
)
def test_a_reading_is_live_when_it_was_readable_and_recent(phys: int | None, age: float, live: bool):
    assert MemoryReading(phys, "statm", 100.0).is_live(100.0 + age) is live


def test_a_reading_that_fails_is_the_last_good_one_until_it_is_stale():
    reading = LastGood()
    assert reading.update(None, 50.0) is None, "nothing was ever read"
    assert reading.update(7, 100.0) == 7
    assert reading.update(None, 100.0 + STALE_AFTER_SECONDS) == 7
    assert reading.update(None, 100.1 + STALE_AFTER_SECONDS) is None
    assert reading.update(9, 200.0) == 9
    assert reading.update(None, 201.0) == 9, "by the newest, not by the first"


def test_a_clock_that_stood_still_keeps_the_last_good_reading():
    reading = LastGood()
    reading.update(7, 100.0)
    assert [reading.update(None, 100.0) for _ in range(1000)] == [7] * 1000


def test_recent_keeps_the_start_and_the_height_of_each_poll():
    recent = RecentPeak()
    for now, phys in ((10.0, 5), (10.5, 7), (11.25, 3), (12.0, 4), (12.25, 6), (13.5, 2)):
        recent = recent.with_reading(phys, now)
    assert recent.polls == ((10.0, 7), (11.25, 4), (12.25, 6), (13.5, 2))
    assert recent.with_reading(1, 15.0).polls == ((11.25, 4), (12.25, 6), (13.5, 2), (15.0, 1))


def test_recent_falls_when_the_last_of_its_highest_polls_is_over():
    recent = RecentPeak()
    for now, phys in ((10.0, 9), (12.0, 9), (13.0, 3)):
        recent = recent.with_reading(phys, now)
    assert [recent.compute_peak_expiry(floor, 13.0) for floor in (2, 8, 9)] == [17.0, 17.0, None]
    assert RecentPeak().compute_peak_expiry(0, 13.0) is None
    assert RecentPeak().compute_peak_expiry(-1, 13.0) is None, "caches that share memory count twice"
    assert recent.compute_peak_expiry(-1, 99.0) is None

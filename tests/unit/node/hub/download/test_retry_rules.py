"""Waits after refusals, and the check of Content-Range."""

from email.utils import formatdate

import pytest

from node.hub.download.retry_rules import (
    DEFAULT_WAIT_SECONDS,
    MAX_BACKOFF_SECONDS,
    compute_backoff,
    compute_retry_after,
    find_range_fault,
)

NOW = 1_900_000_000.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "120"}, 120.0),
        ({"retry-after": formatdate(NOW + 40, usegmt=True)}, 40.0),
        ({"retry-after": formatdate(NOW - 40, usegmt=True)}, 0.0),
        ({"ratelimit": '"api";r=0;t=55'}, 55.0),
        ({"retry-after": "3", "ratelimit": '"api";r=0;t=55'}, 3.0),
        ({"retry-after": "soon"}, DEFAULT_WAIT_SECONDS),
        ({"retry-after": "-5"}, DEFAULT_WAIT_SECONDS),
        ({"ratelimit": "none"}, DEFAULT_WAIT_SECONDS),
        ({}, DEFAULT_WAIT_SECONDS),
    ],
)
def test_compute_retry_after_reads_seconds_dates_and_limits(headers: dict[str, str], seconds: float):
    assert compute_retry_after(headers, NOW) == seconds


def test_compute_backoff_grows_to_its_maximum():
    waits = [compute_backoff(failures, 1.0) for failures in range(10)]
    assert waits == sorted(waits)
    assert waits[0] < 1
    assert waits[-1] == MAX_BACKOFF_SECONDS
    assert compute_backoff(10_000, 0.0) == MAX_BACKOFF_SECONDS / 2


@pytest.mark.parametrize("sent", ["bytes 100-199/1000", "bytes 100-150/1000", "bytes 100-199/*"])
def test_find_range_fault_accepts_the_begin_of_the_range(sent: str):
    assert find_range_fault(sent, 100, 200, 1000) == ""


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "bytes 0-99/1000",
        "bytes 100-200/1000",
        "bytes 100-99/1000",
        "bytes 100-199/1001",
        "bytes 100-99999999999999999999999999/1000",
        "bytes */1000",
        "items 100-199/1000",
    ],
)
def test_find_range_fault_refuses_any_other_range(sent: str):
    assert find_range_fault(sent, 100, 200, 1000)

"""Waits after refusals, and the check of Content-Range."""

import time
from email.utils import formatdate

import pytest

from node.hub.download.retry_rules import (
    DEFAULT_WAIT_SECONDS,
    MAX_NAMED_WAIT_SECONDS,
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
        ({"retry-after": formatdate(NOW + 40, usegmt=True).replace("GMT", "-0000")}, 40.0),
        ({"retry-after": "Mon, 01 Jan 0001 00:00:00 -0000"}, 0.0),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, MAX_NAMED_WAIT_SECONDS),
        ({"retry-after": "9" * 400}, MAX_NAMED_WAIT_SECONDS),
        ({"retry-after": "²"}, DEFAULT_WAIT_SECONDS),
        ({"retry-after": "soon"}, DEFAULT_WAIT_SECONDS),
        ({"retry-after": "-5"}, DEFAULT_WAIT_SECONDS),
        ({"ratelimit": "none"}, DEFAULT_WAIT_SECONDS),
        ({}, DEFAULT_WAIT_SECONDS),
    ],
)
def test_compute_retry_after_reads_seconds_dates_and_limits(headers: dict[str, str], seconds: float):
    assert compute_retry_after(headers, NOW) == seconds


def test_compute_backoff_doubles_to_its_maximum():
    assert [compute_backoff(failures, 1.0) for failures in range(7)] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert compute_backoff(10_000, 0.0) == 4.0


@pytest.mark.parametrize("sent", ["bytes 100-199/1000", "bytes 100-150/1000", "bytes 100-199/*", "bytes 100-100/1000"])
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


@pytest.mark.parametrize("zone", ["-0000", "GMT", "+0100"])
def test_compute_retry_after_reads_dates_in_any_zone(zone: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    offset = 3600.0 if zone == "+0100" else 0.0
    date = formatdate(NOW + 40 + offset, usegmt=True).replace("GMT", zone)
    try:
        assert compute_retry_after({"retry-after": date}, NOW) == 40.0
    finally:
        monkeypatch.undo()
        time.tzset()

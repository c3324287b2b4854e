"""A small part of every group, always with the same seed; in CI half of it. Kills are few: `make nightly` has all."""

import pytest

from tests.effort import IS_NIGHTLY
from tests.fuzz.groups import groups

SHARE = 50 if IS_NIGHTLY else 100
MIN_COUNT = 100 if IS_NIGHTLY else 2
"""Minimum inputs of a group: those of the group whose inputs are killed processes. Each takes 4 s of CPU."""


@pytest.mark.timeout(3600 if IS_NIGHTLY else 240)
@pytest.mark.parametrize("name", groups())
def test_mutated_input_makes_no_surprise(name: str):
    group = groups()[name]
    count = min(group.COUNT, max(MIN_COUNT, group.COUNT // SHARE))
    assert group.run(seed=1, count=count) == []


def test_the_same_seed_makes_the_same_inputs():
    from tests.fuzz import http

    assert http.streams(7, 50) == http.streams(7, 50) != http.streams(8, 50)


@pytest.mark.parametrize(
    "line", [b"GET /livez#x HTTP/1.1", b"GET http://127.0.0.1/livez HTTP/1.1", b"GET /livez HTTP/2.0"]
)
async def test_first_lines_that_two_readers_cut_differently_are_refused(line: bytes):
    from tests.fuzz.http import HOST, Ours

    seen, written = await Ours().read(line + b"\r\n" + HOST + b"\r\n", [])
    assert (seen, written[:12]) == ([], b"HTTP/1.1 400")

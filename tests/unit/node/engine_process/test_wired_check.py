"""Wired memory after the end of engines: awaited for a while, counted if it stays, forgotten once it returns."""

import asyncio
from collections.abc import Iterator

import pytest

from node.engine_process.timeouts import SupervisorTimeouts
from node.engine_process.wired_check import MAX_WIRED_LEAKS, WiredCheck, sum_weights
from node.memory.wired_leak import WiredReadings
from wire.frames import EngineReport
from wire.report import Memory, Model
from wire.units import GIB

WEIGHTS = 20 * GIB


class Wired:
    """Check over readings of a test in GiB: each is returned once, the last one from then on."""

    def __init__(self, *readings: int | None, settle: float = 0.0) -> None:
        self.stopping = asyncio.Event()
        timeouts = SupervisorTimeouts(settle=settle, look=0.001, ping_idle=0.001)
        self.check = WiredCheck(self._read, timeouts, self.stopping)
        self._readings: Iterator[int | None] = iter(readings)
        self.last: int | None = None

    def _read(self) -> int | None:
        self.last = next(self._readings, self.last)
        return None if self.last is None else self.last * GIB

    def start(self) -> WiredReadings:
        wired = self.check.begin()
        wired.observe_weights(WEIGHTS)
        return wired


async def test_memory_that_stays_wired_is_a_leak_with_its_numbers():
    one = Wired(3, 23, 22, settle=0.01)
    wired = one.start()
    one.check.observe(wired)
    assert (wired.before, wired.last) == (3 * GIB, 23 * GIB)
    assert (one.check.leaked_bytes, one.check.warning, one.check.is_exceeded) == (0, "", False)
    assert await one.check.compare(wired)
    assert one.check.leaked_bytes == 19 * GIB
    assert "19.0 GiB" in one.check.warning
    assert not one.check.is_exceeded, "one leak is allowed"


@pytest.mark.parametrize(
    "readings", [(3, 3), (3, 22, 22, 4), (None, 22), (3, None), (3, 13)], ids=["none", "late", "first", "after", "half"]
)
async def test_memory_that_returns_in_time_is_no_leak(readings: tuple[int | None, ...]):
    one = Wired(*readings, settle=60.0)
    assert not await one.check.compare(one.start())
    assert one.check.leaked_bytes == 0


async def test_the_check_ends_with_the_agent():
    one = Wired(3, 22, settle=60.0)
    wired = one.start()
    one.stopping.set()
    assert not await asyncio.wait_for(one.check.compare(wired), 30)
    assert await one.check.wait_stopped(60.0)


async def test_after_too_many_leaks_no_engine_starts_until_the_memory_has_returned():
    one = Wired(3, 22, 22, 41, 41, 40, 4)
    for number in range(MAX_WIRED_LEAKS):
        assert not one.check.is_exceeded
        assert await one.check.compare(one.start())
        assert one.check.leaked_bytes == (number + 1) * 19 * GIB
    assert one.check.is_exceeded
    await asyncio.wait_for(one.check.wait_returned(), 30)
    assert (one.last, one.check.is_exceeded, one.check.leaked_bytes, one.check.warning) == (4, False, 0, "")
    await one.check.wait_returned()


async def test_a_reading_during_the_lifetime_of_the_next_engine_may_disprove_a_leak():
    one = Wired(3, 22, 22, 5)
    assert await one.check.compare(one.start())
    wired = one.start()
    one.check.observe(wired)
    assert (wired.last, one.check.leaked_bytes) == (5 * GIB, 0)


async def test_an_agent_that_stops_does_not_wait_for_memory():
    one = Wired(3, 22, 22, 41)
    for _ in range(MAX_WIRED_LEAKS):
        await one.check.compare(one.start())
    one.stopping.set()
    await asyncio.wait_for(one.check.wait_returned(), 30)
    assert one.check.is_exceeded


def test_weights_of_an_engine_are_those_loaded_so_far():
    models = (
        Model("a", loaded=True, weights=4 * GIB),
        Model("b", weights=8 * GIB, loading=True, progress=0.25),
        Model("c", weights=16 * GIB),
    )
    assert sum_weights(EngineReport(Memory(), models, 0, 0)) == 6 * GIB
    assert sum_weights(EngineReport(Memory(), (), 0, 0)) == 0

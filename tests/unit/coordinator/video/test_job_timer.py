"""Timer of the checks of the job table."""

import asyncio

import pytest

from coordinator.video import job_timer
from coordinator.video.job_timer import JobTimer


async def test_an_earlier_check_replaces_a_later_one_and_not_the_reverse(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_timer, "TICK_SECONDS", 0.001)
    ticked = asyncio.Event()
    ticks: list[float] = []

    def tick() -> None:
        ticks.append(asyncio.get_running_loop().time())
        ticked.set()

    timer = JobTimer(tick)
    timer.schedule(busy=False)
    timer.schedule(busy=True)
    timer.schedule(busy=False)
    async with asyncio.timeout(5):
        await ticked.wait()
    ticked.clear()
    timer.schedule(busy=True)
    async with asyncio.timeout(5):
        await ticked.wait()
    assert len(ticks) == 2
    timer.schedule(busy=True)
    timer.cancel()
    timer.cancel()
    await asyncio.sleep(0.005)
    assert len(ticks) == 2
    timer.schedule(busy=False)
    await asyncio.sleep(0.005)
    assert len(ticks) == 2, "without an open job the next check is much later"
    timer.cancel()

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from node.memory.timer import Timer


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """Use both loops, because the node runs on uvloop."""
    return request.param


def run(loop: Any, work: Any) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(work())


def test_it_rings_once_at_the_soonest_time(loop: Any) -> None:
    async def work() -> None:
        rings: asyncio.Queue[float] = asyncio.Queue()
        clock = asyncio.get_running_loop().time
        alarm = Timer(lambda: rings.put_nowait(clock()))
        began = clock()
        alarm.set(began + 60)
        alarm.move_forward(began + 0.05)
        alarm.move_forward(began + 30)
        assert await asyncio.wait_for(rings.get(), 20) - began >= 0.04
        assert rings.empty()

    run(loop, work)


def test_what_is_due_at_once_can_be_brought_forward_again(loop: Any) -> None:
    async def work() -> None:
        rung = asyncio.Event()
        alarm = Timer(rung.set)
        now = asyncio.get_running_loop().time()
        alarm.set(now + 60)
        for earlier in (0, 1, 2):
            alarm.move_forward(now - earlier)
        await asyncio.wait_for(rung.wait(), 30)

    run(loop, work)


def test_cancelled_or_rung_it_is_not_brought_forward(loop: Any) -> None:
    async def work() -> None:
        rings: asyncio.Queue[None] = asyncio.Queue()
        alarm = Timer(lambda: rings.put_nowait(None))
        now = asyncio.get_running_loop().time()
        alarm.set(now)
        alarm.set(now)
        await asyncio.wait_for(rings.get(), 30)
        alarm.move_forward(now - 1)
        for _ in range(3):
            await asyncio.sleep(0)
        assert rings.empty(), "the second time replaced the first"
        alarm.set(now)
        alarm.cancel()
        alarm.move_forward(now - 1)
        for _ in range(3):
            await asyncio.sleep(0)
        assert rings.empty()

    run(loop, work)

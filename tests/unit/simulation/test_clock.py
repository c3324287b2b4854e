import asyncio

import pytest

from simulation.clock import Deadlock, VirtualLoop


def test_time_passes_by_itself():
    loop = VirtualLoop()

    async def story() -> list[float]:
        seen = [loop.time()]
        for pause in (0.001, 3600.0, 86_400.0 * 3):
            await asyncio.sleep(pause)
            seen.append(loop.time())
        return seen

    seen = loop.run_until_complete(story())
    loop.close()
    assert seen == pytest.approx([0.0, 0.001, 3600.001, 262_800.001])


def test_a_loop_that_can_never_end_is_a_deadlock():
    loop = VirtualLoop()

    async def story() -> None:
        await loop.create_future()

    with pytest.raises(Deadlock):
        loop.run_until_complete(story())
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_a_run_raises_the_exception_of_a_callback():
    loop = VirtualLoop()
    loop.call_later(1.0, {}.pop, "missing")
    with pytest.raises(KeyError, match="missing"):
        loop.run_until_complete(asyncio.sleep(5.0))
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()

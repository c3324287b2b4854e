"""Orders and confirmations of a lease, with reports that a test stores in place of an engine."""

import asyncio
from pathlib import Path

import pytest

from node.memory.lessor import LeaseObstacle, MemoryLessor
from node.memory.limits import LeaseHolder
from tests.unit.node.memory.test_poll import Node
from wire.frames import EngineReport
from wire.report import Memory
from wire.units import GIB

WAIT = 5.0


class Lessor(MemoryLessor):
    """A lessor of memory for videos on a node whose engine does not run."""

    def __init__(self, folder: Path) -> None:
        self.node = Node(folder, {"cap": "90GiB"})
        super().__init__(self.node.limiter, self.node.poll, self.node.supervisor, LeaseHolder.VIDEO)

    def report(self, freed: int = 0, limits: int = 0) -> None:
        report = EngineReport(Memory(), (), 0, 0, freed_order=freed, limits_number=limits)
        self.node.supervisor.reports.store(report, 0.0)
        self.on_engine_change()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_room_is_made_once_the_engine_reports_the_order_as_done(tmp_path: Path):
    lessor = Lessor(tmp_path)
    for number in (1, 2):
        waiting = asyncio.create_task(lessor.make_room(GIB))
        await settle()
        lessor.report(freed=number - 1)
        await settle()
        assert not waiting.done(), "that was the answer to an earlier order"
        lessor.report(freed=number)
        await asyncio.wait_for(waiting, WAIT)


async def test_a_silent_engine_is_awaited_for_a_limited_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.memory.lessor.CONFIRM_TIMEOUT_SECONDS", 0.01)
    lessor = Lessor(tmp_path)
    await asyncio.wait_for(lessor.make_room(GIB), WAIT)
    failure = await asyncio.wait_for(lessor.lower_ceiling(GIB), WAIT)
    assert failure is not None
    assert (failure.obstacle, failure.refused) == (LeaseObstacle.ENGINE_SILENT, None)
    assert lessor.holding, "the caller returns the memory"
    lowered = lessor.node.supervisor.orders.limits_number
    lessor.return_memory()
    assert (lessor.holding, lessor.node.limiter.leases) == (False, 0)
    assert lessor.node.supervisor.orders.limits_number == lowered + 1, "the engine gets the ceiling at once"
    lessor.return_memory()
    assert lessor.node.supervisor.orders.limits_number == lowered + 1, "nothing was leased"
    lessor.node.poll.stop()


async def test_the_ceiling_is_lower_once_the_engine_reports_the_number_of_the_limits(tmp_path: Path):
    lessor = Lessor(tmp_path)
    waiting = asyncio.create_task(lessor.lower_ceiling(GIB))
    await settle()
    number = lessor.node.supervisor.orders.limits_number
    assert (lessor.node.limiter.leases, number) == (GIB, 1)
    lessor.report(limits=number - 1)
    await settle()
    assert not waiting.done()
    lessor.report(limits=number)
    failure = await asyncio.wait_for(waiting, WAIT)
    assert failure is not None
    assert failure.obstacle is LeaseObstacle.NEW_REQUESTS, "without a footprint nothing fits"
    assert failure.refused is not None
    lessor.node.poll.stop()


async def test_only_a_lease_of_another_kind_is_an_obstacle_and_stays_as_it_is(tmp_path: Path):
    lessor = Lessor(tmp_path)
    assert lessor.find_other_holder() == ""
    lessor.node.limiter.begin_lease(GIB, LeaseHolder.VIDEO)
    assert (lessor.holding, lessor.find_other_holder()) == (True, "")
    lessor.node.limiter.begin_lease(3 * GIB, LeaseHolder.QUANTIZATION)
    failure = await lessor.lower_ceiling(GIB)
    assert failure is not None
    assert failure.obstacle is LeaseObstacle.HELD
    assert failure.message == "this node has leased 3.0 GiB to a quantization: one lease at a time"
    assert failure.message == lessor.find_other_holder()
    lessor.return_memory()
    assert (lessor.node.limiter.leases, lessor.node.limiter.holder) == (3 * GIB, LeaseHolder.QUANTIZATION)

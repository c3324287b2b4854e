"""Callbacks that wait for the disk."""

import asyncio
import weakref

import structlog

from coordinator.cluster.store_barrier import StoreBarrier
from coordinator.state.store_errors import StoreError
from tests.support.cluster.manual_pool import turn


async def test_a_callback_waits_for_the_disk_and_is_left_out_after_a_failed_write():
    disk = asyncio.Event()
    is_full = False
    called: list[str] = []

    async def flush() -> None:
        await disk.wait()
        if is_full:
            raise StoreError("the disk is full")

    barrier, others = StoreBarrier(flush), asyncio.all_tasks()
    barrier.call_when_stored(lambda: called.append("certificate"))
    (task,) = map(weakref.ref, asyncio.all_tasks() - others)
    await turn()
    assert called == []
    disk.set()
    await turn()
    assert called == ["certificate"]
    assert task() is None, "an ended task is not kept"
    is_full = True
    with structlog.testing.capture_logs() as logs:
        barrier.call_when_stored(lambda: called.append("another"), lambda error: called.append(str(error)))
        await turn()
    assert called == ["certificate", "the disk is full"]
    assert [(entry["event"], entry["error"]) for entry in logs] == [("not stored", "the disk is full")]

"""Records of nodes: the wait for a report."""

import asyncio
import time
from pathlib import Path

import pytest

from coordinator.cluster.node_records import NodeRecords
from coordinator.state.database import Database
from tests.support.cluster.loopback_cluster import LoopbackNode
from wire.identity import NodeId

NODE = NodeId("a" * 32)


@pytest.mark.parametrize("deleted", [False, True])
async def test_a_wait_ends_with_a_report_or_with_the_records(tmp_path: Path, *, deleted: bool):
    store = Database(tmp_path)
    records = NodeRecords(store)
    waiting = asyncio.create_task(records.wait_for_report(NODE))
    await asyncio.sleep(0)
    if deleted:
        records.delete(NODE)
    else:
        records.record_report(NODE, LoopbackNode("one").report(), time.monotonic())
    async with asyncio.timeout(5):
        await waiting
    assert records.get_reported_at(NODE) is None if deleted else records.list_reported() == [NODE]
    store.close()

"""Periodic tasks of the coordinator: they continue after a failed round."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from coordinator.startup import background
from coordinator.startup.background import renew_certificates, store_usage
from coordinator.state.database import Database
from coordinator.state.store_errors import StoreError
from coordinator.state.usage_history import UsageHistory
from coordinator.tls.cluster_ca import ClusterCa
from router.admission.api_keys import KeyRing
from router.admission.usage import UsageCounter
from tests.support.cluster.enrolment import Wall
from wire.certificate import LEAF_VALIDITY_SECONDS


async def test_certificates_are_renewed_after_a_failed_renewal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "RENEWAL_INTERVAL_SECONDS", 0.01)
    wall = Wall()
    authority = ClusterCa(tmp_path, wall)
    file, before = tmp_path / "coordinator.pem", authority.renew_from
    content = file.read_bytes()
    file.write_bytes(b"junk")
    wall.now += LEAF_VALIDITY_SECONDS
    task = asyncio.create_task(renew_certificates(authority, None))
    await asyncio.wait({task}, timeout=0.1)
    assert not task.done()
    file.write_bytes(content)
    async with asyncio.timeout(30):
        while authority.renew_from == before:  # noqa: ASYNC110  a renewal has no event for tests
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_usage_is_recorded_after_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "USAGE_INTERVAL_SECONDS", 0.01)
    store, usage = Database(tmp_path), UsageCounter()
    history = UsageHistory(store, KeyRing(b"p" * 32), lambda: 1e9)
    other = sqlite3.connect(tmp_path / "cluster.db")
    other.execute("DROP TABLE audit")
    other.close()
    store.audit.add(1.0, "person", "create keys", "laptop")
    with pytest.raises(StoreError):
        await store.flush()
    task = asyncio.create_task(store_usage(history, usage))
    for requests in (1, 2):
        usage.get_totals("a", "tiny").count(10, 0, 1, failed=False)
        async with asyncio.timeout(30):
            while [row["requests"] for row in history.sum()["usage"]] != [requests]:
                assert not task.done()
                await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(StoreError):
        store.close()

"""Periodic tasks of the coordinator: they continue after a failed round."""

import asyncio
import sqlite3
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coordinator.backup.generation_fence import GenerationFence
from coordinator.observe.event_log import EventLog
from coordinator.startup import background
from coordinator.startup.background import renew_certificates, start_periodic_tasks, store_usage
from coordinator.startup.state import CoordinatorState, load_credentials
from coordinator.state.database import Database
from coordinator.state.settings import HttpSettings
from coordinator.state.store_errors import StoreError
from coordinator.state.usage_history import UsageHistory
from coordinator.tls.cluster_ca import ClusterCa
from coordinator.tls.https_ca import HttpsCa
from router.admission.api_keys import KeyRing
from router.admission.usage import UsageCounter
from router.dispatch.dispatcher import Dispatcher
from router.settings import RouterSettings
from tests.support.cluster.enrolment import Wall
from wire.certificate import LEAF_VALIDITY_SECONDS


async def test_certificates_are_renewed_after_a_failed_renewal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "RENEWAL_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(background, "CHANGE_CHECK_SECONDS", 0.01)
    wall = Wall()
    authority, endpoint = ClusterCa(tmp_path, wall), HttpsCa(tmp_path / "https", (), wall)
    shown = endpoint.validity
    file, before = tmp_path / "coordinator.pem", authority.renew_from
    content = file.read_bytes()
    file.write_bytes(b"junk")
    wall.now += LEAF_VALIDITY_SECONDS
    task = asyncio.create_task(renew_certificates(authority, endpoint))
    await asyncio.wait({task}, timeout=0.1)
    assert not task.done()
    assert endpoint.validity != shown, "the certificate of the endpoint is renewed all the same"
    file.write_bytes(content)
    async with asyncio.timeout(30):
        while authority.renew_from == before:  # noqa: ASYNC110  a renewal has no event for tests
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_certificates_are_renewed_soon_after_the_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "CHANGE_CHECK_SECONDS", 0.01)
    wall = Wall()
    authority = ClusterCa(tmp_path, wall)
    task = asyncio.create_task(renew_certificates(authority, None, wall))
    for step in (-2 * LEAF_VALIDITY_SECONDS, 3 * LEAF_VALIDITY_SECONDS):
        await asyncio.sleep(0)  # the loop has the former clock
        wall.now += step
        async with asyncio.timeout(30):
            while not authority.validity[0] - 1 <= wall.now < authority.validity[1]:  # noqa: ASYNC110  as above
                await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_certificate_has_a_new_address_before_the_next_renewal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "CHANGE_CHECK_SECONDS", 0.01)
    addresses, read = list[str](), asyncio.Event()

    def list_addresses() -> list[str]:
        read.set()
        return list(addresses)

    monkeypatch.setattr(background, "list_addresses", list_addresses)
    authority = ClusterCa(tmp_path, time.time)
    endpoint = HttpsCa(tmp_path / "https", (), time.time, lambda: tuple(addresses))
    task = asyncio.create_task(renew_certificates(authority, endpoint))
    async with asyncio.timeout(30):
        for addresses[:] in (["10.0.0.7"], ["192.168.1.5", "10.0.0.7"], []):
            while not set(addresses) <= set(endpoint.names) or len(endpoint.names) != 3 + len(addresses):
                read.clear()
                await read.wait()
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


async def test_usage_since_the_last_write_is_stored_at_the_end(tmp_path: Path):
    store, authority = Database(tmp_path), ClusterCa(tmp_path / "authority", time.time)
    store.create_cluster(authority.cluster, "lab")
    fence = GenerationFence(authority, 0)
    state = CoordinatorState(tmp_path, tmp_path / "x.log", EventLog(), store, authority, fence, True, 1, "1.0")
    access = load_credentials(state, HttpSettings(), "127.0.0.1")
    dispatcher = Dispatcher(lambda node, frame: False, RouterSettings(), numbers=lambda: (1, 1))
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        start_periodic_tasks(state, access, dispatcher, None, stack)
        dispatcher.usage.get_totals("k1", "tiny").count(10, 4, 2, failed=False)
    again = Database(tmp_path)
    rows = [(row.key, row.model, row.used.requests, row.used.prompt_tokens) for row in again.usage.list_rows()]
    again.close()
    assert rows == [("k1", "tiny", 1, 10)]

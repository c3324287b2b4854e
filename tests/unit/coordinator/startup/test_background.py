"""Periodic tasks of the coordinator: they continue after a failed round."""

import asyncio
import hashlib
import json
import sqlite3
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from structlog.testing import capture_logs

from coordinator.alerts import evaluator
from coordinator.backup.generation_fence import GenerationFence
from coordinator.observe.event_log import EventLog
from coordinator.startup import background
from coordinator.startup.background import (
    announce_coordinator,
    renew_certificates,
    start_local_node,
    start_periodic_tasks,
    start_wishes,
    store_usage,
)
from coordinator.startup.options import RunOptions
from coordinator.startup.state import CoordinatorState, load_credentials
from coordinator.state.database import Database
from coordinator.state.settings import CoordinatorSettings, HttpSettings
from coordinator.state.store_errors import StoreError
from coordinator.state.usage_history import UsageHistory
from coordinator.tls.cluster_ca import ClusterCa
from coordinator.tls.https_ca import HttpsCa
from router.admission.api_keys import KeyRing
from router.admission.usage import UsageCounter
from router.dispatch.dispatcher import Dispatcher
from router.settings import RouterSettings
from tests.support.cluster.cluster_port import a_report
from tests.support.cluster.enrolment import Wall
from tests.support.cluster.loopback_cluster import a_memory
from tests.support.coordinator.started_coordinator import started
from wire.bonjour_record import BonjourRecord, shorten_cluster_id
from wire.certificate import LEAF_VALIDITY_SECONDS
from wire.join_token import parse_token


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


async def test_a_renewal_that_the_disk_refuses_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "RENEWAL_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(background, "CHANGE_CHECK_SECONDS", 0.01)
    wall = Wall()
    authority, endpoint = ClusterCa(tmp_path / "cluster", wall), HttpsCa(tmp_path / "https", (), wall)
    shown, before = endpoint.validity, authority.renew_from
    (tmp_path / "https").rename(tmp_path / "away")
    wall.now += LEAF_VALIDITY_SECONDS
    with capture_logs() as logs:
        task = asyncio.create_task(renew_certificates(authority, endpoint))
        async with asyncio.timeout(30):
            while not any(entry["event"] == "certificate not renewed" for entry in logs):  # noqa: ASYNC110  as above
                await asyncio.sleep(0.01)
    assert (authority.renew_from > before, task.done()) == (True, False)
    (tmp_path / "away").rename(tmp_path / "https")
    async with asyncio.timeout(30):
        while endpoint.validity == shown:  # noqa: ASYNC110  as above
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
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        start_periodic_tasks(state, access, dispatcher, None, stack)
        assert len(asyncio.all_tasks() - before) == 2
        dispatcher.usage.get_totals("k1", "tiny").count(10, 4, 2, failed=False)
    assert asyncio.all_tasks() <= before
    again = Database(tmp_path)
    rows = [(row.key, row.model, row.used.requests, row.used.prompt_tokens) for row in again.usage.list_rows()]
    again.close()
    assert rows == [("k1", "tiny", 1, 10)]


async def test_conditions_of_a_running_coordinator_reach_its_log_its_api_and_its_webhook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(evaluator, "EVALUATION_INTERVAL_SECONDS", 0.02)
    messages = asyncio.Queue[dict[str, Any]]()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        messages.put_nowait(json.loads(await reader.readexactly(length)))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    settings = msgspec.convert({"alerts": {"webhook_url": url}}, CoordinatorSettings)
    before = asyncio.all_tasks()
    with capture_logs() as logs:
        async with (
            asyncio.timeout(30),
            started(tmp_path, settings) as made,
            made.client("metrics") as client,
            made.linked(made.add_member("studio"), a_report(memory=a_memory(guard=False))) as (line, _),
        ):
            began = await messages.get()
            listed = (await client.get("/api/v1/conditions")).json()["conditions"]
            metrics = (await client.get("/metrics")).text.splitlines()
            line.send(a_report(1))
            ended = await messages.get()
    server.close()
    assert [(one["cluster"], one["event"], one["name"], one["node"]) for one in (began, ended)] == [
        ("home", "began", "GuardOff", "studio"),
        ("home", "ended", "GuardOff", "studio"),
    ]
    assert abs(began["since"] - time.time()) < 60
    assert [(row["name"], row["since"]) for row in listed] == [("GuardOff", began["since"])]
    active = [line for line in metrics if line.startswith("macpool_condition_active{") and line.endswith(" 1.0")]
    assert active == ['macpool_condition_active{condition="GuardOff"} 1.0']
    assert [entry["condition"] for entry in logs if entry["event"].startswith("condition ")] == ["GuardOff"] * 2
    assert asyncio.all_tasks() <= before


NODE_PROGRAM = """#!{python} -IS
import os, sys
folder = sys.argv[sys.argv.index("--state") + 1]
with os.fdopen(int(sys.argv[sys.argv.index("--token-fd") + 1])) as file, open(folder + "/started", "w") as started:
    started.write(" ".join([file.read(), sys.argv[sys.argv.index("--url") + 1], sys.argv[-1]]))
sys.exit(2)
"""
"""Takes the place of the node: writes its token, its address and its last argument into a file, and ends."""


async def test_the_local_node_gets_a_short_token_that_may_replace_its_lost_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = tmp_path / "program"
    program.write_text(NODE_PROGRAM.format(python=sys.executable))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    options = RunOptions(
        tmp_path, ("127.0.0.1", 0), ("0.0.0.0", 0), True, node_arguments=("last",), settings=CoordinatorSettings()
    )
    async with started(tmp_path) as made, AsyncExitStack() as stack:
        ready = await start_local_node(options, made.state, made.access, made.cluster, asyncio.Event(), stack)
        text, url, last = (tmp_path / "started").read_text().split()
        token = parse_token(text)
        (listed,) = made.access.tokens.list()
        assert (ready, url, last) == (False, f"127.0.0.1:{made.cluster.port}", "last")
        assert (listed.id, listed.uses_left, round(listed.expires - listed.created)) == (token.id, 1, 600)
        assert made.access.tokens.may_replace(token.id)


async def test_a_stop_ends_the_loop_of_the_wishes(tmp_path: Path):
    async with started(tmp_path) as made, AsyncExitStack() as stack:
        before = asyncio.all_tasks()
        start_wishes(made.cluster.wishes, stack)
        (loop,) = asyncio.all_tasks() - before
        await stack.aclose()
        assert loop.cancelled()


async def test_the_cluster_port_is_announced_with_the_pin_of_its_authority_until_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    announced = list[Any]()

    class Recorded:
        def __init__(self, *facts: Any) -> None:
            announced.append(facts)

        def start(self) -> None:
            announced.append("start")

        async def close(self) -> None:
            announced.append("close")

    monkeypatch.setattr(background, "Announcement", Recorded)
    settings = msgspec.convert({"cluster": {"name": "lab"}}, CoordinatorSettings)
    address = ("127.0.0.1", 0)
    options = RunOptions(tmp_path, address, address, local_node=False, node_arguments=(), settings=settings)
    async with started(tmp_path) as made, AsyncExitStack() as stack:
        announce_coordinator(options, made.state, 8099, stack)
        authority = made.state.authority
        pin = hashlib.sha256(authority.ca).hexdigest()[:16]
        record = BonjourRecord("coord", shorten_cluster_id(authority.cluster), "1.0", pin)
        assert announced == [(record, "lab", authority.cluster, 8099), "start"]
    assert announced[2:] == ["close"]


async def test_a_stop_ends_the_wait_for_the_local_node_and_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable} -IS\nimport sys\nsys.stdin.read()\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    address, stop, before = ("127.0.0.1", 0), asyncio.Event(), psutil.Process().children()
    stop.set()
    options = RunOptions(tmp_path, address, address, local_node=True, node_arguments=(), settings=CoordinatorSettings())
    async with started(tmp_path) as made:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(30):
                assert not await start_local_node(options, made.state, made.access, made.cluster, stop, stack)
            (process,) = set(psutil.Process().children()) - set(before)
        assert not process.is_running()


async def test_a_failed_write_of_usage_is_logged_once_until_a_write_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(background, "USAGE_INTERVAL_SECONDS", 0.0)
    results = [StoreError("full"), StoreError("full"), None, StoreError("full")]
    written = asyncio.Event()

    class History(UsageHistory):
        def record(self, usage: UsageCounter) -> None:
            if not results:
                written.set()
            elif error := results.pop(0):
                raise error

    store = Database(tmp_path)
    with capture_logs() as logs:
        history = History(store, KeyRing(b"p" * 32), time.time)
        task = asyncio.create_task(store_usage(history, UsageCounter()))
        await asyncio.wait_for(written.wait(), 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    store.close()
    assert [entry["event"] for entry in logs] == ["usage not stored"] * 2

"""Orders to nodes through the API of the coordinator, with nodes on real links."""

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.cluster import node_administration
from coordinator.state.store_errors import StoreError
from tests.support.cluster.cluster_port import Line, Port, a_report, opened
from wire.frames import Admitted, Denied, FetchChunk, FetchRequest, Finished, Generate, PauseNode
from wire.identity import NodeId
from wire.report import Sharing

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}


async def linked(port: Port, name: str, **report: Any) -> Line:
    who = port.member(name)
    line = await port.link(who, a_report(**report))
    await port.until(lambda: port.state(who) == "ready")
    return line


@pytest.mark.parametrize(
    ("body", "seconds", "sharing"),
    [
        ({"seconds": 60.0}, 60.0, Sharing("always", paused=True, until=1e9, by_hand=True)),
        ({}, None, Sharing("always", paused=True, by_hand=True)),
    ],
)
async def test_a_pause_is_answered_once_the_node_has_confirmed_it(
    port: Port, boss: httpx.AsyncClient, body: dict[str, float], seconds: float | None, sharing: Sharing
):
    line = await linked(port, "studio", sharing=Sharing("always"))
    asked = asyncio.create_task(boss.post("/api/v1/nodes/studio/pause", json=body))
    assert (await line.until(PauseNode)).seconds == seconds
    line.send(a_report(2, sharing=sharing))
    answer = (await asked).json()
    assert (answer["sharing"]["paused"], answer["sharing"]["until"], answer["in_flight"]) == (True, sharing.until, 0)
    asked = asyncio.create_task(boss.post("/api/v1/nodes/studio/resume"))
    assert (await line.until(PauseNode)).seconds == 0
    line.send(a_report(3, sharing=Sharing("always")))
    assert (await asked).json()["sharing"]["paused"] is False


async def test_a_drain_ends_with_its_requests_its_time_or_an_uncordon(port: Port, boss: httpx.AsyncClient):
    line = await linked(port, "studio")
    path = "/api/v1/nodes/studio"
    async with port.client("infer") as client:
        chat = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        order = await line.until(Generate)
        line.send(Admitted(order.request, 7))
        late = (await boss.post(f"{path}/drain", json={"wait_seconds": 0.01})).json()
        assert (late["cordoned"], late["left"]) == (True, 1)
        assert (await boss.post(f"{path}/uncordon")).status_code == 200
        for written in (False, True):
            draining = asyncio.create_task(boss.post(f"{path}/drain", json={"wait_seconds": 60.0}))
            while not is_cordoned(port):  # noqa: ASYNC110  a cordon has no event for tests
                await asyncio.sleep(0)
            if written:
                await port.application.store.flush()
            assert (await boss.post(f"{path}/uncordon")).status_code == 200
            async with asyncio.timeout(5):
                ended = (await draining).json()
            assert (ended["cordoned"], ended["left"]) == (False, 1)
        draining = asyncio.create_task(boss.post(f"{path}/drain", json={"wait_seconds": 60.0}))
        await port.until(lambda: is_cordoned(port))
        line.send(Finished(order.request, ("stop",), 7, 2))
        assert (await chat).status_code == 200
        ended = (await draining).json()
        assert (ended["cordoned"], ended["left"]) == (True, 0)


def only_member(port: Port) -> NodeId:
    """Return the id of the only member."""
    (node,) = port.application.registry.pool.members
    return node


def is_cordoned(port: Port) -> bool:
    return port.application.registry.pool.members[only_member(port)].cordoned


async def test_an_open_breaker_has_its_end_in_unix_seconds(port: Port, boss: httpx.AsyncClient):
    await linked(port, "studio")
    dispatcher, node = port.application.dispatcher, only_member(port)
    now = dispatcher.get_time()
    closed = (await boss.get("/api/v1/nodes/studio")).json()["node"]["breaker"]
    assert closed == {"state": "closed", "why": "", "until": None, "opened": 0}
    for at in range(3):
        dispatcher.breakers.record_fault(node, at, now - 4.0 + 2.0 * at)
    breaker = (await boss.get("/api/v1/nodes/studio")).json()["node"]["breaker"]
    assert (breaker["state"], breaker["opened"]) == ("open", 1)
    assert time.time() < breaker["until"] < time.time() + 3600


async def test_an_open_request_is_counted_on_its_node(port: Port, boss: httpx.AsyncClient):
    line = await linked(port, "studio", sharing=Sharing("always"))
    async with port.client("infer") as client:
        chat = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        order = await line.until(Generate)
        line.send(Admitted(order.request, 7))
        assert (await boss.get("/api/v1/nodes/studio")).json()["node"]["in_flight"] == 1
        asked = asyncio.create_task(boss.post("/api/v1/nodes/studio/pause", json={}))
        await line.until(PauseNode)
        line.send(a_report(2, sharing=Sharing("always", paused=True, by_hand=True)))
        assert (await asked).json()["in_flight"] == 1
        line.send(Finished(order.request, ("stop",), 7, 2))
        assert (await chat).status_code == 200
    assert (await boss.get("/api/v1/nodes/studio")).json()["node"]["in_flight"] == 0


async def test_a_cordon_that_is_not_on_the_disk_is_an_error(tmp_path: Path):
    with pytest.raises(StoreError):  # at the end, when the application closes its store
        await cordon_without_disk(tmp_path)


async def cordon_without_disk(folder: Path) -> None:
    async with opened(folder) as port, port.client("admin") as boss:
        port.member("studio")
        await port.application.store.flush()
        with closing(sqlite3.connect(folder / "state" / "cluster.db")) as other:
            for verb in ("INSERT", "UPDATE"):
                other.execute(
                    f"CREATE TRIGGER full_{verb} BEFORE {verb} ON members BEGIN SELECT RAISE(ABORT, 'full'); END"
                )
        answer = await boss.post("/api/v1/nodes/studio/cordon")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "state_not_written")


@pytest.mark.parametrize(
    ("order", "body", "field", "value"),
    [
        ("POST cordon", None, "cordoned", True),
        ("POST uncordon", None, "cordoned", False),
        ("POST deny-video", None, "video_allowed", False),
        ("POST allow-video", None, "video_allowed", True),
        ("PUT labels", {"labels": ["fast", "lab", "fast"]}, "labels", ["fast", "lab"]),
    ],
)
async def test_an_order_about_a_node_is_answered_shown_and_stored(
    port: Port, boss: httpx.AsyncClient, order: str, body: dict[str, Any] | None, field: str, value: object
):
    node = port.member("studio").node
    if value in (False, True):  # the contrary before
        contrary = {"cordoned": port.application.nodes.administration.set_cordoned}.get(
            field, port.application.nodes.administration.set_video_allowed
        )
        contrary(node, on=not value)
    method, name = order.split()
    answer = await boss.request(method, f"/api/v1/nodes/studio/{name}", json=body)
    assert answer.json() == {"schema": 1, "node": node, field: value}
    row = port.application.store.members[node]
    stored = {"cordoned": row.cordoned, "video_allowed": row.video, "labels": list(row.labels)}
    shown = (await boss.get(f"/api/v1/nodes/{node}")).json()["node"]
    assert stored[field] == value
    assert (shown["video"]["allowed"] if field == "video_allowed" else shown[field]) == value
    (act,) = (await boss.get("/api/v1/audit")).json()["acts"]
    assert (act["action"], act["subject"].split()[0]) == (name.replace("-", "_").replace("labels", "label"), "studio")


async def test_a_removed_node_is_listed_and_takes_no_orders(port: Port, boss: httpx.AsyncClient):
    line, node = await linked(port, "studio"), only_member(port)
    assert (await boss.delete("/api/v1/nodes/studio")).json() == {"schema": 1, "node": node}
    assert [frame.reason for frame in await line.ended() if isinstance(frame, Denied)] == ["removed"]
    (row,) = (await boss.get("/api/v1/nodes")).json()["nodes"]
    assert (row["name"], row["state"]) == ("studio", "left")
    orders: list[tuple[str, str, dict[str, Any] | None]] = [
        ("POST", "/cordon", None),
        ("POST", "/uncordon", None),
        ("POST", "/allow-video", None),
        ("POST", "/deny-video", None),
        ("POST", "/drain", {"wait_seconds": 0.0}),
        ("POST", "/pause", {}),
        ("POST", "/resume", None),
        ("PUT", "/labels", {"labels": []}),
        ("DELETE", "", None),
    ]
    for method, name, body in orders:
        left = await boss.request(method, f"/api/v1/nodes/studio{name}", json=body)
        assert (left.status_code, left.json()["error"]["code"]) == (409, "node_left"), name
        assert "listed for 10 minutes" in left.json()["error"]["message"]
        unknown = await boss.request(method, f"/api/v1/nodes/nowhere{name}", json=body)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "node_not_found"), name
    for path in ("", "/logs"):
        assert (await boss.get(f"/api/v1/nodes/nowhere{path}")).status_code == 404


async def test_a_pause_of_a_node_that_cannot_confirm_is_a_503(
    port: Port, boss: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(node_administration, "PAUSE_TIMEOUT_SECONDS", 0.01)
    port.member("away")
    await linked(port, "silent", sharing=Sharing("always"))
    for name, words in (("away", "away: it has not reported yet"), ("silent", "silent did not confirm the pause")):
        answer = await boss.post(f"/api/v1/nodes/{name}/pause", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "node_unreachable")
        assert answer.json()["error"]["message"].startswith(words)


@pytest.mark.parametrize("order", ["POST deny-video", "PUT labels", "DELETE", "POST cordon", "POST drain"])
async def test_an_order_is_answered_once_it_is_on_the_disk(
    port: Port, boss: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, order: str
):
    port.member("studio")
    flushed, flush = list[bool](), port.application.store.flush

    async def record() -> None:
        await flush()
        flushed.append(True)

    monkeypatch.setattr(port.application.store, "flush", record)
    method, _, name = order.partition(" ")
    body = {"labels": ["a"]} if name == "labels" else {"wait_seconds": 0.0} if name == "drain" else None
    answer = await boss.request(method, f"/api/v1/nodes/studio/{name}".rstrip("/"), json=body)
    assert (answer.status_code, flushed) == (200, [True])


@pytest.mark.parametrize(("parameters", "wanted"), [({}, 65536), ({"bytes": 100}, 100)])
async def test_the_newest_bytes_of_a_log_are_fetched_from_its_node(
    port: Port, boss: httpx.AsyncClient, parameters: dict[str, int], wanted: int
):
    line = await linked(port, "studio")
    asking = asyncio.create_task(boss.get("/api/v1/nodes/studio/logs", params=parameters))
    asked = await line.until(FetchRequest)
    assert (asked.source, asked.offset, asked.limit) == ("logs", -wanted, wanted)
    line.send(FetchChunk(asked.number, b"one\ntwo\n", last=True))
    answer = await asking
    assert (answer.status_code, answer.text) == (200, "one\ntwo\n")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


async def test_a_followed_log_continues_where_the_last_poll_ended(
    port: Port, boss: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("coordinator.api.routes.nodes.FOLLOW_INTERVAL_SECONDS", 0.001)
    line = await linked(port, "studio")
    asking = asyncio.create_task(boss.get("/api/v1/nodes/studio/logs", params={"bytes": 5, "follow": True}))
    for offset, text in ((-5, b"first\n"), (20, b"second\n")):
        asked = await line.until(FetchRequest)
        assert asked.offset == offset
        line.send(FetchChunk(asked.number, text, last=True, end=20))
    line.send(FetchChunk((await line.until(FetchRequest)).number, b"", last=True, error="the log is gone"))
    lines = (await asking).text.splitlines()
    assert lines[:2] == ["first", "second"]
    assert json.loads(lines[2])["reason"] == "the log is gone"


async def test_a_resumed_node_may_stay_paused_by_its_own_setting(port: Port, boss: httpx.AsyncClient):
    line = await port.link(port.member("studio"), a_report(sharing=Sharing("idle", paused=True, by_hand=True)))
    await port.until(lambda: port.application.registry.get_node_view(only_member(port)).sharing.by_hand)
    asked = asyncio.create_task(boss.post("/api/v1/nodes/studio/resume"))
    assert (await line.until(PauseNode)).by == "an administrator of the pool"
    line.send(a_report(2, sharing=Sharing("idle", paused=True)))
    sharing = (await asked).json()["sharing"]
    assert (sharing["paused"], sharing["by_hand"]) == (True, False)

"""Streams of the coordinator's log and of its events: they end with the API key of their request."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import httpx
import pytest
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from coordinator.api.auth import require_scope
from coordinator.api.errors import ProblemError
from coordinator.api.routes.logs_and_events import LogRoutes
from coordinator.joining.join_tokens import JoinTokens
from coordinator.observe import event_log
from coordinator.observe.event_log import EventLog
from coordinator.state.access_admin import AccessAdmin
from coordinator.state.database import Database
from router.admission.api_keys import KeyRing
from tests.support.cluster.cluster_port import Port

PEPPER = b"0123456789abcdef"
SCOPE = {"type": "http", "headers": [], "client": None}


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[AccessAdmin]:
    store = Database(tmp_path)
    yield AccessAdmin(store, JoinTokens(store, b"", time.time), KeyRing(PEPPER), PEPPER, time.time)
    store.close()


def get_body(response: Response) -> AsyncIterator[bytes]:
    assert isinstance(response, StreamingResponse)
    return cast("AsyncIterator[bytes]", response.body_iterator)


@pytest.mark.parametrize(
    ("missed", "expected"),
    [("", [b"two"]), ("FIRST", [b"two"]), ("0", [b"one", b"two"]), ("9" * 5000, [b"two"]), ("-1", [b"two"])],
)
async def test_events_after_the_last_one_of_a_reader_are_sent(admin: AccessAdmin, missed: str, expected: list[bytes]):
    hub = EventLog()
    routes = LogRoutes(Path("unused.log"), hub, admin)
    for text in ("one", "two"):
        hub.add_event({"logger": "coordinator.x", "event": text})
    await asyncio.sleep(0)
    everything = [piece async for piece in get_body(await routes.events(Request(SCOPE), last=2))]
    missed = everything[0].split()[1].decode() if missed == "FIRST" else missed
    request = Request({**SCOPE, "headers": [(b"last-event-id", missed.encode())]})
    pieces = [piece async for piece in get_body(await routes.events(request, last=1))]
    assert [text in piece for text, piece in zip(expected, pieces, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("kind", ["events", "log"])
async def test_a_followed_stream_sends_nothing_after_its_key_was_revoked(
    admin: AccessAdmin, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("coordinator.api.routes.logs_and_events.FOLLOW_INTERVAL_SECONDS", 0.001)
    hub, log = EventLog(), tmp_path / "coordinator.log"
    routes = LogRoutes(log, hub, admin)

    def add(text: str) -> None:
        hub.add_event({"logger": "coordinator.x", "event": text})
        with log.open("a") as file:
            file.write(f"{text}\n")

    made = admin.create_key("auditor", ["admin"], None)
    request = Request({"type": "http", "headers": [(b"x-api-key", made["key"].encode())], "client": None})
    await require_scope(admin.ring, "admin")(request)
    add("first")
    body = get_body(
        await (routes.events(request, follow=True) if kind == "events" else routes.own_logs(65536, follow=True))
    )
    assert b"first" in await anext(body)
    assert admin.revoke_key(made["id"])
    add("secret")
    assert [piece async for piece in body] == []
    assert hub.readers == 0


async def test_the_newest_bytes_events_and_audit_entries_are_returned(port: Port, boss: httpx.AsyncClient):
    log = port.folder / "state" / "coordinator.log"
    log.write_text("".join(f"line {number}\n" for number in range(20_000)))
    short = await boss.get("/api/v1/logs", params={"bytes": 30})
    assert short.text.splitlines() == ["line 19998", "line 19999"]
    assert 65_500 < len((await boss.get("/api/v1/logs")).text) <= 65_536
    for number in range(60):
        port.application.store.audit.add(1.0, "local", "cordon", f"node {number}")
    for parameters, first in (({}, 0), ({"last": 2}, 58)):
        acts = (await boss.get("/api/v1/audit", params=parameters)).json()["acts"]
        assert [act["subject"] for act in acts] == [f"node {number}" for number in range(first, 60)]
    log.unlink()
    missing = await boss.get("/api/v1/logs")
    assert (missing.status_code, missing.json()["error"]["code"]) == (503, "no_log")


async def test_events_are_the_newest_fifty_until_too_many_clients_read_them(
    admin: AccessAdmin, monkeypatch: pytest.MonkeyPatch
):
    hub = EventLog()
    routes = LogRoutes(Path("unused.log"), hub, admin)
    for number in range(60):
        hub.add_event({"logger": "coordinator.x", "event": f"event {number}"})
    await asyncio.sleep(0)
    pieces = [piece async for piece in get_body(await routes.events(Request(SCOPE)))]
    assert (b"".join(pieces).count(b"data: "), b'event 10"' in pieces[0]) == (50, True)
    monkeypatch.setattr(event_log, "MAX_READERS", 0)
    with pytest.raises(ProblemError) as refused:
        await routes.events(Request(SCOPE))
    assert (refused.value.problem.status, refused.value.problem.code) == (503, "too_many_readers")

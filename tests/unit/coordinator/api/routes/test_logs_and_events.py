"""Streams of the coordinator's log and of its events: they end with the API key of their request."""

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import pytest
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from coordinator.api.auth import require_scope
from coordinator.api.routes.logs_and_events import LogRoutes
from coordinator.joining.join_tokens import JoinTokens
from coordinator.observe.event_log import EventLog
from coordinator.state.access_admin import AccessAdmin
from coordinator.state.database import Database
from router.admission.api_keys import KeyRing

PEPPER = b"0123456789abcdef"


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[AccessAdmin]:
    store = Database(tmp_path)
    yield AccessAdmin(store, JoinTokens(store, b"", time.time), KeyRing(PEPPER), PEPPER, time.time)
    store.close()


def get_body(response: Response) -> AsyncIterator[bytes]:
    assert isinstance(response, StreamingResponse)
    return cast("AsyncIterator[bytes]", response.body_iterator)


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

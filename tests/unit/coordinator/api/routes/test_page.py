"""Sign-in to the page through the API of the coordinator."""

import time

import httpx
import pytest

from coordinator.ui import live_stream
from tests.support.cluster.cluster_port import Port


async def test_a_link_signs_in_once_and_the_session_ends(port: Port, boss: httpx.AsyncClient):
    link = (await boss.post("/api/v1/page/links")).json()
    code = link["url"].partition("#in=")[2]
    assert (link["seconds"], link["url"].startswith("http://127.0.0.1:8080/#in=")) == (120.0, True)
    entered = await boss.post("/api/v1/page/visits", json={"code": code})
    assert entered.json()["key"]
    again = await boss.post("/api/v1/page/visits", json={"code": code})
    assert (again.status_code, again.json()["error"]["code"]) == (401, "link_used_up")
    async with port.client_of(entered.json()["key"]) as visitor:
        assert (await visitor.get("/api/v1/status")).status_code == 200
        assert (await visitor.delete("/api/v1/page/visit")).json() == {"schema": 1}
        assert (await visitor.get("/api/v1/status")).status_code == 401
    other = await boss.delete("/api/v1/page/visit")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "no_session")


async def test_a_session_is_no_stored_key_and_its_refused_revocation_leaves_it_valid(
    port: Port, boss: httpx.AsyncClient
):
    code = (await boss.post("/api/v1/page/links")).json()["url"].partition("#in=")[2]
    key = (await boss.post("/api/v1/page/visits", json={"code": code})).json()["key"]
    async with port.client_of(key) as visitor:
        own = (await visitor.get("/api/v1/key")).json()["id"]
        assert (await boss.delete(f"/api/v1/keys/{own}")).status_code == 404
        assert (await visitor.get("/api/v1/status")).status_code == 200


async def test_a_sign_in_has_its_expiry_and_is_in_the_audit_log(port: Port, boss: httpx.AsyncClient):
    code = (await boss.post("/api/v1/page/links")).json()["url"].partition("#in=")[2]
    entered = (await boss.post("/api/v1/page/visits", json={"code": code})).json()
    assert abs(entered["expires"] - time.time() - 12 * 3600) < 60
    acts = (await boss.get("/api/v1/audit")).json()["acts"]
    assert [(act["actor"], act["action"]) for act in acts[1:]] == [("page", "entered")]
    assert entered["key"] not in str(acts)


async def test_the_page_gets_all_sections_until_too_many_pages_are_open(
    port: Port, boss: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    live = await boss.get("/api/v1/live")
    assert live.headers["content-type"].startswith("text/event-stream")
    assert live.headers["cache-control"] == "no-cache" or "no-store" in live.headers["cache-control"]
    assert {"status", "nodes", "models"} <= {line[7:] for line in live.text.splitlines() if line.startswith("event: ")}
    monkeypatch.setattr(live_stream, "MAX_VIEWERS", 0)
    full = await boss.get("/api/v1/live")
    assert (full.status_code, full.json()["error"]["code"], full.headers["retry-after"]) == (
        503,
        "too_many_viewers",
        "5",
    )

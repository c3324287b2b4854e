"""Join tokens and machines that wait for approval, through the API of the coordinator."""

import asyncio
import time

import httpx
import pytest

from coordinator.api.qr import build_qr_matrix
from coordinator.joining.join_approvals import ApprovalDecision, ApprovalRequest, WaitingNode
from tests.support.cluster.cluster_port import Port
from tests.support.cluster.enrolment import HARDWARE
from wire.join_token import JoinToken, parse_token


async def test_a_token_is_shown_once_listed_without_its_secret_and_revoked(port: Port, boss: httpx.AsyncClient):
    created = (await boss.post("/api/v1/tokens", json={"ttl_seconds": 60.0, "uses": 3, "name": "for the lab"})).json()
    assert isinstance(parse_token(created["token"]), JoinToken)
    assert created["token"] in created["join"]
    assert set("".join(created["qr"])) == {"0", "1"}
    assert len({len(row) for row in created["qr"]} | {len(created["qr"])}) == 1, "a square"
    assert created["qr"] == build_qr_matrix(created["join"])
    (row,) = (await boss.get("/api/v1/tokens")).json()["tokens"]
    assert (row["name"], row["uses_left"]) == ("for the lab", 3)
    assert abs(row["expires"] - time.time() - 60) < 30
    assert created["token"] not in (await boss.get("/api/v1/tokens")).text
    assert (await boss.delete(f"/api/v1/tokens/{row['id']}")).json() == {"schema": 1, "id": row["id"]}
    assert (await boss.get("/api/v1/tokens")).json()["tokens"] == []
    again = await boss.delete("/api/v1/tokens/unknown")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "token_not_found")


async def test_a_token_without_properties_admits_one_machine_for_an_hour(port: Port, boss: httpx.AsyncClient):
    await boss.post("/api/v1/tokens", json={})
    (row,) = (await boss.get("/api/v1/tokens")).json()["tokens"]
    assert (row["name"], row["uses_left"], row["expires"] - row["created"]) == ("", 1, 3600.0)


async def test_a_token_and_its_revocation_are_answered_once_they_are_on_the_disk(
    port: Port, boss: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    flushed, flush = list[int](), port.application.store.flush

    async def record() -> None:
        await flush()
        flushed.append(len(port.application.admin.list_tokens()["tokens"]))

    monkeypatch.setattr(port.application.store, "flush", record)
    await boss.post("/api/v1/tokens", json={})
    (row,) = (await boss.get("/api/v1/tokens")).json()["tokens"]
    assert flushed == [1]
    await boss.delete(f"/api/v1/tokens/{row['id']}")
    assert flushed == [1, 0]


def enqueue(port: Port, code: str, name: str, replaces: str = "") -> ApprovalRequest:
    now = asyncio.get_running_loop().time()
    request = port.application.approvals.enqueue(
        WaitingNode(code, name, f"machine of {name}", HARDWARE, "10.0.0.7", now + 60, replaces), now
    )
    assert isinstance(request, ApprovalRequest)
    return request


async def test_waiting_machines_are_listed_without_codes_and_decided_by_code(port: Port, boss: httpx.AsyncClient):
    first, second = enqueue(port, "111-111", "studio", replaces="old"), enqueue(port, "222-222", "mini")
    listed = await boss.get("/api/v1/joins")
    row = {"address": "10.0.0.7", "chip": "M4 Max"}
    assert listed.json()["joins"] == [
        {"name": "studio", "replaces": "old", **row},
        {"name": "mini", "replaces": "", **row},
    ]
    assert "111-111" not in listed.text
    approved = await boss.post("/api/v1/joins/111-111")
    assert approved.json() == {"schema": 1, "name": "studio", "decision": "approved"}
    rejected = await boss.delete("/api/v1/joins/222-222")
    assert rejected.json() == {"schema": 1, "name": "mini", "decision": "rejected"}
    assert (first.decision, second.decision) == (ApprovalDecision.APPROVED, ApprovalDecision.REJECTED)
    assert (await boss.get("/api/v1/joins")).json()["joins"] == []
    acts = (await boss.get("/api/v1/audit")).json()["acts"]
    subjects = [(act["action"], act["subject"]) for act in acts]
    assert subjects == [("approve", "111-111 studio"), ("reject", "222-222 mini")]


async def test_wrong_codes_are_a_404_and_then_lock_decisions(port: Port, boss: httpx.AsyncClient):
    request = enqueue(port, "111-111", "studio")
    for method in ("POST", "DELETE"):
        answer = await boss.request(method, "/api/v1/joins/999-999")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "code_not_found")
    for code in ("999-999", "111-111"):
        answer = await boss.post(f"/api/v1/joins/{code}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_wrong_codes")
        assert 50 <= int(answer.headers["retry-after"]) <= 60
    assert request.decision is None

"""Status, version, conditions and load of the pool, and the addresses in links to it."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.alerts.rules import WATCHED
from tests.support.cluster.application import application
from tests.support.cluster.cluster_port import Port, a_report
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.frames import Finished, Generate
from wire.identity import PROTOCOL

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}

ROUTES = (("GET", "/api/v1/status"), ("POST", "/api/v1/tokens"), ("POST", "/api/v1/page/links"))


async def test_status_join_line_and_sign_in_link_have_the_current_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    addresses = list[str]()
    monkeypatch.setattr("coordinator.http.listen.list_addresses", lambda: addresses)
    async with application(tmp_path, host="0.0.0.0") as made:
        key = made.admin.create_key("boss", ["admin"], None)["key"]
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(made.app), base_url="http://pool", headers={"Authorization": f"Bearer {key}"}
        ) as client:
            for host in ("127.0.0.1", "10.0.0.7", "192.168.1.5"):
                addresses[:] = [] if host == "127.0.0.1" else [host]
                status, token, link = [
                    (await client.request(method, path, json={} if "tokens" in path else None)).json()
                    for method, path in ROUTES
                ]
                assert status["base_url"] == f"http://{host}:8080/v1"
                assert status["cluster_url"] == f"macpool://{host}:8081"
                assert f" cluster join macpool://{host}:8081 " in token["join"]
                assert link["url"].startswith(f"http://{host}:8080/#in=")


async def test_status_counts_nodes_models_and_requests(port: Port, boss: httpx.AsyncClient):
    before = (await boss.get("/api/v1/status")).json()
    assert (before["nodes"]["ready"], before["models"], before["in_flight"], before["queued"]) == (0, [], 0, 0)
    one, two, three = (port.member(name) for name in ("one", "two", "three"))
    line = await port.link(one, a_report(models=(a_model("zeta"), a_model("tiny"))))
    await port.link(two, a_report(models=(a_model("tiny"),), memory=a_memory(guard=False)))
    await port.until(lambda: {port.state(one), port.state(two)} == {"ready"})
    port.application.nodes.administration.set_cordoned(two.node, on=True)
    port.application.nodes.administration.remove_node(three.node)
    async with port.client("infer") as client:
        chats = [
            asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"model": model}))
            for model in ("tiny", "zeta")
        ]
        asked = [await line.until(Generate) for _ in chats]
        status = (await boss.get("/api/v1/status")).json()
        for order in asked:
            line.send(Finished(order.request, ("stop",), 3, 1))
        await asyncio.gather(*chats)
    assert {state: count for state, count in status["nodes"].items() if count} == {"ready": 2, "left": 1}
    assert (status["models"], status["in_flight"], status["queued"]) == (["tiny", "zeta"], 2, 0)
    assert (status["version"], status["protocol"], status["epoch"]) == ("0", PROTOCOL, 1)
    assert status["cluster"] == {"id": port.application.authority.cluster, "name": "home"}
    assert (status["self_suspect"], status["conditions"]) == (False, [])
    (danger,) = status["dangers"]
    assert danger.startswith("two: ")
    assert danger in status["warnings"]


async def test_conditions_are_listed_with_the_names_of_all_rules(port: Port, boss: httpx.AsyncClient):
    answer = (await boss.get("/api/v1/conditions")).json()
    assert answer == {"schema": 1, "conditions": [], "watched": [rule.name for rule in WATCHED]}


async def test_version_has_the_time_of_the_coordinator(boss: httpx.AsyncClient):
    answer = (await boss.get("/api/v1/version")).json()
    assert abs(answer.pop("time") - time.time()) < 30
    assert answer == {"schema": 1, "version": "0", "protocol": PROTOCOL}


async def test_an_endpoint_without_its_own_authority_has_no_certificate(boss: httpx.AsyncClient):
    answer = await boss.get("/api/v1/ca.pem")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_authority")
    assert (await boss.get("/api/v1/settings")).json() == {"schema": 1, "settings": []}


@pytest.mark.parametrize(("points", "status"), [(0, 400), (1, 200), (360, 200), (361, 400)])
async def test_history_has_at_most_the_points_of_an_hour(boss: httpx.AsyncClient, points: int, status: int):
    answer = await boss.get("/api/v1/history", params={"points": points})
    assert answer.status_code == status
    assert (answer.json()["error"]["param"] if status == 400 else answer.json()["number"]) in ("points", -1)

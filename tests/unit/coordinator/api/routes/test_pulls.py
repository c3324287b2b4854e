"""Pulls and orders about model files through the API of the coordinator, with nodes on real links."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from coordinator.models.hub_client import HubClient
from coordinator.models.pull_controller import MAX_OPEN_PULLS
from coordinator.models.settings import HubSettings
from node.agent.identity import NodeIdentity
from tests.support.cluster.cluster_port import Line, Port, a_report
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.frames import (
    CancelModelOrder,
    ModelOrderCode,
    ModelOrderEnded,
    ModelOrderPhase,
    ModelOrderProgress,
    PullModel,
    RemoveModel,
    VerifyModel,
)
from wire.machine import Disk
from wire.models.files import ModelFile, ModelManifest
from wire.models.hub_query import HubAnswer, HubRefusal, ModelPrediction, SkippedFile
from wire.report import KvParameters
from wire.units import GIB, MIB

REPO = "publisher/big-model"
MANIFEST = ModelManifest(
    REPO, "c" * 40, (ModelFile("config.json", 5, "a" * 64), ModelFile("w.safetensors", GIB, "b" * 64))
)
PREDICTION = ModelPrediction(
    architecture="qwen3", quantization="4-bit", weights=GIB, context=8192, kv=KvParameters(MIB // 64)
)
ANSWER = HubAnswer(manifest=MANIFEST, model=PREDICTION, skipped=(SkippedFile("a.bin", 7), SkippedFile("b.bin", 8)))


def say(port: Port, answer: HubAnswer | HubRefusal) -> None:
    """Make the child process of a query of the hub print this answer."""
    text = msgspec.json.encode(answer).decode()
    port.application.pulls.hub = HubClient(HubSettings(), (sys.executable, "-c", f"print({text!r})"))


async def node(port: Port, name: str, free: int = 100 * GIB) -> tuple[NodeIdentity, Line]:
    """Link a node with 20 GiB of headroom and the loaded model `tiny`."""
    who = port.member(name)
    line = await port.link(who, a_report(memory=a_memory(20 * GIB), disk=Disk(free, 500 * GIB, "/cache")))
    await port.until(lambda: port.state(who) == "ready")
    return who, line


async def start(boss: httpx.AsyncClient, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = await boss.post("/api/v1/pulls", json={"repo": REPO, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_plan_has_the_model_and_every_node_and_starts_nothing(port: Port, boss: httpx.AsyncClient):
    say(port, ANSWER)
    who, _ = await node(port, "studio")
    await node(port, "full", free=2 * GIB)
    found = await start(boss, dry_run=True)
    nodes = {row["name"]: row for row in found.pop("nodes")}
    assert found == {
        "schema": 1,
        "repo": REPO,
        "revision": "main",
        "commit": "c" * 40,
        "size": GIB + 5,
        "files": 2,
        "skipped": {"files": 2, "size": 15},
        "model": {
            "architecture": "qwen3",
            "quantization": "4-bit",
            "weights": GIB,
            "kv_per_token": MIB // 64,
            "context": 8192,
        },
    }
    assert (nodes["studio"]["id"], nodes["studio"]["chosen"], nodes["full"]["chosen"]) == (who.node, True, False)
    assert "of disk" in nodes["full"]["reason"]
    assert (await boss.get("/api/v1/pulls")).json() == {"schema": 1, "pulls": []}


async def test_a_pull_is_started_followed_and_cancelled(port: Port, boss: httpx.AsyncClient):
    say(port, ANSWER)
    _, line = await node(port, "studio")
    pull = (await start(boss))["pull"]
    assert (pull["state"], pull["size"], [row["name"] for row in pull["nodes"]]) == ("pulling", GIB + 5, ["studio"])
    order = await line.until(PullModel)
    assert order.manifest == MANIFEST
    line.send(ModelOrderProgress(order.order, ModelOrderPhase.DOWNLOADING, 10, 20, speed=5.0))
    path = f"/api/v1/pulls/{pull['id']}"
    controller = port.application.pulls
    await port.until(lambda: next(iter(controller.pulls[pull["id"]].state.nodes.values())).done == 10)
    row = (await boss.get(path)).json()["pull"]["nodes"][0]
    assert (row["done"], row["total"], row["seconds_left"]) == (10, 20, 2.0)
    assert (await start(boss))["pull"]["id"] == pull["id"], "the same files to the same nodes"
    cancelled = (await boss.delete(path)).json()["pull"]
    assert cancelled["state"] == "cancelled"
    assert (await line.until(CancelModelOrder)).order == order.order
    again = await boss.delete(path)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "pull_ended")
    assert [one["id"] for one in (await boss.get("/api/v1/pulls")).json()["pulls"]] == [pull["id"]]


async def test_a_pull_has_the_wanted_revision_and_its_actor(port: Port, boss: httpx.AsyncClient):
    named = msgspec.structs.replace(ANSWER, manifest=msgspec.structs.replace(MANIFEST, revision="WANTED"))
    text = msgspec.json.encode(named).decode()
    program = f"import json, sys; print({text!r}.replace('WANTED', json.load(sys.stdin)['revision']))"
    port.application.pulls.hub = HubClient(HubSettings(), (sys.executable, "-c", program))
    await node(port, "studio")
    found = await start(boss, revision="v2.1")
    (key,) = port.application.store.keys
    assert (found["revision"], found["pull"]["revision"], found["pull"]["actor"]) == ("v2.1", "v2.1", key)


async def test_audit_log_names_the_model_of_a_pull_and_the_started_pull(port: Port, boss: httpx.AsyncClient):
    say(port, ANSWER)
    await node(port, "studio")
    await start(boss, dry_run=True)
    pull = (await start(boss))["pull"]["id"]
    await boss.delete(f"/api/v1/pulls/{pull}")
    acts = (await boss.get("/api/v1/audit")).json()["acts"]
    assert [(act["action"], act["subject"]) for act in acts] == [
        ("pull", REPO),
        ("pull", f"{REPO} {pull}"),
        ("pull_cancel", pull),
    ]


async def test_pulls_are_listed_the_newest_first(port: Port, boss: httpx.AsyncClient):
    await node(port, "studio")
    made: list[str] = []
    for digit in "abc":
        say(port, msgspec.structs.replace(ANSWER, manifest=msgspec.structs.replace(MANIFEST, commit=digit * 40)))
        made.append((await start(boss))["pull"]["id"])
    assert [row["id"] for row in (await boss.get("/api/v1/pulls")).json()["pulls"]] == made[::-1]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_an_unknown_pull_is_a_404(boss: httpx.AsyncClient, method: str):
    answer = await boss.request(method, "/api/v1/pulls/pull-0123456789ab")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "pull_not_found")


async def test_named_nodes_get_the_model_and_all_includes_absent_ones(port: Port, boss: httpx.AsyncClient):
    say(port, ANSWER)
    await node(port, "studio")
    away, line = await node(port, "mini")
    found = await start(boss, nodes=["mini"], dry_run=True)
    assert {row["name"]: row["chosen"] for row in found["nodes"]} == {"studio": False, "mini": True}
    line.close()
    await port.until(lambda: port.state(away) != "ready")
    auto, everyone = await start(boss, dry_run=True), await start(boss, dry_run=True, all=True)
    assert {row["name"]: row["chosen"] for row in auto["nodes"]} == {"studio": True, "mini": False}
    assert {row["name"]: row["chosen"] for row in everyone["nodes"]} == {"studio": True, "mini": True}
    assert (await start(boss, 400, nodes=["mini"], all=True))["error"]["param"] == "nodes"
    assert (await start(boss, 404, nodes=["nowhere"]))["error"]["code"] == "node_not_found"


async def test_a_pull_that_no_node_can_hold_is_a_507_with_every_reason(port: Port, boss: httpx.AsyncClient):
    files = (*MANIFEST.files, ModelFile("vision.safetensors", GIB, "d" * 64))
    say(port, msgspec.structs.replace(ANSWER, manifest=msgspec.structs.replace(MANIFEST, files=files)))
    await node(port, "full", free=2 * GIB)
    error = (await start(boss, 507))["error"]
    assert error["code"] == "no_node"
    assert "full: needs 2.0 GiB of disk, has 2.0 GiB free" in error["message"]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ModelOrderCode.NOT_FOUND, 404),
        (ModelOrderCode.GATED, 403),
        (ModelOrderCode.RATE_LIMITED, 429),
        (ModelOrderCode.SOURCE_LOST, 502),
        (ModelOrderCode.INVALID, 400),
        (ModelOrderCode.FAILED, 500),
    ],
)
async def test_a_refusal_of_the_hub_has_the_status_of_its_code(
    port: Port, boss: httpx.AsyncClient, code: ModelOrderCode, status: int
):
    say(port, HubRefusal(code=code, message="accept its terms", retry_after=7.0))
    answer = await boss.post("/api/v1/pulls", json={"repo": REPO})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["message"]) == (status, code.value, "accept its terms")
    assert answer.headers["retry-after"] == "7"


async def test_a_model_that_cannot_be_served_and_too_many_pulls_are_refused(port: Port, boss: httpx.AsyncClient):
    await node(port, "studio")
    say(port, msgspec.structs.replace(ANSWER, model=ModelPrediction(cause="its code is not supported")))
    error = (await start(boss, 400))["error"]
    assert (error["code"], error["param"]) == ("unsupported_model", "repo")
    assert "its code is not supported" in error["message"]
    (who,) = port.application.registry.pool.members
    for digit in range(MAX_OPEN_PULLS):
        manifest = msgspec.structs.replace(MANIFEST, commit=f"{digit:040x}")
        port.application.pulls.start_pull(manifest, (who,), "key")
    say(port, ANSWER)
    assert (await start(boss, 429))["error"]["code"] == "too_many_pulls"


async def test_a_pull_that_cannot_be_stored_is_a_507(port: Port, boss: httpx.AsyncClient, tmp_path: Path):
    say(port, ANSWER)
    await node(port, "studio")
    (tmp_path / "state" / "pulls").write_text("in the way")
    error = (await start(boss, 507))["error"]
    assert error["code"] == "disk_full"
    assert "cannot be stored on the coordinator's disk" in error["message"]
    assert (await boss.get("/api/v1/pulls")).json()["pulls"] == []


@pytest.mark.parametrize(("path", "kind"), [("verify", VerifyModel), ("remove", RemoveModel)])
async def test_an_order_about_files_is_answered_with_its_end(
    port: Port, boss: httpx.AsyncClient, path: str, kind: type[VerifyModel | RemoveModel]
):
    who, line = await node(port, "studio")
    for code, status in (
        (ModelOrderCode.COMPLETED, 200),
        (ModelOrderCode.IN_USE, 409),
        (ModelOrderCode.CONTENT_MISMATCH, 409),
        (ModelOrderCode.NOT_FOUND, 404),
        (ModelOrderCode.DISK_FULL, 507),
        (ModelOrderCode.FAILED, 500),
    ):
        asking = asyncio.create_task(
            boss.post(f"/api/v1/models/{path}", json={"model": a_model().name, "node": "studio"})
        )
        order = await line.until(kind)
        assert order.model == a_model().name
        line.send(ModelOrderEnded(order.order, code, "as it is", content="c1", freed=7))
        answer = await asking
        assert answer.status_code == status
        if status == 200:
            assert answer.json() == {
                "schema": 1,
                "model": "tiny",
                "node": {"id": who.node, "name": "studio"},
                "content": "c1",
                "freed": 7,
                "message": "as it is",
            }
        else:
            assert answer.json()["error"]["code"] == code.value
            assert answer.json()["error"]["message"] == "studio: as it is"


async def test_an_incomplete_download_is_removed_by_a_node_that_can_pull(port: Port, boss: httpx.AsyncClient):
    _, line = await node(port, "studio")
    body = {"model": REPO, "node": "studio"}
    removing = asyncio.create_task(boss.post("/api/v1/models/remove", json=body))
    order = await line.until(RemoveModel)
    assert order.model == REPO
    line.send(ModelOrderEnded(order.order, ModelOrderCode.COMPLETED, freed=7))
    answer = await removing
    assert (answer.status_code, answer.json()["freed"]) == (200, 7)
    old = port.member("old")
    await port.link(old, a_report(memory=a_memory(20 * GIB)))
    await port.until(lambda: port.state(old) == "ready")
    answer = await boss.post("/api/v1/models/remove", json={**body, "node": "old"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_an_order_about_files_needs_a_linked_node_with_the_model(port: Port, boss: httpx.AsyncClient):
    who, line = await node(port, "studio")

    async def refused(model: str, name: str = "studio") -> tuple[int, str]:
        answer = await boss.post("/api/v1/models/verify", json={"model": model, "node": name})
        return answer.status_code, answer.json()["error"]["code"]

    assert await refused("other") == (404, "model_not_found")
    assert await refused("tiny", "nowhere") == (404, "node_not_found")
    assert (await refused("bad\nname"))[0] == 400
    line.close()
    await port.until(lambda: port.state(who) != "ready")
    assert await refused("tiny") == (409, "node_away")

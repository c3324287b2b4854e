"""Values on the page and in `cluster status`, while a pool answers, queues, refuses and loses a Mac."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.api.live_snapshot import MAX_ENDED_PULLS_SHOWN, MAX_REQUESTS_SHOWN
from coordinator.api.routes.requests import MIN_DECODE_SECONDS
from coordinator.models.wishes import Wish
from router.admission.rate_limits import KeyLimits
from tests.support.cluster.cluster_port import Line, Port, a_report, opened
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.frames import (
    Admitted,
    Delta,
    Deltas,
    Finished,
    Generate,
    ModelOrderCode,
    ModelOrderEnded,
    ModelOrderPhase,
    ModelOrderProgress,
    PullModel,
)
from wire.models.files import ModelFile, ModelManifest
from wire.node_state import NodeState
from wire.report import EngineState
from wire.units import MIB

MANIFEST = ModelManifest("lab/tiny", "c" * 40, (ModelFile("model.safetensors", 8 * MIB, "a" * 64),))
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with opened(tmp_path) as made:
        yield made


async def sections(port: Port) -> dict[str, Any]:
    """Return the current sections of an open page."""
    async with port.client("admin") as client:
        text = (await client.get("/api/v1/live")).raise_for_status().text
    found: dict[str, Any] = {}
    for event in filter(None, text.split("\n\n")):
        name, data = event.split("\n")
        found[name.removeprefix("event: ")] = json.loads(data.removeprefix("data: "))
    return found


def ask(client: httpx.AsyncClient, name: str, **more: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | more, headers={"x-request-id": name}))


async def linked(port: Port, name: str, **report: Any) -> Line:
    who = port.member(name)
    line = await port.link(who, a_report(**report))
    await port.until(lambda: port.state(who) == "ready")
    return line


async def test_a_request_under_way_and_its_end_are_listed_with_their_numbers(port: Port):
    line = await linked(port, "one")
    key = port.application.admin.create_key("laptop", ["infer"], None)
    async with port.client_of(key["key"]) as client:
        running = ask(client, "r1")
        asked = await line.until(Generate)
        line.send(Admitted(asked.request, 7, 3), Deltas((Delta(asked.request, 0, (1, 2), ((0, "hi"),)),)))
        await port.until(lambda: port.application.dispatcher.counters.first_tokens)
        told = await sections(port)
        (row,) = told["requests"]
        assert abs(row.pop("at") - time.time()) < 60
        assert row.pop("phase")
        assert row == {
            "id": "r1",
            "key": "laptop",
            "model": "tiny",
            "node": "one",
            "prompt_tokens": 7,
            "cached_tokens": 3,
            "completion_tokens": 2,
            "attempts": 1,
            "stream": False,
        }
        assert (told["status"]["in_flight"], told["status"]["queued"], told["ended"]) == (1, 0, [])
        assert told["nodes"][0]["in_flight"] == 1
        line.send(Finished(asked.request, ("stop",), 7, 2, cached_tokens=3))
        assert (await running).status_code == 200
    told = await sections(port)
    (row,) = told["ended"]
    assert abs(row.pop("at") - time.time()) < 60
    assert 0 <= row.pop("ttft_seconds") <= row.pop("seconds") < 30
    speed = row.pop("tokens_per_second")
    assert speed is None or 0 < speed <= 1 / MIN_DECODE_SECONDS, "only a busy machine has a speed of two tokens"
    assert row == {
        "request_id": "r1",
        "key": "laptop",
        "model": "tiny",
        "node": "one",
        "outcome": "ok",
        "message": "",
        "prompt_tokens": 7,
        "cached_tokens": 3,
        "completion_tokens": 2,
    }
    assert (told["status"]["in_flight"], told["requests"], told["nodes"][0]["in_flight"]) == (0, [], 0)
    port.application.admin.revoke_key(key["id"])
    assert (await sections(port))["ended"][0]["key"] == f"{key['id']} (ended)"


async def test_snapshot_has_the_oldest_open_requests(port: Port):
    line = await linked(port, "one", memory=a_memory(1024))
    key = port.application.admin.create_key("batch", ["infer"], None, KeyLimits(waiting=100))["key"]
    async with port.client_of(key) as client:
        running = list[asyncio.Task[httpx.Response]]()
        for number in range(MAX_REQUESTS_SHOWN + 1):
            running.append(ask(client, f"r{number}"))
            await port.until(lambda: port.application.dispatcher.count_queued() == len(running))
        told = await sections(port)
        assert [row["id"] for row in told["requests"]] == [f"r{number}" for number in range(MAX_REQUESTS_SHOWN)]
        assert told["status"]["queued"] == len(running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    line.close()


async def test_status_has_the_requests_of_all_nodes_and_the_seconds_since_the_start(port: Port):
    lines = [await linked(port, name, models=(a_model(f"model-{name}"),)) for name in ("one", "two")]
    async with port.client("infer") as client:
        running = [ask(client, name, model=f"model-{name}") for name in ("one", "two")]
        for line in lines:
            asked = await line.until(Generate)
            line.send(Admitted(asked.request, 7))
        before = time.monotonic()
        async with port.client("metrics") as observer:
            status = (await observer.get("/api/v1/status")).json()
        assert status["in_flight"] == 2
        rounding = 0.0005
        assert before - rounding <= status["uptime_seconds"] <= time.monotonic() + rounding
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_snapshot_has_waiting_requests_and_reasons_of_ended_ones(port: Port):
    line = await linked(port, "one", memory=a_memory(1024))
    async with port.client("infer") as client:
        running = ask(client, "r1")
        await port.until(lambda: port.application.dispatcher.count_queued() == 1)
        told = await sections(port)
        assert [(row["id"], row["phase"], row["node"], row["attempts"]) for row in told["requests"]] == [
            ("r1", "queued", "", 0),
        ]
        assert (told["status"]["in_flight"], told["status"]["queued"]) == (0, 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await port.until(lambda: port.application.dispatcher.count_queued() == 0)
        answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "nothing"})
    assert answer.status_code == 404
    told = await sections(port)
    assert [(row["model"], row["outcome"]) for row in told["ended"]] == [
        ("tiny", "cancelled"),
        ("nothing", "model_not_found"),
    ]
    assert "nothing" in told["ended"][1]["message"]
    line.close()


async def test_status_counts_nodes_models_warnings_and_names_the_pool(port: Port):
    await linked(port, "one", models=(a_model("qwen"), a_model("broken", loaded=False, cause="no such file")))
    two = port.member("two")
    port.member("never")
    second = await port.link(two, a_report(models=(a_model("tiny", loaded=False), a_model("qwen"))))
    await port.until(lambda: port.state(two) == "ready")
    second.send(a_report(2, engine=EngineState("mlx", "hung", "no step")))
    await port.until(port.application.nodes.directory.list_warnings)
    told = (await sections(port))["status"]
    assert {state: count for state, count in told["nodes"].items() if count} == {"ready": 2, "joining": 1}
    assert told["models"] == ["qwen", "tiny"], "what can be loaded counts, what failed does not"
    assert (told["warnings"], told["dangers"]) == (["two: its engine is hung: no step"], [])
    assert told["cluster"] == {"id": port.application.authority.cluster, "name": "home"}
    facts = ("version", "epoch", "base_url", "cluster_url", "self_suspect", "conditions")
    assert [told[name] for name in facts] == [
        "0",
        1,
        "http://127.0.0.1:8080/v1",
        "macpool://127.0.0.1:8081",
        False,
        [],
    ]
    assert "uptime_seconds" not in told, "it would change at every look"
    whole = await port.get("/api/v1/status")
    assert whole["uptime_seconds"] > 0


async def test_snapshot_models_have_their_state_on_each_node(port: Port):
    models = (
        a_model("qwen", weights=17, context=99, prefill_speed=1234.5, decode_speed=67.8, fingerprint="f1"),
        a_model("llama", loaded=False, loading=True, progress=0.25),
    )
    await linked(port, "one", models=models)
    await linked(port, "two", models=(a_model("qwen", loaded=False, fingerprint="f2"),))
    told = {row["name"]: row for row in (await sections(port))["models"]}
    assert list(told) == ["llama", "qwen"]
    qwen = told["qwen"]
    assert (qwen["weights"], qwen["context"], qwen["fingerprint"], qwen["conflict"]) == (17, 99, "f1", True)
    first, second = qwen["nodes"]
    assert (first["name"], first["state"], first["model"], first["fingerprint"]) == ("one", "ready", "loaded", "f1")
    assert (first["prefill_speed"], first["decode_speed"]) == (1234.5, 67.8)
    assert (second["name"], second["model"], second["fingerprint"]) == ("two", "known", "f2")
    assert (told["llama"]["nodes"][0]["model"], told["llama"]["nodes"][0]["progress"]) == ("loading", 0.25)
    assert not told["llama"]["conflict"]


async def test_pulls_are_sent_only_when_they_changed_and_without_the_name_of_an_administrator(port: Port):
    line = await linked(port, "one")
    (node,), pulls = port.application.registry.pool.members, port.application.pulls
    record = pulls.start_pull(MANIFEST, (node,), "ann")
    order = (await line.until(PullModel)).order
    line.send(ModelOrderProgress(order, ModelOrderPhase.DOWNLOADING, 2 * MIB, 8 * MIB, 1.0 * MIB))
    await port.until(lambda: pulls.pulls[record.id].state.nodes[node].done)
    told = await sections(port)
    (row,) = told["pulls"]
    assert "actor" not in row
    assert [row[name] for name in ("id", "repo", "commit", "state", "ended")] == [
        record.id,
        "lab/tiny",
        "c" * 40,
        "pulling",
        None,
    ]
    (on_node,) = row["nodes"]
    shown = ("name", "state", "source", "done", "total", "speed", "seconds_left")
    assert [on_node[name] for name in shown] == ["one", "pulling", "hub", 2 * MIB, 8 * MIB, MIB, 6.0]
    assert (await sections(port))["pulls"] == told["pulls"], "an unchanged pull is not sent again"
    line.send(ModelOrderEnded(order, ModelOrderCode.GATED, "lab/tiny needs a token"))
    await port.until(lambda: pulls.pulls[record.id].ended)
    (row,) = (await sections(port))["pulls"]
    assert (row["state"], row["nodes"][0]["message"]) == ("failed", "lab/tiny needs a token")


async def test_the_newest_pulls_are_sent_and_every_open_one(port: Port):
    pulls, away = port.application.pulls, port.member("away").node
    opened = pulls.start_pull(MANIFEST, (away,), "ann").id
    ended = list[str]()
    for number in range(MAX_ENDED_PULLS_SHOWN + 2):
        manifest = ModelManifest(f"lab/tiny-{number}", "c" * 40, MANIFEST.files)
        ended.append(pulls.start_pull(manifest, (away,), "ann").id)
        assert pulls.cancel_pull(ended[-1])
    shown = [row["id"] for row in (await sections(port))["pulls"]]
    assert shown == [*reversed(ended[2:]), opened]


async def test_wishes_are_sent_with_their_nodes_and_the_missing_number(port: Port):
    assert (await sections(port))["wishes"] == []
    await linked(port, "one", models=(a_model("qwen"),))
    port.application.store.wishes.put(Wish("qwen", 2))
    (row,) = (await sections(port))["wishes"]
    assert "needs 2 nodes, the pool has 1" in row.pop("missing")
    assert row == {
        "model": "qwen",
        "replicas": 2,
        "wanted": 2,
        "met": False,
        "ready": ["one"],
        "loading": [],
        "away": [],
    }


async def test_snapshot_has_reason_and_end_of_an_open_breaker(port: Port):
    await linked(port, "one")
    made = port.application
    (node,), now = made.registry.pool.members, made.dispatcher.get_time()
    closed = {"state": "closed", "why": "", "until": None, "opened": 0}
    assert (await sections(port))["nodes"][0]["breaker"] == closed
    for at in range(3):
        made.dispatcher.breakers.record_fault(node, at, now - 4.0 + 2.0 * at, f"signal {at}")
    found = (await sections(port))["nodes"][0]["breaker"]
    assert abs(found.pop("until") - (time.time() + 5.0)) <= 2
    assert found == {"state": "open", "why": "signal 2", "opened": 1}


async def test_rows_of_nodes_on_the_page_have_the_names_of_loaded_models_only(port: Port):
    """The page gets the rows twice a second, because the memory of nodes changes."""
    await linked(port, "one", models=(a_model("qwen"), a_model("llama", loaded=False)))
    found = await sections(port)
    assert found["nodes"][0]["models"] == [{"name": "qwen", "loaded": True}]
    assert [row["name"] for row in found["models"]] == ["llama", "qwen"]


async def test_a_node_that_cannot_be_paused_is_named_also_if_the_request_has_its_id(port: Port):
    line = await linked(port, "studio")
    (node,) = port.application.registry.pool.members
    line.close()
    await port.until(lambda: port.application.registry.pool.members[node].state == NodeState.LOST)
    async with port.client("admin") as client:
        answer = await client.post(f"/api/v1/nodes/{node}/pause", json={})
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].startswith("studio: ")


async def test_verbs_of_a_node_change_it_and_are_on_the_disk_when_they_answer(port: Port):
    line = await linked(port, "one")
    (node,) = port.application.registry.pool.members
    store = port.application.store
    async with port.client("admin") as client:
        for verb, name, value in (
            ("cordon", "cordoned", True),
            ("uncordon", "cordoned", False),
            ("allow-video", "video", True),
            ("deny-video", "video", False),
            ("drain", "cordoned", True),
        ):
            body = {"wait_seconds": 0} if verb == "drain" else None
            answer = await client.post(f"/api/v1/nodes/one/{verb}", json=body)
            assert answer.status_code == 200, answer.text
            assert getattr(store.members[node], name) is value, verb
        assert answer.json() == {"schema": 1, "node": node, "cordoned": True, "left": 0}
        answer = await client.put("/api/v1/nodes/one/labels", json={"labels": ["lab", "fast", "lab"]})
        assert store.members[node].labels == ("lab", "fast")
        assert answer.json()["labels"] == ["lab", "fast"]
        answer = await client.delete("/api/v1/nodes/one")
        assert answer.json() == {"schema": 1, "node": node}
        assert store.members[node].removed is not None
        assert (await client.get("/api/v1/nodes/one")).json()["node"]["state"] == "left"
        assert (await client.post("/api/v1/nodes/nothing/cordon")).status_code == 404
    assert await line.ended()
    verbs = ["cordon", "uncordon", "allow_video", "deny_video", "drain", "label", "remove"]
    assert [act.action for act in store.audit] == verbs

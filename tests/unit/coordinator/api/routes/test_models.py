"""Models and commands about them through the API of the coordinator, with nodes on real links."""

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest

from router.admission.rate_limits import KeyLimits
from tests.support.cluster.cluster_port import Line, Port, a_report
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.frames import Cancel, ClearCache, Failed, Finished, Frame, LoadModel, ProfileModel, Refusal, UnloadModel
from wire.identity import NodeId
from wire.refusals import RefusalCode, Refused
from wire.report import Model
from wire.units import GIB

MEASURED = a_model(
    "tiny", profiled=True, max_context=7777, max_batch=3, kv_per_token=5, observed=6, residual=7, covered=8
)


async def node(port: Port, name: str, *models: Model) -> tuple[NodeId, Line]:
    who = port.member(name)
    line = await port.link(who, a_report(models=models, memory=a_memory(8 * GIB)))
    await port.until(lambda: port.state(who) == "ready")
    return who.node, line


def known(**fields: Any) -> Model:
    return a_model("tiny", **{"loaded": False, **fields})


async def command(
    boss: httpx.AsyncClient, verb: str, answers: list[tuple[Line, Any]], kind: type[Any], **body: Any
) -> httpx.Response:
    """Send a command; each line answers the frame of this kind with `make(number)`."""
    asking = asyncio.create_task(boss.post(f"/api/v1/models/{verb}", json={"model": "tiny", **body}))
    for line, make in answers:
        frame = await line.until(kind)
        assert frame.model == "tiny"
        line.send(make(frame.request))
    return await asking


def finish(number: int) -> Frame:
    return Finished(number, (), 0, 0)


def rows(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the rows of the nodes without their times."""
    assert answer.status_code == 200, answer.text
    found = answer.json()
    listed = found["nodes"] if "nodes" in found else [found["node"]]
    for row in listed:
        assert 0.0 <= row.pop("seconds") < 60.0
    return listed


async def test_a_model_is_loaded_on_the_named_node(port: Port, boss: httpx.AsyncClient):
    await node(port, "studio", known())
    mini, line = await node(port, "mini", known())
    answer = await command(boss, "load", [(line, finish)], LoadModel, node="mini")
    assert rows(answer) == [{"id": mini, "name": "mini", "already": False}]


async def test_cached_prompts_are_deleted_on_the_named_node_alone(port: Port, boss: httpx.AsyncClient):
    studio, line = await node(port, "studio", known())
    mini, other = await node(port, "mini", known())
    for body, lines in (({"node": "studio"}, [line]), ({"node": mini, "model": "tiny"}, [other]), ({}, [line, other])):
        asking = asyncio.create_task(boss.post("/api/v1/cache/clear", json=body))
        for one in lines:
            frame = await one.until(ClearCache)
            assert frame.model == body.get("model", "")
            one.send(finish(frame.request))
        answer = (await asking).json()
        ids = {id(line): studio, id(other): mini}
        assert {row["id"] for row in answer["nodes"]} == {ids[id(one)] for one in lines}
        assert answer["model"] == body.get("model")


async def test_a_loaded_model_is_not_loaded_again(port: Port, boss: httpx.AsyncClient):
    studio, _ = await node(port, "studio", known(loaded=True))
    answer = await command(boss, "load", [], LoadModel, node="studio")
    assert rows(answer) == [{"id": studio, "name": "studio", "already": True}]


async def test_a_load_that_fails_has_the_status_and_the_text_of_the_node(port: Port, boss: httpx.AsyncClient):
    _, line = await node(port, "studio", known())
    refused = Refused(RefusalCode.TOO_LARGE, "needs 43.5 GB, this node can give 31.0 GB")
    answer = await command(boss, "load", [(line, lambda number: Refusal(number, refused, None))], LoadModel)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, RefusalCode.TOO_LARGE.value)
    assert "43.5 GB" in answer.json()["error"]["message"]
    failed = await command(
        boss, "load", [(line, lambda number: Failed(number, "engine_died", "it crashed"))], LoadModel, node="studio"
    )
    assert failed.status_code >= 500
    assert "it crashed" in failed.json()["error"]["message"]


async def test_a_model_is_unloaded_from_every_node_that_has_it(port: Port, boss: httpx.AsyncClient):
    studio, first = await node(port, "studio", known(loaded=True))
    mini, second = await node(port, "mini", known(loaded=True))
    await node(port, "other", known())
    answer = await command(boss, "unload", [(first, finish), (second, finish)], UnloadModel)
    assert rows(answer) == [
        {"id": studio, "name": "studio", "already": False},
        {"id": mini, "name": "mini", "already": False},
    ]


async def test_a_fault_of_one_node_names_the_nodes_that_succeeded(port: Port, boss: httpx.AsyncClient):
    _, first = await node(port, "studio", known(loaded=True))
    _, second = await node(port, "mini", known(loaded=True))
    busy = Refused(RefusalCode.NOT_READY, "tiny is in use")
    answers = [(first, finish), (second, lambda number: Refusal(number, busy, None))]
    answer = await command(boss, "unload", answers, UnloadModel)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "mini: tiny is in use; unloaded on studio"


async def test_a_profile_has_the_measured_values(port: Port, boss: httpx.AsyncClient):
    studio, line = await node(port, "studio", known(loaded=True))
    finished = [(line, lambda number: Finished(number, (), 0, 0, measured=MEASURED))]
    (row,) = rows(await command(boss, "profile", finished, ProfileModel))
    assert row == {
        "id": studio,
        "name": "studio",
        "already": False,
        "measured": {
            "max_context": 7777,
            "max_batch": 3,
            "kv_per_token": 5,
            "transient": 6,
            "residual": 7,
            "covered": 8,
        },
    }


async def test_the_models_of_a_removed_node_are_no_models_of_the_cluster(port: Port, boss: httpx.AsyncClient):
    studio, _ = await node(port, "studio", known(loaded=True))
    await node(port, "mini", a_model("small"))

    async def list_names() -> list[list[str]]:
        async with port.client("infer") as client:
            served = (await client.get("/v1/models")).json()["data"]
        rows = (await boss.get("/api/v1/models")).json()["models"]
        return [sorted(one["id"] for one in served), sorted(row["name"] for row in rows)]

    assert await list_names() == [["small", "tiny"]] * 2
    assert (await boss.delete(f"/api/v1/nodes/{studio}")).status_code == 200
    assert await list_names() == [["small"]] * 2
    assert "tiny" not in port.application.registry.build_view().get_models()


async def leave(port: Port, verb: str, left: asyncio.Event) -> None:
    """Send a command about the node `studio`, whose client disconnects at `left`. Return at the end of its handler."""
    body = {"type": "http.request", "body": b'{"model": "tiny", "node": "studio"}'}
    key = port.application.admin.create_key("boss", ["admin"], None)["key"]
    headers = {"host": "127.0.0.1", "authorization": f"Bearer {key}", "content-type": "application/json"}
    scope = {
        "type": "http",
        "method": "POST",
        "scheme": "http",
        "path": f"/api/v1/models/{verb}",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 8080),
    }
    messages = iter([body])

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            await left.wait()
        return message or {"type": "http.disconnect"}

    async def send(_: MutableMapping[str, Any]) -> None:
        assert left.is_set(), "no response before the client has left"

    await port.application.app(scope, receive, send)


async def test_a_measurement_ends_when_its_client_leaves_and_a_load_continues(port: Port):
    _, line = await node(port, "studio", known())
    left = asyncio.Event()
    loading = asyncio.create_task(leave(port, "load", left))
    load = await line.until(LoadModel)
    measuring = asyncio.create_task(leave(port, "profile", left))
    measurement = await line.until(ProfileModel)
    left.set()
    assert (await line.until(Cancel)).request == measurement.request
    await measuring
    assert not loading.done()
    line.send(finish(load.request))
    await loading


@pytest.mark.parametrize("verb", ["load", "unload", "profile"])
async def test_commands_for_unknown_models_and_nodes_are_refused(port: Port, boss: httpx.AsyncClient, verb: str):
    await node(port, "studio", known())
    for body, status, code in (
        ({"model": "bad\nname"}, 400, "invalid_request"),
        ({"model": "tiny", "node": "nowhere"}, 404, "node_not_found"),
        ({"model": "other"}, 404, "model_not_found"),
    ):
        answer = await boss.post(f"/api/v1/models/{verb}", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), body


async def test_models_have_their_state_and_version_on_each_node(port: Port, boss: httpx.AsyncClient):
    used = {"used": 1.5e9, "written": 1.4e9}
    studio, _ = await node(port, "studio", known(loaded=True, prefill_speed=100.04, decode_speed=20.05, **used))
    mini, _ = await node(port, "mini", known(fingerprint="tiny-2", cause="its files are damaged"), known_other())
    found = (await boss.get("/api/v1/models")).json()
    names = [row["name"] for row in found["models"]]
    assert (names, found["aliases"]) == (["other", "tiny"], [])
    tiny = found["models"][1]
    assert (tiny["kind"], tiny["weights"], tiny["context"], tiny["fingerprint"]) == ("chat", GIB, 4096, "tiny-1")
    loaded, damaged = tiny["nodes"]
    assert (loaded["id"], loaded["name"], loaded["state"]) == (studio, "studio", "ready")
    assert (loaded["model"], loaded["progress"], loaded["identity"]) == ("loaded", 1.0, "sampled")
    assert (loaded["prefill_speed"], loaded["decode_speed"]) == (100.0, 20.1)
    assert (loaded["measured"], loaded["benchmark"]) == (None, None)
    assert (loaded["used"], loaded["written"], damaged["written"]) == (1.5e9, 1.4e9, 0.0)
    assert (damaged["id"], damaged["model"], damaged["cause"]) == (mini, "failed", "its files are damaged")
    assert damaged["identity"] != loaded["identity"]


async def test_models_that_differ_between_nodes_are_in_conflict(port: Port, boss: httpx.AsyncClient):
    await node(port, "one", known(content="c1", removable=True), known_other())
    await node(port, "two", known(fingerprint="tiny-2", content="c2", stored=5, quantization="8-bit"))
    rows = {row["name"]: row for row in (await boss.get("/api/v1/models")).json()["models"]}
    assert {name: row["conflict"] for name, row in rows.items()} == {"tiny": True, "other": False}
    fields = ("name", "fingerprint", "content", "removable", "stored", "quantization")
    assert [tuple(place[field] for field in fields) for place in rows["tiny"]["nodes"]] == [
        ("one", "tiny-1", "c1", True, 0, ""),
        ("two", "tiny-2", "c2", False, 5, "8-bit"),
    ]
    assert rows["tiny"]["content"] in ("c1", "c2")
    assert rows["tiny"]["fingerprint"] == {"c1": "tiny-1", "c2": "tiny-2"}[rows["tiny"]["content"]]


async def test_models_are_listed_only_for_keys_that_may_use_them(port: Port):
    await node(port, "one", known(), known_other())
    limited = port.application.admin.create_key("app", ["infer"], 3600.0, KeyLimits(models=("oth*",)))["key"]
    async with port.client_of(limited) as client:
        assert [row["name"] for row in (await client.get("/api/v1/models")).json()["models"]] == ["other"]
        own = (await client.get("/api/v1/key")).json()
    assert (own["name"], own["scopes"], own["limits"]) == ("app", ["infer"], {"models": ["oth*"]})
    assert 3500 < own["expires"] - time.time() < 3700


def known_other() -> Model:
    return a_model(
        "other", loaded=False, loading=True, progress=0.5, profiled=True, max_context=9, quantization="4-bit"
    )

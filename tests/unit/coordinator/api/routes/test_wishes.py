"""Wishes for models through the API of the coordinator, with nodes on real links."""

import asyncio
from typing import Any

import httpx
import pytest

from coordinator.api.routes.wishes import MAX_WISHES
from coordinator.models.wishes import Wish
from tests.support.cluster.cluster_port import Line, Port, a_report
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.frames import LoadModel
from wire.units import GIB

MODEL = "publisher/big-model"
PATH = f"/api/v1/models/wishes/{MODEL}"


async def node(port: Port, name: str, **model: Any) -> tuple[str, Line]:
    """Link a node with 8 GiB of headroom that has the model on its disk."""
    who = port.member(name)
    held = a_model(MODEL, **{"loaded": False, **model})
    line = await port.link(who, a_report(models=(held,), memory=a_memory(8 * GIB)))
    await port.until(lambda: port.state(who) == "ready")
    return who.node, line


async def want(boss: httpx.AsyncClient, path: str = PATH, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = await boss.put(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def wish(**changes: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "replicas": 1,
        "labels": [],
        "allow": [],
        "deny": [],
        "idle_unload_seconds": None,
        "eviction_cost": 10,
        "load_at_boot": True,
        **changes,
    }


async def test_a_wish_has_every_property_and_a_second_one_replaces_them_all(port: Port, boss: httpx.AsyncClient):
    await node(port, "studio")
    await node(port, "mini")
    properties: dict[str, Any] = {
        "replicas": 2,
        "labels": ["video", "fast", "video"],
        "allow": ["studio"],
        "deny": ["mini"],
        "idle_unload_seconds": 60.0,
        "eviction_cost": 7,
        "load_at_boot": False,
    }
    expected = wish(**{**properties, "labels": ["fast", "video"]})
    assert await want(boss, **properties) == {"schema": 1, "wish": expected}
    assert (await boss.get(PATH)).json() == {"schema": 1, "wish": expected}
    assert await want(boss, PATH.upper().replace("/API/V1/MODELS/WISHES", "/api/v1/models/wishes")) == {
        "schema": 1,
        "wish": wish(),
    }
    await want(boss, "/api/v1/models/wishes/a")
    listed = (await boss.get("/api/v1/models/wishes")).json()["wishes"]
    assert [row["model"] for row in listed] == ["a", MODEL]


async def test_a_wish_for_a_model_of_no_node_is_one_in_any_case(boss: httpx.AsyncClient):
    await want(boss, "/api/v1/models/wishes/Some/Model", replicas=2)
    assert (await want(boss, "/api/v1/models/wishes/some/model"))["wish"]["model"] == "Some/Model"
    listed = (await boss.get("/api/v1/models/wishes")).json()["wishes"]
    assert [(row["model"], row["replicas"]) for row in listed] == [("Some/Model", 1)]


async def test_a_wish_ends_and_is_then_unknown(boss: httpx.AsyncClient):
    await want(boss)
    assert (await boss.delete(PATH)).json() == {"schema": 1, "model": MODEL}
    for method in ("GET", "DELETE"):
        answer = await boss.request(method, PATH)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "wish_not_found")
    assert (await boss.get("/api/v1/models/wishes")).json()["wishes"] == []


async def test_a_wish_gets_the_spelling_of_the_nodes(port: Port, boss: httpx.AsyncClient):
    await node(port, "studio")
    assert (await want(boss, f"/api/v1/models/wishes/{MODEL.title()}"))["wish"]["model"] == MODEL


async def test_a_wish_is_found_and_ended_in_any_case(port: Port, boss: httpx.AsyncClient):
    await want(boss, "/api/v1/models/wishes/Some/Model")
    assert (await boss.get("/api/v1/models/wishes/SOME/model")).json()["wish"]["model"] == "Some/Model"
    assert (await boss.delete("/api/v1/models/wishes/some/MODEL")).json()["model"] == "Some/Model"
    assert len(port.application.store.wishes) == 0


async def test_a_changed_wish_is_on_the_disk_before_it_is_acted_on_and_answered(
    port: Port, boss: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    steps, flush = list[str](), port.application.store.flush

    async def record() -> None:
        await flush()
        steps.append("flush")

    monkeypatch.setattr(port.application.store, "flush", record)
    monkeypatch.setattr(port.application.wishes, "wake", lambda: steps.append("wake"))
    await want(boss)
    assert steps == ["flush", "wake"]
    await boss.delete(PATH)
    assert steps == ["flush", "wake"] * 2


@pytest.mark.parametrize("name", ["a/../b", "a//b", "./a"])
async def test_a_name_with_empty_or_relative_parts_is_refused(boss: httpx.AsyncClient, name: str):
    path = "/api/v1/models/wishes/" + name.replace("/", "%2F")
    answer = await boss.put(path, json={})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


async def test_unknown_nodes_and_too_many_wishes_are_refused(port: Port, boss: httpx.AsyncClient):
    for nodes in ({"allow": ["nowhere"]}, {"deny": ["nowhere"]}):
        answer = await boss.put(PATH, json=nodes)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "node_not_found")
    for number in range(MAX_WISHES):
        port.application.store.wishes.put(Wish(f"m{number}"))
    assert (await want(boss, status=409))["error"]["code"] == "too_many_wishes"
    assert (await want(boss, "/api/v1/models/wishes/m7", replicas=3))["wish"]["replicas"] == 3


async def test_the_plan_has_the_running_load_and_what_is_missing(port: Port, boss: httpx.AsyncClient):
    who, line = await node(port, "studio")
    await want(boss, replicas=2)
    load = await line.until(LoadModel)
    assert load.model == MODEL
    plan = (await boss.get("/api/v1/models/plan")).json()
    action = {"action": "load", "model": MODEL, "node": who, "name": "studio", "why": "wish"}
    assert (plan["running"], plan["next"]) == ([action], [])
    (row,) = plan["wishes"]
    assert row.pop("missing")
    assert row == {
        "model": MODEL,
        "replicas": 2,
        "wanted": 2,
        "met": False,
        "ready": [],
        "loading": ["studio"],
        "away": [],
    }


async def test_a_wish_that_is_met_has_its_nodes(port: Port, boss: httpx.AsyncClient):
    await node(port, "studio", loaded=True)
    await want(boss)
    (row,) = (await boss.get("/api/v1/models/plan")).json()["wishes"]
    assert (row["met"], row["ready"], row["missing"]) == (True, ["studio"], "")


async def test_the_next_action_is_a_load_as_soon_as_the_wish_is_stored(port: Port, boss: httpx.AsyncClient):
    _, line = await node(port, "studio")
    began = asyncio.get_running_loop().time()
    await want(boss)
    await line.until(LoadModel)
    assert asyncio.get_running_loop().time() - began < 5, "the runner is woken"


async def test_a_node_list_shows_which_node_was_removed(port: Port, boss: httpx.AsyncClient):
    await node(port, "studio")
    await want(boss, allow=["studio"])
    assert (await boss.delete("/api/v1/nodes/studio")).status_code == 200
    (row,) = (await boss.get("/api/v1/models/wishes")).json()["wishes"]
    assert row["allow"] == ["studio (removed)"]


async def test_the_plan_unloads_a_cheaper_wish_and_says_for_which_model(port: Port, boss: httpx.AsyncClient):
    store = port.application.store
    store.wishes.put(Wish("cheap", eviction_cost=1))
    store.wishes.put(Wish("lazy", load_at_boot=False))
    who = port.member("studio")
    idle = {"loaded": False, "weights": 6 * GIB}
    models = (a_model("cheap", weights=6 * GIB), a_model("big", **idle), a_model("lazy", **idle))
    await port.link(who, a_report(models=models, memory=a_memory(GIB)))
    await port.until(lambda: port.state(who) == "ready")
    store.wishes.put(Wish("big"))
    plan = (await boss.get("/api/v1/models/plan")).json()
    unload = {"action": "unload", "model": "cheap", "node": who.node, "name": "studio", "why": "memory for big"}
    assert plan["next"] + plan["running"] == [unload]
    rows = {row["model"]: (row["replicas"], row["wanted"], row["met"]) for row in plan["wishes"]}
    assert rows == {"cheap": (1, 1, True), "lazy": (1, 0, True), "big": (1, 1, False)}

"""Loading over the API: a complete coordinator, and nodes on real links with answers that a test sets."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from coordinator.cluster.model_operations import CommandResult, ModelOperations
from node.agent.identity import NodeIdentity
from tests.support.cluster.cluster_port import Line, Port, a_report, opened
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.frames import ClearCache, Failed, Finished, LoadModel, ProfileModel, Refusal, Report, UnloadModel
from wire.refusals import FailureCode, MemoryNumbers, RefusalCode, Refused
from wire.report import CacheState, EngineState, Model, ModelCache
from wire.units import GIB

BIG = "publisher/big-model"


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with opened(tmp_path) as made:
        yield made


def big(**changes: object) -> Model:
    return a_model(BIG, **({"loaded": False, "weights": 4 * GIB} | changes))


def report(*models: Model, room: int = 8 * GIB) -> Report:
    return a_report(models=models, memory=a_memory(room))


async def node(port: Port, name: str, *models: Model, room: int = 8 * GIB) -> tuple[NodeIdentity, Line]:
    who = port.member(name)
    line = await port.link(who, report(*models, room=room))
    await port.until(lambda: port.state(who) == "ready")
    return who, line


async def ask(port: Port, verb: str, node: str | None = None, model: str = BIG) -> asyncio.Task[httpx.Response]:
    async def call() -> httpx.Response:
        async with port.client("admin") as client:
            return await client.post(f"/api/v1/models/{verb}", json={"model": model, "node": node})

    return asyncio.create_task(call())


def error(answer: httpx.Response) -> dict[str, Any]:
    return answer.json()["error"]


async def test_load_chooses_a_node_with_room_and_returns_it(port: Port):
    await node(port, "mini", big(), room=1 * GIB)
    _, studio = await node(port, "studio", big())
    asking = await ask(port, "load")
    load = await studio.until(LoadModel)
    assert load.model == BIG
    assert not asking.done()
    studio.send(Finished(load.request, (), 0, 0))
    answer = await asking
    assert answer.status_code == 200
    found = answer.json()
    assert (found["model"], found["node"]["name"], found["node"]["already"]) == (BIG, "studio", False)
    assert 0 <= found["node"]["seconds"] < 60


async def test_load_of_a_loaded_model_reports_already_loaded(port: Port):
    await node(port, "studio", big(loaded=True))
    for where in (None, "studio"):
        answer = await (await ask(port, "load", where))
        assert answer.json()["node"]["already"] is True


async def test_a_node_that_refuses_is_followed_by_the_next_and_the_refusal_keeps_its_numbers(port: Port):
    _, first = await node(port, "first", big(load_seconds=1.0))
    _, second = await node(port, "second", big(load_seconds=90.0))
    asking = await ask(port, "load")
    for line, headroom in ((first, 5), (second, 6)):
        load = await line.until(LoadModel)
        numbers = MemoryNumbers(headroom=headroom, margin=7)
        line.send(Refusal(load.request, Refused(RefusalCode.NO_ROOM, "needs 4.0 GiB", numbers)))
    answer = await asking
    assert answer.status_code == 503
    assert error(answer)["message"] == "first: needs 4.0 GiB; second: needs 4.0 GiB"
    assert error(answer)["memory"]["headroom"] == 5, "the first was the best choice"


async def test_load_on_a_named_node_is_sent_for_an_unreported_model(port: Port):
    _, studio = await node(port, "studio")
    asking = await ask(port, "load", "studio")
    load = await studio.until(LoadModel)
    studio.send(Refusal(load.request, Refused(RefusalCode.LOAD_FAILED, f"{BIG} cannot be loaded: truncated")))
    answer = await asking
    assert answer.status_code == 500
    assert error(answer)["code"] == "model_load_failed"
    assert "retry-after" not in answer.headers
    assert answer.headers["x-should-retry"] == "false"


async def test_a_cordoned_node_is_refused_for_a_load_and_not_for_an_unload(port: Port):
    who, studio = await node(port, "studio", big())
    port.application.nodes.administration.set_cordoned(who.node, on=True)
    for where in ("studio", None):
        answer = await (await ask(port, "load", where))
        assert answer.status_code == 503
        assert "studio is cordoned" in error(answer)["message"]
    asking = await ask(port, "unload", "studio")
    unload = await studio.until(UnloadModel)
    studio.send(Finished(unload.request, (), 0, 0))
    assert (await asking).status_code == 200


async def test_a_node_that_is_lost_during_a_load_is_an_error(port: Port):
    _, studio = await node(port, "studio", big())
    asking = await ask(port, "load")
    await studio.until(LoadModel)
    studio.close()
    answer = await asking
    assert (answer.status_code, error(answer)["code"]) == (502, "node_lost")
    assert f"studio was lost while it loaded {BIG}" in error(answer)["message"]


async def test_load_with_a_crashed_engine_fails_without_another_node(port: Port):
    _, studio = await node(port, "studio", big())
    await node(port, "other", big(load_seconds=500.0))
    asking = await ask(port, "load")
    load = await studio.until(LoadModel)
    studio.send(Failed(load.request, "engine_lost", "the engine process ended by SIGABRT"))
    answer = await asking
    assert (answer.status_code, error(answer)["code"]) == (500, "engine_crashed")
    assert "the engine of studio died while it loaded" in error(answer)["message"]
    assert "SIGABRT" in error(answer)["message"]


async def test_a_model_is_unloaded_wherever_it_is_loaded(port: Port):
    _, one = await node(port, "one", big(loaded=True))
    _, two = await node(port, "two", big(loaded=True))
    await node(port, "three", big())
    asking = await ask(port, "unload")
    for line in (one, two):
        unload = await line.until(UnloadModel)
        line.send(Finished(unload.request, (), 0, 0))
    assert sorted(row["name"] for row in (await asking).json()["nodes"]) == ["one", "two"]


async def test_a_node_that_is_away_is_not_asked_to_unload_or_measure(port: Port):
    away, line = await node(port, "away", big(loaded=True))
    line.close()
    await port.until(lambda: port.state(away) == "lost")
    answer = await (await ask(port, "unload"))
    assert (answer.status_code, error(answer)["message"]) == (404, f"{BIG} is loaded on no node")
    _, studio = await node(port, "studio", big(loaded=True))
    for verb, kind in (("profile", ProfileModel), ("unload", UnloadModel)):
        asking = await ask(port, verb)
        order = await studio.until(kind)
        studio.send(Finished(order.request, (), 0, 0))
        assert [row["name"] for row in (await asking).json()["nodes"]] == ["studio"]


async def test_the_duration_of_a_command_is_that_of_its_clock(port: Port):
    _, line = await node(port, "studio", big())
    times = iter((100.0, 107.25))
    operations = ModelOperations(port.application.dispatcher, lambda: next(times))
    loading = asyncio.create_task(operations.load_model(BIG, None))
    line.send(Finished((await line.until(LoadModel)).request, (), 0, 0))
    done = await loading
    assert isinstance(done, CommandResult)
    assert (done.name, done.seconds, done.to_row()["seconds"]) == ("studio", 7.25, 7.25)


async def test_unload_skips_a_model_in_use_and_lists_the_rest(port: Port):
    _, one = await node(port, "one", big(loaded=True))
    _, two = await node(port, "two", big(loaded=True))
    asking = await ask(port, "unload")
    unload = await one.until(UnloadModel)
    one.send(Refusal(unload.request, Refused(RefusalCode.IN_USE, "it has 2 requests here")))
    unload = await two.until(UnloadModel)
    two.send(Finished(unload.request, (), 0, 0))
    answer = await asking
    assert (answer.status_code, error(answer)["code"]) == (409, "model_in_use")
    assert error(answer)["message"] == "one: it has 2 requests here; unloaded on two"


@pytest.mark.parametrize(
    ("verb", "where", "model", "status", "code"),
    [
        ("load", None, "nothing", 404, "model_not_found"),
        ("unload", None, BIG, 404, "model_not_found"),
        ("profile", None, "nothing", 404, "model_not_found"),
        ("load", "nowhere", BIG, 404, "node_not_found"),
        ("load", None, "a\nb", 400, "invalid_request"),
    ],
)
async def test_impossible_operations_fail_immediately(
    port: Port, verb: str, where: str | None, model: str, status: int, code: str
):
    await node(port, "studio", big())
    answer = await (await ask(port, verb, where, model))
    assert (answer.status_code, error(answer)["code"]) == (status, code)


async def test_list_has_the_state_of_a_model_on_every_node(port: Port):
    await node(port, "has", big(loaded=True))
    await node(port, "loads", big(loading=True))
    await node(port, "knows", big())
    broken, _ = await node(port, "broken", big(cause="truncated"), a_model("gone", loaded=False, cause="no template"))
    rows = {row["name"]: row for row in (await port.get("/api/v1/models"))["models"]}
    found = {one["name"]: (one["model"], one["cause"], one["state"]) for one in rows[BIG]["nodes"]}
    assert found == {
        "has": ("loaded", "", "ready"),
        "loads": ("loading", "", "ready"),
        "knows": ("known", "", "ready"),
        "broken": ("failed", "truncated", "ready"),
    }
    speeds = {(one["prefill_speed"], one["decode_speed"]) for one in rows[BIG]["nodes"]}
    assert speeds == {(round(big().prefill_speed, 1), round(big().decode_speed, 1))}
    inspected = (await port.get(f"/api/v1/nodes/{broken.node}"))["node"]["models"]
    assert [(one["name"], one["model"], one["cause"]) for one in inspected] == [
        ("gone", "failed", "no template"),
        (BIG, "failed", "truncated"),
    ]
    assert [one["id"] for one in (await port.get("/v1/models"))["data"]] == [BIG]
    async with port.client("infer") as client:
        assert "no template" in (await client.get("/v1/models/gone")).json()["error"]["message"]


async def test_profile_measures_every_loaded_replica_and_returns_the_results(port: Port):
    _, one = await node(port, "one", big(loaded=True))
    await node(port, "two", big())
    asking = await ask(port, "profile")
    order = await one.until(ProfileModel)
    assert order.model == BIG
    found = big(loaded=True, profiled=True, max_context=5000, max_batch=7, observed=9, residual=3, covered=512)
    one.send(Finished(order.request, (), 0, 0, measured=found))
    answer = (await asking).json()
    (row,) = answer["nodes"]
    assert row["name"] == "one"
    assert row["measured"] == {
        "max_context": 5000,
        "max_batch": 7,
        "kv_per_token": found.kv_per_token,
        "transient": 9,
        "residual": 3,
        "covered": 512,
    }


async def test_a_model_that_is_loaded_nowhere_is_measured_where_it_would_be_loaded(port: Port):
    await node(port, "mini", big(), room=1 * GIB)
    _, studio = await node(port, "studio", big())
    asking = await ask(port, "profile")
    order = await studio.until(ProfileModel)
    studio.send(
        Refusal(order.request, Refused(RefusalCode.NO_ROOM, "the profile failed: lower engine.mlx.prefill_step_size"))
    )
    answer = await asking
    assert answer.status_code == 503
    assert error(answer)["message"] == "studio: the profile failed: lower engine.mlx.prefill_step_size"


async def clear(port: Port, **body: str) -> asyncio.Task[httpx.Response]:
    async def call() -> httpx.Response:
        async with port.client("admin") as client:
            return await client.post("/api/v1/cache/clear", json=body)

    return asyncio.create_task(call())


async def test_caches_are_cleared_on_all_nodes_or_those_that_may_have_the_model(port: Port):
    gone = EngineState("mlx", "ready", cache=CacheState(models=(ModelCache("0123abcd"),)))
    _, mini = await node(port, "mini", big())
    who = port.member("studio")
    studio = await port.link(who, replace(report(), engine=gone))
    await port.until(lambda: port.state(who) == "ready")
    for body, lines in (({}, (mini, studio)), ({"model": BIG}, (mini,)), ({"model": "0123abcd"}, (studio,))):
        asking = await clear(port, **body)
        for line in lines:
            order = await line.until(ClearCache)
            assert order.model == body.get("model", "")
            line.send(Finished(order.request, (), 0, 0))
        answer = await asking
        assert answer.status_code == 200
        assert len(answer.json()["nodes"]) == len(lines)
    assert error(await (await clear(port, model="unknown")))["code"] == "model_not_found"


async def test_a_node_that_does_not_clear_is_named_with_those_that_did(port: Port):
    _, first = await node(port, "first", big())
    _, second = await node(port, "second", big())
    asking = await clear(port)
    order = await first.until(ClearCache)
    first.send(Finished(order.request, (), 0, 0))
    order = await second.until(ClearCache)
    second.send(Failed(order.request, FailureCode.ENGINE_ERROR, "files of the disk cache remain: no access"))
    answer = await asking
    assert answer.status_code == 500
    assert "second failed while it cleared the cache of all models: files" in error(answer)["message"]
    assert "cleared on first" in error(answer)["message"]


async def test_the_caches_of_a_cordoned_node_are_cleared(port: Port):
    who, studio = await node(port, "studio", big())
    port.application.nodes.administration.set_cordoned(who.node, on=True)
    asking = await clear(port)
    order = await studio.until(ClearCache)
    studio.send(Finished(order.request, (), 0, 0))
    assert (await asking).status_code == 200


async def test_a_node_that_does_not_know_the_command_is_refused_at_once(port: Port):
    _, new = await node(port, "new", big())
    who = port.member("old")
    await port.link(who, report(big()), frames=())
    await port.until(lambda: port.state(who) == "ready")
    answer = await (await clear(port, node="old"))
    assert (answer.status_code, error(answer)["code"]) == (400, "unsupported_parameter")
    assert "update macpool there" in error(answer)["message"]
    asking = await clear(port)
    order = await new.until(ClearCache)
    new.send(Finished(order.request, (), 0, 0))
    message = error(await asking)["message"]
    assert "on old is older" in message
    assert "cleared on new" in message


async def test_a_node_that_is_away_is_named_because_its_files_remain(port: Port):
    _, first = await node(port, "first", big())
    who, second = await node(port, "second", big())
    second.close()
    await port.until(lambda: port.state(who) == "lost")
    asking = await clear(port)
    order = await first.until(ClearCache)
    first.send(Finished(order.request, (), 0, 0))
    answer = await asking
    assert answer.status_code == 503
    assert "second" in error(answer)["message"]
    assert "cleared on first" in error(answer)["message"]
    assert (await (await ask(port, "profile", "second"))).status_code == 503, "it measures nothing while it is away"
    port.application.nodes.administration.remove_node(who.node)
    asking = await clear(port)
    order = await first.until(ClearCache)
    first.send(Finished(order.request, (), 0, 0))
    assert [one["name"] for one in (await asking).json()["nodes"]] == ["first"], "a node that left has no files"

"""The loop of the wishes in a complete coordinator, with nodes on real links whose answers a test sets."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster.model_operations import ModelOperations
from coordinator.models import wish_runner
from coordinator.models.wish_counters import ActionOutcome, WishCounters
from coordinator.models.wish_runner import IDLE_ROUND_SECONDS, ROUND_SECONDS, WishRunner
from coordinator.models.wishes import Wish
from tests.support.cluster.cluster_port import Line, Port, a_report, opened
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.frames import Admitted, Finished, Generate, LoadModel, Refusal, Report, UnloadModel
from wire.refusals import RefusalCode, Refused
from wire.report import Model
from wire.state_machine import IllegalEventCounts, InvariantError
from wire.units import GIB

BIG = "publisher/big-model"
PATH = f"/api/v1/models/wishes/{BIG}"


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with opened(tmp_path) as made:
        yield made


def big(**changes: object) -> Model:
    return a_model(BIG, **({"loaded": False, "weights": 4 * GIB} | changes))


def report(*models: Model, room: int = 8 * GIB) -> Report:
    return a_report(models=models, memory=a_memory(room))


async def node(port: Port, name: str, *models: Model) -> Line:
    who = port.member(name)
    line = await port.link(who, report(*models))
    await port.until(lambda: port.state(who) == "ready")
    return line


async def want(port: Port, **body: Any) -> dict[str, Any]:
    async with port.client("admin") as client:
        answer = await client.put(PATH, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["wish"]


async def read_plan(port: Port) -> dict[str, Any]:
    async with port.client("admin") as client:
        return (await client.get("/api/v1/models/plan")).json()


async def keep_reporting(line: Line, *models: Model) -> None:
    while True:
        line.send(report(*models))
        await asyncio.sleep(0.2)


def entries(port: Port, event: str) -> list[Any]:
    return [entry for entry in port.logs if entry["event"] == event]


async def test_wish_is_loaded_met_and_listed(port: Port):
    studio = await node(port, "studio", big())
    await want(port)
    load = await studio.until(LoadModel)
    assert load.model == BIG
    plan = await read_plan(port)
    assert plan["running"] == [{"action": "load", "model": BIG, "node": "node-1", "name": "studio", "why": "wish"}]
    (row,) = plan["wishes"]
    assert (row["wanted"], row["met"], row["loading"], row["missing"]) == (1, False, ["studio"], "studio loads it")
    studio.send(report(big(loaded=True)))
    studio.send(Finished(load.request, (), 0, 0))
    await port.until(lambda: entries(port, "wish load ended"))
    assert entries(port, "wish load ended")[0]["outcome"] == "done"
    studio.send(report(big(loaded=True)))
    await port.until(lambda: entries(port, "wish met"))
    (row,) = (await read_plan(port))["wishes"]
    assert (row["met"], row["ready"], row["missing"]) == (True, ["studio"], "")
    snapshot = port.application.wishes.take_snapshot()
    assert snapshot.replicas == {BIG: (1, 1)}
    assert snapshot.counters == WishCounters(loads={(BIG, ActionOutcome.DONE): 1})


async def test_wish_moves_to_the_next_node_after_a_refusal(port: Port):
    first, second = await node(port, "first", big(load_seconds=1.0)), await node(port, "second", big(load_seconds=9.0))
    await want(port)
    load = await first.until(LoadModel)
    first.send(Refusal(load.request, Refused(RefusalCode.NO_ROOM, "a spike of another program")))
    reports = [asyncio.create_task(keep_reporting(line, big())) for line in (first, second)]
    assert (await second.until(LoadModel)).model == BIG
    with pytest.raises(TimeoutError):
        await first.until(LoadModel, 2.5)
    for task in reports:
        task.cancel()
    assert entries(port, "wish load ended")[0]["why"] == "first: a spike of another program"


async def test_an_unused_model_is_unloaded_for_a_wish(port: Port):
    other = a_model("other", weights=16 * GIB)
    studio = await node(port, "studio", big(weights=12 * GIB), other)
    await want(port)
    unload = await studio.until(UnloadModel)
    assert unload.model == "other"
    (row,) = (await read_plan(port))["running"]
    assert row["why"] == f"memory for {BIG}"


async def test_a_model_of_a_running_request_is_not_unloaded_for_a_wish(port: Port):
    other = a_model("other", weights=16 * GIB)
    studio = await node(port, "studio", big(weights=12 * GIB), other)
    async with port.client("infer") as client:
        body = {"model": "other", "messages": [{"role": "user", "content": "hello"}]}
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        generate = await studio.until(Generate)
        studio.send(Admitted(generate.request, 10))
        await want(port)
        reports = asyncio.create_task(keep_reporting(studio, big(weights=12 * GIB), other))
        with pytest.raises(TimeoutError):
            await studio.until(UnloadModel, 2.5)
        reports.cancel()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_models_of_several_requests_on_one_node_are_not_unloaded_for_a_wish(port: Port):
    others = tuple(a_model(name, weights=16 * GIB) for name in ("first", "second"))
    studio = await node(port, "studio", big(weights=12 * GIB), *others)
    async with port.client("infer") as client:
        asking: list[asyncio.Task[Any]] = []
        for other in others:
            body = {"model": other.name, "messages": [{"role": "user", "content": "hello"}]}
            asking.append(asyncio.create_task(client.post("/v1/chat/completions", json=body)))
            generate = await studio.until(Generate)
            studio.send(Admitted(generate.request, 10))
        await want(port)
        plan = await read_plan(port)
        assert (plan["running"], plan["next"]) == ([], [])
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_a_queued_request_ends_the_rest_of_a_wish(port: Port):
    who = port.member("studio")
    line = await port.link(who, report(big(), room=1 * GIB))
    await port.until(lambda: port.state(who) == "ready")
    await want(port, load_at_boot=False)
    wishes = port.application.wishes
    assert wishes.take_snapshot().replicas == {BIG: (0, 0)}
    async with port.client("infer") as client:
        body = {"model": BIG, "messages": [{"role": "user", "content": "hello"}]}
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await port.until(lambda: port.application.dispatcher.count_queued() == 1)
        line.send(report(big(), room=1 * GIB))
        await port.until(lambda: wishes.take_snapshot().replicas == {BIG: (1, 0)}, 10.0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_load_refused_for_memory_is_repeated_when_the_node_has_more(port: Port):
    studio = await node(port, "studio", big())
    await want(port)
    load = await studio.until(LoadModel)
    studio.send(Refusal(load.request, Refused(RefusalCode.NO_ROOM, "a spike of another program")))
    await port.until(lambda: entries(port, "wish load ended"))
    for _ in range(12):
        studio.send(report(big(), room=10 * GIB))
        await asyncio.sleep(0.2)
    assert (await studio.until(LoadModel, 1.0)).model == BIG


async def test_a_load_refused_for_another_reason_is_not_repeated_early_for_memory(port: Port):
    studio = await node(port, "studio", big())
    await want(port)
    load = await studio.until(LoadModel)
    studio.send(Refusal(load.request, Refused(RefusalCode.LOAD_FAILED, "its files are damaged")))
    await port.until(lambda: entries(port, "wish load ended"))
    for _ in range(12):
        studio.send(report(big(), room=10 * GIB))
        await asyncio.sleep(0.2)
    assert len(entries(port, "wish loads")) == 1
    (row,) = (await read_plan(port))["wishes"]
    assert "its files are damaged; the next try is in" in row["missing"]


async def test_an_idle_model_is_unloaded_and_a_refusal_of_the_node_is_recorded(port: Port):
    studio = await node(port, "studio", big(loaded=True))
    await want(port, idle_unload_seconds=0.5)
    reports = asyncio.create_task(keep_reporting(studio, big(loaded=True)))
    unload = await studio.until(UnloadModel)
    assert unload.model == BIG
    studio.send(Refusal(unload.request, Refused(RefusalCode.IN_USE, "3 requests use it")))
    await port.until(lambda: entries(port, "wish unload ended"))
    reports.cancel()
    assert entries(port, "wish unload ended")[0]["outcome"] == "refused"
    counters = port.application.wishes.take_snapshot().counters
    assert counters == WishCounters(unloads={(BIG, ActionOutcome.REFUSED): 1})


async def test_a_wish_is_kept_by_the_database(port: Port):
    await node(port, "studio", big())
    made = await want(port, replicas=2, deny=["studio"], idle_unload_seconds=1800.0, eviction_cost=7)
    assert made == {
        "model": BIG,
        "replicas": 2,
        "labels": [],
        "allow": [],
        "deny": ["studio"],
        "idle_unload_seconds": 1800.0,
        "eviction_cost": 7,
        "load_at_boot": True,
    }
    stored = port.application.store.wishes[BIG]
    assert stored.deny == ("node-1",)
    assert (stored.replicas, stored.eviction_cost) == (2, 7)


async def test_wishes_are_listed_shown_and_ended_and_the_audit_log_names_them(port: Port):
    await node(port, "studio", big())
    async with port.client("admin") as client:
        made = await client.put(PATH.upper().replace("/API/V1/MODELS/WISHES", "/api/v1/models/wishes"), json={})
        assert made.json()["wish"]["model"] == BIG, "the name of the model on disk"
        assert [wish["model"] for wish in (await client.get("/api/v1/models/wishes")).json()["wishes"]] == [BIG]
        assert (await client.get(PATH)).json()["wish"]["replicas"] == 1
        assert (await client.delete(PATH)).json() == {"schema": 1, "model": BIG}
        gone = await client.delete(PATH)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "wish_not_found")
        acts = (await client.get("/api/v1/audit")).json()["acts"]
    assert [act["action"] for act in acts][-2:] == ["want_model", "unwant_model"]
    assert acts[-1]["subject"] == BIG


async def test_a_model_that_no_node_has_gets_one_wish_in_every_case_of_its_name(port: Port):
    async with port.client("admin") as client:
        for path, replicas in ((PATH, 1), (f"{PATH[:-5]}MODEL", 2)):
            made = await client.put(path, json={"replicas": replicas})
            assert made.json()["wish"]["model"] == BIG
        (wish,) = (await client.get("/api/v1/models/wishes")).json()["wishes"]
    assert (wish["model"], wish["replicas"]) == (BIG, 2)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"replicas": 0}, 400),
        ({"replicas": 2000}, 400),
        ({"eviction_cost": 0}, 400),
        ({"idle_unload_seconds": -1}, 400),
        ({"idle_unload_seconds": 0}, 400),
        ({"labels": [""]}, 400),
        ({"unknown": 1}, 400),
        ({"allow": ["unknown"]}, 404),
        ({"deny": ["unknown"]}, 404),
    ],
    ids=str,
)
async def test_a_wish_that_cannot_be_is_refused(port: Port, body: dict[str, Any], status: int):
    async with port.client("admin") as client:
        assert (await client.put(PATH, json=body)).status_code == status
        assert (await client.get("/api/v1/models/wishes")).json()["wishes"] == []


async def test_the_number_of_wishes_is_bounded(port: Port):
    async with port.client("admin") as client:
        for at in range(100):
            assert (await client.put(f"/api/v1/models/wishes/m{at}", json={})).status_code == 200
        more = await client.put("/api/v1/models/wishes/one-more", json={})
        assert (more.status_code, more.json()["error"]["code"]) == (409, "too_many_wishes")
        assert (await client.put("/api/v1/models/wishes/m7", json={"replicas": 2})).status_code == 200


async def test_wishes_need_an_admin_key(port: Port):
    async with port.client("infer") as client:
        assert (await client.put(PATH, json={})).status_code == 403
        assert (await client.get("/api/v1/models/plan")).status_code == 403


async def test_a_contradiction_in_a_round_is_counted_and_the_next_round_runs(port: Port):
    class BrokenOnce(dict[str, Wish]):
        def values(self) -> Any:
            if not rounds.done():
                rounds.set_result(None)
                raise InvariantError("a wish twice")
            ended.set()
            return super().values()

    rounds, ended = asyncio.get_running_loop().create_future(), asyncio.Event()
    dispatcher = port.application.dispatcher
    runner = WishRunner(
        BrokenOnce({"m": Wish("m")}), dispatcher, ModelOperations(dispatcher, time.monotonic), time.monotonic
    )
    loop = asyncio.create_task(runner.run())
    runner.wake()
    await asyncio.wait_for(rounds, 30)
    runner.wake()
    await asyncio.wait_for(ended.wait(), 30)
    loop.cancel()
    assert dispatcher.counters.illegal_events == IllegalEventCounts() | {"wish": 1}
    assert entries(port, "wish round failed")


async def test_without_wishes_views_begin_few_rounds(port: Port):
    class Counted(dict[str, Wish]):
        def values(self) -> Any:
            rounds.put_nowait(None)
            return super().values()

    rounds, now = asyncio.Queue[None](), 100.0
    dispatcher, wishes = port.application.dispatcher, Counted()
    runner = WishRunner(wishes, dispatcher, ModelOperations(dispatcher, time.monotonic), lambda: now)
    loop = asyncio.create_task(runner.run())

    async def has_round() -> bool:
        try:
            await asyncio.wait_for(rounds.get(), 2 * ROUND_SECONDS)
        except TimeoutError:
            return False
        await asyncio.sleep(0)
        while not rounds.empty():
            rounds.get_nowait()
        return True

    runner.handle_view()
    assert await has_round()
    for seconds, wished, expected in ((IDLE_ROUND_SECONDS - 0.5, False, False), (0.5, False, True), (0.5, True, True)):
        now += seconds
        if wished:
            wishes["m"] = Wish("m")
        runner.handle_view()
        assert await has_round() is expected
    loop.cancel()


@asynccontextmanager
async def running(port: Port, wish: Wish, clock: Callable[[], float] | None = None) -> AsyncIterator[WishRunner]:
    """Run a second runner for one wish, which no view wakes. At its end it must not wait for its commands."""
    dispatcher = port.application.dispatcher
    operations = ModelOperations(dispatcher, time.monotonic)
    runner = WishRunner({wish.model: wish}, dispatcher, operations, clock or dispatcher.get_time)
    loop = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        loop.cancel()
        await asyncio.wait_for(asyncio.gather(loop, return_exceptions=True), 5)


async def test_the_end_of_an_action_begins_the_next_round(port: Port, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wish_runner, "ROUND_SECONDS", 0.0)
    first, second = await node(port, "first", big(load_seconds=1.0)), await node(port, "second", big(load_seconds=9.0))
    async with running(port, Wish(BIG)) as runner:
        runner.wake()
        load = await first.until(LoadModel)
        first.send(Refusal(load.request, Refused(RefusalCode.NO_ROOM, "a spike of another program")))
        await second.until(LoadModel, 5.0)


async def test_loads_are_counted_by_their_outcome_and_an_unmet_wish_is_logged_once(
    port: Port, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wish_runner, "ROUND_SECONDS", 0.0)
    studio = await node(port, "studio", big())
    async with running(port, Wish(BIG)) as runner:
        runner.wake()
        load = await studio.until(LoadModel)
        studio.send(report(big(loaded=True)))
        studio.send(Finished(load.request, (), 0, 0))
        await port.until(lambda: entries(port, "wish load ended"))
        studio.send(report(big(loaded=True)))
        await port.until(lambda: runner.build_plan().states[0].met)
        runner.wake()
        await port.until(lambda: entries(port, "wish met"))
        assert runner.take_snapshot().counters == WishCounters(loads={(BIG, ActionOutcome.DONE): 1})
        studio.send(report(big()))
        await port.until(lambda: not runner.build_plan().states[0].met)
        runner.wake()
        await studio.until(LoadModel)
        studio.close()
        await port.until(lambda: len(entries(port, "wish load ended")) == 2)
        counters = {(BIG, ActionOutcome.DONE): 1, (BIG, ActionOutcome.FAILED): 1}
        assert runner.take_snapshot().counters == WishCounters(loads=counters)
    assert len(entries(port, "wish unmet")) == 2


async def test_a_request_that_ended_is_one_use_of_its_model(port: Port, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wish_runner, "ROUND_SECONDS", 0.0)
    line, dispatcher, offset = await node(port, "studio", big(loaded=True)), port.application.dispatcher, [0.0]
    wish = Wish(BIG, idle_unload_seconds=1.0)
    async with running(port, wish, lambda: dispatcher.get_time() + offset[0]) as runner:
        for offset[0], requests in ((0.0, 1), (0.9, 1), (1.4, 0)):
            for _ in range(requests):
                dispatcher.counters.count_end("ok", BIG, 1.0)
            runner.wake()
            await asyncio.sleep(0.01)
        assert runner.running == ()
        offset[0] = 2.4
        runner.wake()
        assert (await line.until(UnloadModel, 5.0)).model == BIG


async def test_a_plan_for_people_leaves_the_requests_to_the_next_round(port: Port, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wish_runner, "ROUND_SECONDS", 0.0)
    line = await node(port, "studio", big())
    async with running(port, Wish(BIG, load_at_boot=False)) as runner:
        runner.wake()
        await asyncio.sleep(0.01)
        assert runner.running == ()
        port.application.dispatcher.counters.count_end("ok", BIG, 1.0)
        assert runner.build_plan().actions == ()
        runner.wake()
        assert (await line.until(LoadModel, 5.0)).model == BIG


async def test_no_model_is_loaded_on_a_node_that_keeps_failing(port: Port):
    await node(port, "studio", big())
    breakers, now = port.application.dispatcher.breakers, port.application.dispatcher.get_time()
    (member,) = port.application.registry.pool.members
    async with running(port, Wish(BIG)) as runner:
        assert [action.node for action in runner.build_plan().actions] == [member]
        for number in range(3):
            breakers.record_fault(member, number, now - 4.0 + 2.0 * number)
        assert runner.build_plan().actions == ()

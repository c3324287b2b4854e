"""Benchmarks through the API of the coordinator, with nodes on real links."""

import asyncio

import httpx
import pytest

from coordinator.model_tools.benchmark_records import BenchmarkRecord, BenchmarkRun
from tests.support.cluster.cluster_port import Port, a_report
from wire.frames import Generate, Refusal
from wire.refusals import RefusalCode, Refused
from wire.report import EngineState


@pytest.mark.parametrize(("running", "waiting"), [(1, 1), (2, 0), (0, 2)])
async def test_requests_that_only_the_node_knows_make_it_busy(port: Port, running: int, waiting: int):
    who = port.member("studio")
    report = a_report(engine=EngineState("loopback", "ready", running=running, waiting=waiting))
    await port.link(who, report)
    await port.until(lambda: port.state(who) == "ready")
    async with port.client("admin") as client:
        answer = await client.post("/api/v1/benchmarks", json={"model": report.models[0].name, "node": "studio"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "node_busy")
    assert "studio is busy with 2 requests" in error["message"]


async def test_a_node_has_one_benchmark_at_a_time_also_with_force(port: Port):
    who = port.member("studio")
    line = await port.link(who)
    await port.until(lambda: port.state(who) == "ready")
    body = {"model": a_report().models[0].name, "node": "studio", "force": True}
    async with port.client("admin") as client:
        first = asyncio.create_task(client.post("/api/v1/benchmarks", json=body))
        warm_up = await line.until(Generate)
        second = await asyncio.wait_for(client.post("/api/v1/benchmarks", json=body), 10)
        assert (second.status_code, second.json()["error"]["code"]) == (409, "node_busy")
        assert "another benchmark runs on studio" in second.json()["error"]["message"]
        line.send(Refusal(warm_up.request, Refused(RefusalCode.UNSUPPORTED, "not this one")))
        assert "not this one" in (await first).json()["error"]["message"]
        third = asyncio.create_task(client.post("/api/v1/benchmarks", json=body))
        warm_up = await line.until(Generate)
        line.send(Refusal(warm_up.request, Refused(RefusalCode.UNSUPPORTED, "not this one")))
        assert "not this one" in (await third).json()["error"]["message"]


async def test_benchmarks_are_listed_the_newest_first_and_by_model(port: Port, boss: httpx.AsyncClient):
    studio = port.member("studio")
    await port.link(studio)
    await port.until(lambda: port.state(studio) == "ready")
    run = BenchmarkRun(prompt_tokens=512, parallel=1, generated=128, prefill_speed=1000.0, decode_speed=50.0)
    records = port.application.benchmarks
    for at, model in enumerate(("tiny", "other", "tiny")):
        records.store(
            BenchmarkRecord(
                node=studio.node,
                model=model,
                fingerprint="tiny-1",
                system=f"macOS {at}",
                measured=100.0 + at,
                max_prompt=9,
                runs=(run,),
            )
        )
    found = (await boss.get("/api/v1/benchmarks")).json()["benchmarks"]
    assert [(row["model"], row["measured"]) for row in found] == [("tiny", 102.0), ("other", 101.0), ("tiny", 100.0)]
    assert found[0]["node"] == {"id": studio.node, "name": "studio"}
    one = (await boss.get("/api/v1/benchmarks", params={"model": "other"})).json()["benchmarks"]
    assert [row["model"] for row in one] == ["other"]
    (tiny,) = (await boss.get("/api/v1/models")).json()["models"]
    assert tiny["nodes"][0]["benchmark"]["measured"] == 102.0

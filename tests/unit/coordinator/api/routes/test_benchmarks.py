"""Benchmarks through the API of the coordinator, with nodes on real links."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.model_tools.benchmark import PARALLEL, PROMPT_TOKENS
from coordinator.model_tools.benchmark_records import BenchmarkRecord, BenchmarkRun
from tests.support.cluster.cluster_port import Line, Port, a_report
from tests.support.cluster.enrolment import HARDWARE
from wire.frames import Admitted, Finished, Generate, Refusal, Timings
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


async def test_a_request_that_the_node_has_not_reported_yet_makes_it_busy(port: Port, boss: httpx.AsyncClient):
    line = await ready_node(port)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    async with port.client("infer") as client:
        chatting = asyncio.create_task(client.post("/v1/chat/completions", json=chat))
        order = await line.until(Generate)
        answer = await boss.post("/api/v1/benchmarks", json={"model": "tiny", "node": "studio"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "node_busy")
        assert "busy with 1 request:" in answer.json()["error"]["message"]
        line.send(Admitted(order.request, 7), Finished(order.request, ("stop",), 7, 2))
        assert (await chatting).status_code == 200


async def ready_node(port: Port) -> Line:
    """Link a node with the model `tiny`."""
    who = port.member("studio")
    line = await port.link(who)
    await port.until(lambda: port.state(who) == "ready")
    return line


async def measure(boss: httpx.AsyncClient, line: Line) -> httpx.Response:
    """Measure `tiny` on a node that prefills 1000 tokens and decodes 127 tokens per second, and return the answer."""
    asked = asyncio.create_task(boss.post("/api/v1/benchmarks", json={"model": "tiny", "node": "studio"}))
    for _ in range(1 + len(PROMPT_TOKENS) * sum(PARALLEL)):
        order = await line.until(Generate)
        tokens = len(order.ids)
        line.send(Admitted(order.request, tokens))
        line.send(Finished(order.request, ("length",), tokens, 128, 0, Timings(0.0, tokens / 1000, 1.0)))
    return await asked


async def test_a_benchmark_is_answered_and_stored(port: Port, boss: httpx.AsyncClient, tmp_path: Path):
    line = await ready_node(port)
    made: dict[str, Any] = (await measure(boss, line)).json()["benchmark"]
    setup = (made["node"]["name"], made["model"], made["chip"], made["system"])
    assert setup == ("studio", "tiny", HARDWARE.chip, HARDWARE.system)
    runs = [(run["prompt_tokens"], run["parallel"], run["prefill_speed"], run["decode_speed"]) for run in made["runs"]]
    assert runs == [
        (512, 1, 1000.0, 127.0),
        (512, 4, 4000.0, 508.0),
        (2048, 1, 1000.0, 127.0),
        (2048, 4, 4000.0, 508.0),
    ]
    assert (await boss.get("/api/v1/benchmarks")).json() == {"schema": 1, "benchmarks": [made]}
    stored = tmp_path / "state" / "benchmarks.json"
    stored.unlink()
    stored.mkdir()
    error = await measure(boss, line)
    assert (error.status_code, error.json()["error"]["code"]) == (507, "disk_full")
    assert "cannot be stored on the coordinator's disk" in error.json()["error"]["message"]
    assert (await boss.get("/api/v1/benchmarks")).json()["benchmarks"] == [made]


async def test_a_benchmark_needs_a_node_that_has_the_model(port: Port, boss: httpx.AsyncClient):
    await ready_node(port)
    for model, node, status, code in (
        ("other", "studio", 404, "model_not_found"),
        ("tiny", "nowhere", 404, "node_not_found"),
        ("bad\nname", "studio", 400, "invalid_request"),
    ):
        answer = await boss.post("/api/v1/benchmarks", json={"model": model, "node": node})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


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

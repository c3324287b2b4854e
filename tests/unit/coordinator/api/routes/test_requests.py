"""Times of requests as Unix seconds, and placements of hypothetical requests."""

import asyncio
import time

import httpx
import pytest

from coordinator.api.routes.requests import MAX_DRIFT_SECONDS, WallClock
from router.dispatch.decision_log import parse_line
from router.errors import build_invalid
from tests.support.cluster.cluster_port import Port, a_report
from wire.frames import Admitted, Delta, Deltas, Finished, Generate


def test_times_follow_a_clock_that_was_set_and_are_else_constant(monkeypatch: pytest.MonkeyPatch):
    now, wall = [100.0], [1e9]
    monkeypatch.setattr(time, "time", lambda: wall[0])
    clock = WallClock(lambda: now[0])
    assert clock.to_unix(90.0) == 1e9 - 10.0
    now[0], wall[0] = 105.0, 1e9 + 5.0 + MAX_DRIFT_SECONDS / 2
    assert clock.to_unix(90.0) == 1e9 - 10.0, "the clocks drift"
    wall[0] = 1e9 + 3605.0
    assert clock.to_unix(90.0) == 1e9 + 3590.0, "the clock was set"
    wall[0] = 1e9 + 5.0
    assert clock.to_unix(90.0) == 1e9 - 10.0, "the clock was set back"


async def test_a_model_that_cannot_be_placed_was_not_passed_over_for_another(port: Port, boss: httpx.AsyncClient):
    who = port.member("studio")
    await port.link(who, a_report())
    await port.until(lambda: port.state(who) == "ready")
    answer = (await boss.post("/api/v1/place", json={"model": "big"})).json()
    assert (answer["node"], answer["model"], answer["passed_over"]) == (None, "big", [])
    assert (answer["refused"]["code"], answer["refused"]["status"]) == ("model_not_found", 404)
    assert [(row["name"], row["chosen"]) for row in answer["candidates"]] == [("studio", False)]
    answer = (await boss.post("/api/v1/place", json={"model": "tiny", "prompt_tokens": 5})).json()
    assert (answer["name"], answer["refused"], answer["passed_over"]) == ("studio", None, [])


async def test_a_placement_has_its_node_and_grows_with_the_tokens(port: Port, boss: httpx.AsyncClient):
    who = port.member("studio")
    await port.link(who, a_report())
    await port.until(lambda: port.state(who) == "ready")
    answers = [
        (await boss.post("/api/v1/place", json={"model": "tiny", "prompt_tokens": prompt, "max_tokens": most})).json()
        for prompt, most in ((100, 10), (100, 900), (500, 10))
    ]
    assert [(answer["node"], answer["name"], answer["refused"]) for answer in answers] == [
        (who.node, "studio", None)
    ] * 3
    few, many, long = (answer["candidates"][0]["need"] for answer in answers)
    assert few < min(many, long)
    assert many != long


async def test_an_open_request_has_its_phase_and_an_ended_one_its_placement(port: Port, boss: httpx.AsyncClient):
    who = port.member("studio")
    line = await port.link(who, a_report())
    await port.until(lambda: port.state(who) == "ready")
    path, headers = "/api/v1/requests/mine", {"x-request-id": "mine"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True}
    async with port.client("infer") as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=headers))
        number = (await line.until(Generate)).request
        other = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers={"x-request-id": "other"}))
        second = (await line.until(Generate)).request
        phases, frames = list[str](), (Admitted(number, 7), Deltas((Delta(number, 0, (1,), ((0, "hey"),)),)))
        for frame in frames:
            (row,) = (await boss.get(path)).json()["under_way"]
            phases.append(row["phase"])
            assert 0 <= row["seconds"] < 60
            line.send(frame)
        async with asyncio.timeout(20):
            while (row := (await boss.get(path)).json()["under_way"][0])["phase"] == phases[-1]:  # noqa: ASYNC110  no event
                await asyncio.sleep(0)
        line.send(Finished(number, ("stop",), 7, 1))
        assert (await asking).status_code == 200
        line.send(Admitted(second, 7), Finished(second, ("stop",), 7, 1))
        assert (await other).status_code == 200
    assert ([*phases, row["phase"]], row["model"], row["alias"]) == (["prefill", "prefill", "decode"], "tiny", "")
    shown = (await boss.get(path)).json()
    (decision,), (ended,) = shown["decisions"], shown["requests"]
    assert (decision["chosen"], decision["refused"], decision["demand"]["model"]) == (who.node, None, "tiny")
    assert 0 <= decision["seconds_ago"] < 60
    assert (ended["node"], ended["key_name"], ended["completion_tokens"], shown["under_way"]) == (
        "studio",
        "test",
        1,
        [],
    )
    assert abs(ended["at"] - time.time()) < 60
    assert [sorted(step) for step in ended["steps"]] == [["at", "node", "what"]] * len(ended["steps"])
    assert ended["steps"][-1]["node"] in ("", "studio")
    recorded = await boss.get("/api/v1/decisions")
    assert recorded.headers["content-type"] == "application/jsonl"
    assert [parse_line(line).request_id for line in recorded.content.splitlines()] == ["mine", "other"]


async def test_the_newest_requests_are_listed_with_their_keys(port: Port, boss: httpx.AsyncClient):
    history = port.application.dispatcher.history
    key = port.application.admin.create_key("laptop", ["infer"], None)["id"]
    for number in range(60):
        history.record_invalid(float(number), f"r{number}", key if number % 2 else "gone", build_invalid("no"))
    for parameters, first in (({}, 10), ({"last": 3}, 57)):
        rows = (await boss.get("/api/v1/requests", params=parameters)).json()["requests"]
        assert [row["request_id"] for row in rows] == [f"r{number}" for number in range(first, 60)]
    assert [row["key_name"] for row in rows] == ["laptop", "gone (ended)", "laptop"]
    missing = await boss.get("/api/v1/requests/none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")

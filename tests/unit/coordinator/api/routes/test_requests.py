"""Times of requests as Unix seconds, and placements of hypothetical requests."""

import time

import httpx
import pytest

from coordinator.api.routes.requests import MAX_DRIFT_SECONDS, WallClock
from tests.support.cluster.cluster_port import Port, a_report


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

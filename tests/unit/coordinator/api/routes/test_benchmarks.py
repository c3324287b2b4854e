"""Benchmarks through the API of the coordinator, with nodes on real links."""

import pytest

from tests.support.cluster.cluster_port import Port, a_report
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

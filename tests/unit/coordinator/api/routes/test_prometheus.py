"""Metrics and service discovery for Prometheus, through the API of the coordinator."""

import httpx

from tests.support.cluster.cluster_port import Port
from wire.node_state import NodeState


async def test_metrics_have_the_format_that_the_client_accepts(port: Port, boss: httpx.AsyncClient):
    plain = await boss.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "\nmacpool_coordinator_unwritten_changes 0.0\n" in plain.text
    openmetrics = await boss.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")


async def test_targets_are_the_members_at_the_address_of_the_request(port: Port, boss: httpx.AsyncClient):
    here, away, left = (port.member(name) for name in ("here", "away", "left"))
    await port.link(here)
    await port.until(lambda: port.state(here) == "ready")
    port.application.nodes.administration.remove_node(left.node)
    assert port.state(left) == NodeState.LEFT
    targets = (await boss.get("/prometheus/sd", headers={"host": "pool.local:8080"})).json()
    assert targets == [
        {
            "targets": ["pool.local:8080"],
            "labels": {
                "__metrics_path__": f"/prometheus/nodes/{who.node}",
                "__scheme__": "http",
                "node": who.name,
                "instance": who.name,
            },
        }
        for who in (here, away)
    ]


async def test_metrics_of_a_node_that_is_unknown_or_absent_are_refused(port: Port, boss: httpx.AsyncClient):
    port.member("away")
    for name, status, code in (("nowhere", 404, "node_not_found"), ("away", 503, "node_unreachable")):
        answer = await boss.get(f"/prometheus/nodes/{name}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)

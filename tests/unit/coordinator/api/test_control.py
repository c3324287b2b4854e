"""The control application: the scope of each route, the bodies that it accepts, and the paths that members may read."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster.cluster_port import Port, opened
from wire.certificate import read_certificate
from wire.frames import Denied, MemberQuery
from wire.identity import PROTOCOL, PeerIdentity

PUBLIC = {"GET /api/v1/ca.pem", "GET /health", "GET /livez", "POST /api/v1/page/visits"}
BY_SCOPE = {
    "infer": {
        "GET /api/v1/key",
        "GET /api/v1/models",
        "GET /api/v1/usage",
        "GET /api/v1/version",
        "GET /api/v1/videos/models",
    },
    "metrics": {
        "GET /api/v1/conditions",
        "GET /api/v1/history",
        "GET /api/v1/leases",
        "GET /api/v1/live",
        "GET /api/v1/models/plan",
        "GET /api/v1/models/wishes",
        "GET /api/v1/models/wishes/{model}",
        "GET /api/v1/nodes",
        "GET /api/v1/nodes/{node}",
        "GET /api/v1/requests",
        "GET /api/v1/requests/{request_id}",
        "GET /api/v1/status",
        "GET /metrics",
        "GET /prometheus/nodes/{node}",
        "GET /prometheus/sd",
        "POST /api/v1/place",
    },
}
"""Control routes that a key of each scope may use without the scope `admin`."""


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with opened(tmp_path) as made:
        yield made


def operations(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return method and path of each control route."""
    return [
        (method.upper(), path)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if "inference" not in operation.get("tags", ())
    ]


async def answer_without_body(client: httpx.AsyncClient, method: str, path: str) -> int:
    """Return the status of a call with a body that is no JSON, which changes nothing."""
    return (await client.request(method, re.sub(r"\{\w+\}", "none", path), content=b"{")).status_code


async def test_a_key_opens_the_routes_of_its_scope_and_no_others(port: Port):
    routes = {f"{method} {path}" for method, path in operations(port.application.document())}
    for scope, allowed in BY_SCOPE.items():
        async with port.client(scope) as client:
            statuses = {route: await answer_without_body(client, *route.split()) for route in routes}
        assert {route for route, status in statuses.items() if status != 403} == allowed | PUBLIC
        assert {route for route, status in statuses.items() if status == 401} == set()


async def test_a_member_may_read_the_status_the_nodes_and_the_models_as_the_api_has_them(port: Port):
    who = port.member("studio")
    await port.link(who)
    await port.until(lambda: port.state(who) == "ready")
    queries, peer = port.application.nodes.queries, PeerIdentity(who.cluster, who.node)
    serial = read_certificate(who.certificate).serial
    assert queries.paths == {"/api/v1/status", "/api/v1/nodes", "/api/v1/models"}
    for path in sorted(queries.paths):
        answer = queries.answer(peer, serial, MemberQuery(PROTOCOL, who.node, who.machine, path))
        assert isinstance(answer, bytes)
        told, listed = json.loads(answer), await port.get(path)
        assert told.keys() == listed.keys()
        for section in ("cluster", "base_url", "models"):
            assert told.get(section) == listed.get(section)
        for row, other in zip(told["nodes"], listed["nodes"], strict=True) if path.endswith("nodes") else ():
            assert (row["id"], row["breaker"], row["memory"]) == (other["id"], other["breaker"], other["memory"])
    denied = queries.answer(peer, serial, MemberQuery(PROTOCOL, who.node, who.machine, "/api/v1/keys"))
    assert isinstance(denied, Denied)
    assert (denied.reason, denied.final) == ("not_readable", True)


async def test_bodies_are_limited_and_those_of_public_routes_are_shorter(port: Port):
    async with port.client("admin") as client:
        statuses = [
            (await client.post(path, content=b'{"code": "' + b"x" * (size - 12) + b'"}')).status_code
            for path, size in (
                ("/api/v1/page/visits", 1024),
                ("/api/v1/page/visits", 1025),
                ("/api/v1/keys", 65536),
                ("/api/v1/keys", 65537),
            )
        ]
    assert statuses == [400, 413, 400, 413]

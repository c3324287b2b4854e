"""A route of the control plane is built when it is needed first."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from coordinator.api.body import StrictRoute
from tests.support.cluster.application import Application, application


@pytest.fixture
async def built(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Application]:
    async with application(tmp_path_factory.mktemp("state")) as made:
        yield made


def built_routes(built: Application) -> set[tuple[str, str]]:
    """Return methods and paths of the routes that FastAPI has built."""
    routes = [route for route in built.api.app.routes if isinstance(route, StrictRoute)]
    assert len(routes) > 50
    return {(method, route.path) for route in routes if hasattr(route, "dependant") for method in route.methods or ()}


async def test_a_route_is_built_at_its_first_request_alone(built: Application):
    assert built_routes(built) == set()
    key = built.admin.create_key("admin", ["admin"], None)["key"]
    headers = {"authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(built.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
        answers = await asyncio.gather(*(client.post("/api/v1/tokens", json={}) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert built_routes(built) == {("POST", "/api/v1/tokens")}
        assert (await client.delete("/api/v1/status")).status_code == 405
        assert built_routes(built) == {("POST", "/api/v1/tokens")}


def test_the_description_has_all_routes_before_any_request(built: Application):
    document = built.document()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert {(method, path.replace(":path", "")) for method, path in built_routes(built)} <= described
    assert len(built_routes(built)) > 50

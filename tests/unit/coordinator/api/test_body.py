"""Routes of the control plane: built when they are needed first, with bodies of bounded size."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from coordinator.api.body import Body, StrictRoute
from coordinator.api.errors import install_error_handlers
from coordinator.api.route import MAX_BODY_BYTES
from coordinator.api.routes.benchmarks import BenchmarkBody
from coordinator.api.routes.cache import CacheBody
from coordinator.api.routes.joining import NewTokenBody
from coordinator.api.routes.keys import KeyExpiryBody, KeyNameBody, NewKeyBody
from coordinator.api.routes.nodes import DrainBody, LabelsBody, PauseBody
from coordinator.api.routes.pulls import ModelFilesBody, PullBody
from coordinator.api.routes.quantizations import QuantizationBody
from coordinator.api.routes.requests import PlacementBody
from coordinator.api.routes.wishes import WishBody
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


async def send_body(
    built: Application, *parts: dict[str, Any], announced: bytes | None = None, has_key: bool = True
) -> int:
    """Create a token with a body in these parts, after which the client leaves; return the status.

    `announced` is the header Content-Length; None for a request without one.
    """
    key = built.admin.create_key("admin", ["admin"], None)["key"]
    headers = [(b"host", b"127.0.0.1")]
    headers += [(b"authorization", f"Bearer {key}".encode())] if has_key else []
    headers += [] if announced is None else [(b"content-length", announced)]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/api/v1/tokens",
        "query_string": b"",
        "headers": [*headers, (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 8080),
    }
    waiting, statuses = [{"type": "http.request"} | part for part in parts], list[int]()

    async def receive() -> dict[str, Any]:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await built.app(scope, receive, send)
    (status,) = statuses
    return status


def test_only_the_measurement_of_a_model_ends_with_its_client(built: Application):
    routes = [route for route in built.api.app.routes if isinstance(route, StrictRoute)]
    assert [route.path for route in routes if route.ends_with_client] == ["/api/v1/models/profile"]


def test_a_deferrable_command_is_described_with_both_of_its_answers(built: Application):
    paths = built.document()["paths"]
    assert "202" in paths["/api/v1/models/load"]["post"]["responses"]
    assert "202" not in paths["/api/v1/models/profile"]["post"]["responses"]


async def test_a_body_is_refused_unread_without_a_key(built: Application):
    assert await send_body(built, has_key=False) == 401, "an incomplete body would be refused with 400"
    too_long = str(MAX_BODY_BYTES + 1).encode()
    assert await send_body(built, announced=too_long, has_key=False) == 401


class EndingRoute(StrictRoute):
    """Route whose handler ends with its client."""

    ends_with_client = True


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_handler_is_cancelled_when_its_client_leaves(leaves: bool):
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> dict[str, int]:
        started.set()
        try:
            await asyncio.sleep(3600 if leaves else 0)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return {"schema": 1}

    app = FastAPI()
    install_error_handlers(app)
    app.router.add_api_route("/work", work, methods=["POST"], route_class_override=EndingRoute)
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/work",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1")],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 8080),
    }
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        await started.wait()
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    assert statuses == [499 if leaves else 200]
    if leaves:
        await asyncio.wait_for(cancelled.wait(), 10)


async def test_a_body_may_have_the_bytes_of_its_limit(built: Application):
    assert await send_body(built, {"body": b"{}" + b" " * (MAX_BODY_BYTES - 2)}) == 200
    assert await send_body(built, {"body": b"{}" + b" " * (MAX_BODY_BYTES - 1)}) == 413
    half = {"body": b" " * (MAX_BODY_BYTES // 2), "more_body": True}
    assert await send_body(built, half, half, {"body": b"{}"}) == 413


async def test_a_body_is_complete_with_its_last_part(built: Application):
    assert await send_body(built, {"body": b"{", "more_body": True}, {"more_body": True}, {"body": b"}"}) == 200
    assert await send_body(built, {"body": b"{}", "more_body": True}) == 400


@pytest.mark.parametrize(
    ("announced", "status"),
    [
        (b"2", 200),
        (str(MAX_BODY_BYTES).encode(), 200),
        (str(MAX_BODY_BYTES + 1).encode(), 413),
        (b"-1", 413),
        (b"2x", 413),
        (b"9" * 5000, 413),
    ],
)
async def test_a_length_that_is_too_long_or_no_number_is_refused_unread(
    built: Application, announced: bytes, status: int
):
    assert await send_body(built, {"body": b"{}"}, announced=announced) == status


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/api/v1/tokens", {"uses": "3"}, "uses"),
        ("/api/v1/tokens", {"uses": 3.0}, "uses"),
        ("/api/v1/tokens", {"ttl_seconds": True}, "ttl_seconds"),
        ("/api/v1/keys", {"name": "laptop", "ttl_seconds": "600"}, "ttl_seconds"),
        ("/api/v1/place", {"model": "tiny", "max_tokens": True}, "max_tokens"),
        ("/api/v1/pulls", {"repo": "a/b", "all": "yes"}, "all"),
    ],
)
async def test_a_value_of_another_type_is_refused_not_converted(
    built: Application, path: str, body: dict[str, object], field: str
):
    key = built.admin.create_key("admin", ["admin"], None)["key"]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(built.app),
        base_url="http://127.0.0.1",
        headers={"authorization": f"Bearer {key}"},
    ) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


DAY = 86400.0
TEXTS: tuple[list[Any], list[Any]] = (["x", "x" * 100], ["", "x" * 101])
NAMES: tuple[list[Any], list[Any]] = (["x", "x" * 200], ["", "x" * 201])
"""Lengths of texts of up to 100 and 200 characters that are valid, and those that are not."""


@pytest.mark.parametrize(
    ("kind", "field", "valid", "invalid"),
    [
        (NewTokenBody, "ttl_seconds", [0.001, 30 * DAY], [0.0, 30 * DAY + 1]),
        (NewTokenBody, "uses", [1, 1000], [0, 1001]),
        (NewTokenBody, "name", ["", "x" * 100], ["x" * 101, "two\nlines", "\x9b"]),
        (NewKeyBody, "name", TEXTS[0], [*TEXTS[1], "two\nlines"]),
        (NewKeyBody, "scopes", [["infer"], ["infer", "metrics", "admin"]], [[], ["all"], ["infer"] * 4]),
        (NewKeyBody, "ttl_seconds", [None, 0.001, 3650 * DAY], [0.0, 3650 * DAY + 1]),
        (KeyExpiryBody, "ttl_seconds", [None, 0.001, 3650 * DAY], [0.0, 3650 * DAY + 1]),
        (KeyNameBody, "name", TEXTS[0], [*TEXTS[1], "\x1b[2J"]),
        (LabelsBody, "labels", [[], ["gpu=large"], ["A" * 63], ["x"] * 16], [["A" * 64], [""], ["-x"], ["x"] * 17]),
        (DrainBody, "wait_seconds", [0.0, DAY], [-0.1, DAY + 1]),
        (PauseBody, "seconds", [None, 0.001, 365 * DAY], [0.0, 365 * DAY + 1]),
        (PullBody, "repo", ["a/b", "x" * 200], ["ab", "x" * 201]),
        (PullBody, "revision", ["", "x" * 200], ["x" * 201]),
        (PullBody, "nodes", [[], ["x" * 100], ["x"] * 1000], [[""], ["x" * 101], ["x"] * 1001]),
        (ModelFilesBody, "model", *NAMES),
        (ModelFilesBody, "node", *TEXTS),
        (QuantizationBody, "model", *NAMES),
        (QuantizationBody, "bits", [1, 64], [0, 65]),
        (QuantizationBody, "node", *TEXTS),
        (QuantizationBody, "name", *NAMES),
        (BenchmarkBody, "model", *NAMES),
        (BenchmarkBody, "node", *TEXTS),
        (CacheBody, "model", *NAMES),
        (CacheBody, "node", *TEXTS),
        (WishBody, "replicas", [1, 1000], [0, 1001]),
        (WishBody, "labels", [[], ["x" * 100], ["x"] * 100], [[""], ["x" * 101], ["x"] * 101]),
        (WishBody, "idle_unload_seconds", [None, 0.001, 30 * DAY], [0.0, 30 * DAY + 1]),
        (WishBody, "eviction_cost", [1, 1000], [0, 1001]),
        (PlacementBody, "model", ["x", "x" * 512], ["", "x" * 513]),
        (PlacementBody, "prompt_tokens", [1, 10**9], [0, 10**9 + 1]),
        (PlacementBody, "max_tokens", [None, 1, 10**9], [0, 10**9 + 1]),
    ],
)
def test_a_field_has_its_bounds(kind: type[Body], field: str, valid: list[Any], invalid: list[Any]):
    for value in valid:
        assert getattr(kind.model_validate({**REQUIRED.get(kind, {}), field: value}), field) == value
    for value in invalid:
        with pytest.raises(ValidationError) as refused:
            kind.model_validate({**REQUIRED.get(kind, {}), field: value})
        assert {error["loc"][0] for error in refused.value.errors()} == {field}


REQUIRED: dict[type[Body], dict[str, Any]] = {
    NewKeyBody: {"name": "laptop"},
    PullBody: {"repo": "a/b"},
    ModelFilesBody: {"model": "tiny", "node": "studio"},
    QuantizationBody: {"model": "tiny"},
    BenchmarkBody: {"model": "tiny", "node": "studio"},
    PlacementBody: {"model": "tiny"},
}


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        (NewTokenBody, {"ttl_seconds": 3600.0, "uses": 1, "name": ""}),
        (NewKeyBody, {"scopes": ["infer"], "ttl_seconds": None, "limits": {}}),
        (DrainBody, {"wait_seconds": 0.0}),
        (PauseBody, {"seconds": None}),
        (PullBody, {"revision": "", "nodes": [], "all": False, "dry_run": False}),
        (QuantizationBody, {"bits": 4, "node": None, "name": None}),
        (BenchmarkBody, {"force": False}),
        (CacheBody, {"model": None, "node": None}),
        (
            WishBody,
            {
                "replicas": 1,
                "labels": [],
                "allow": [],
                "deny": [],
                "idle_unload_seconds": None,
                "eviction_cost": 10,
                "load_at_boot": True,
            },
        ),
        (PlacementBody, {"prompt_tokens": 1000, "max_tokens": None}),
    ],
)
def test_a_field_that_a_body_omits_has_its_default(kind: type[Body], defaults: dict[str, Any]):
    required = REQUIRED.get(kind, {})
    assert kind.model_validate(required).model_dump() == {**required, **defaults}

"""Every verb is a documented route with a scope, and no route can be used without a key unless it is listed here."""

import ast
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from coordinator.cli import COMMANDS, cluster
from docs.generate import contexts
from tests.support.cluster.application import Application, application

CLI = Path(__file__).parents[1] / "coordinator" / "cli"
SCOPES = {"infer", "metrics", "admin"}
OPEN = {
    "/health": "a load balancer asks it; it tells no names and no numbers of nodes",
    "/livez": "says only that the process runs",
    "/api/v1/openapi.json": "the description itself",
    "/api/v1/page/visits": "changes the code of a link that works once for a key",
    "/api/v1/ca.pem": "the certificate that a client needs before it can trust the connection on which it sends a key",
}
"""Paths that need no key, and the reasons."""
VERBS: dict[str, tuple[str, ...] | str] = {
    "up": "starts the coordinator",
    "join": "runs on the node, whose door is the link",
    "leave": "runs on the node, which says goodbye over its link",
    "status": ("GET /api/v1/status", "GET /api/v1/conditions"),
    "nodes": ("GET /api/v1/nodes",),
    "node": "a group",
    "node list": ("GET /api/v1/nodes",),
    "node show": ("GET /api/v1/nodes/{node}",),
    "node logs": ("GET /api/v1/nodes/{node}/logs",),
    "node cordon": ("POST /api/v1/nodes/{node}/cordon",),
    "node uncordon": ("POST /api/v1/nodes/{node}/uncordon",),
    "node allow-video": ("POST /api/v1/nodes/{node}/allow-video",),
    "node deny-video": ("POST /api/v1/nodes/{node}/deny-video",),
    "node drain": ("POST /api/v1/nodes/{node}/drain",),
    "node label": ("PUT /api/v1/nodes/{node}/labels",),
    "node remove": ("GET /api/v1/nodes/{node}", "DELETE /api/v1/nodes/{node}"),
    "backup": "reads the state folder: the file is the cluster, and goes through no API",
    "restore": "writes the state folder while no coordinator runs",
    "pause": ("POST /api/v1/nodes/{node}/pause",),
    "resume": ("POST /api/v1/nodes/{node}/resume",),
    "approve": ("GET /api/v1/joins", "POST /api/v1/joins/{code}", "DELETE /api/v1/joins/{code}"),
    "models": ("GET /api/v1/models",),
    "model want": ("PUT /api/v1/models/wishes/{model}",),
    "model unwant": ("DELETE /api/v1/models/wishes/{model}",),
    "model plan": ("GET /api/v1/models/plan",),
    "model": "a group",
    "model list": ("GET /api/v1/models",),
    "model show": ("GET /api/v1/models",),
    "model load": ("POST /api/v1/models/load",),
    "model files": ("GET /api/v1/models", "GET /api/v1/nodes"),
    "model rm": ("POST /api/v1/models/remove",),
    "model quantize": ("POST /api/v1/quantizations", "GET /api/v1/quantizations/{quantization}"),
    "model quantizations": ("GET /api/v1/quantizations",),
    "model quantizations cancel": ("DELETE /api/v1/quantizations/{quantization}",),
    "model bench": ("GET /api/v1/models", "POST /api/v1/benchmarks", "GET /api/v1/benchmarks"),
    "model verify": ("POST /api/v1/models/verify",),
    "pull": ("POST /api/v1/pulls", "GET /api/v1/pulls/{pull}"),
    "pulls": ("GET /api/v1/pulls",),
    "pulls list": ("GET /api/v1/pulls",),
    "pulls wait": ("GET /api/v1/pulls/{pull}",),
    "pulls cancel": ("DELETE /api/v1/pulls/{pull}",),
    "cache": "a group",
    "cache status": ("GET /api/v1/nodes",),
    "cache clear": ("POST /api/v1/cache/clear",),
    "model unload": ("POST /api/v1/models/unload",),
    "model profile": ("POST /api/v1/models/profile",),
    "video": "a group",
    "video install": "runs on the node alone",
    "place": ("POST /api/v1/place",),
    "explain": ("GET /api/v1/requests", "GET /api/v1/requests/{request_id}", "GET /api/v1/decisions"),
    "replay": "reads a file",
    "video list": ("GET /v1/videos",),
    "video show": ("GET /v1/videos/{video}",),
    "video create": (
        "GET /api/v1/videos/models",
        "POST /v1/videos",
        "GET /v1/videos/{video}",
        "GET /v1/videos/{video}/content",
    ),
    "video cancel": ("POST /v1/videos/{video}/cancel",),
    "video wait": ("GET /v1/videos/{video}",),
    "video get": ("GET /v1/videos/{video}/content",),
    "video leases": ("GET /api/v1/leases",),
    "video calibrate": (
        "POST /v1/videos",
        "GET /v1/videos/{video}",
        "DELETE /v1/videos/{video}",
        "GET /api/v1/videos/models",
    ),
    "chat": ("POST /v1/chat/completions", "GET /v1/models"),
    "open": ("POST /api/v1/page/links",),
    "login": ("GET /v1/models", "GET /api/v1/ca.pem"),
    "logout": "removes a file of this machine",
    "help": "prints the help",
    "env": "prints what the state folder says",
    "token": "a group",
    "token create": ("POST /api/v1/tokens",),
    "token list": ("GET /api/v1/tokens",),
    "token show": ("GET /api/v1/tokens",),
    "token revoke": ("DELETE /api/v1/tokens/{token}",),
    "key": "a group",
    "key create": ("POST /api/v1/keys",),
    "key show": ("GET /api/v1/keys",),
    "key limit": ("GET /api/v1/keys", "PUT /api/v1/keys/{key}/limits"),
    "key rename": ("GET /api/v1/keys", "PUT /api/v1/keys/{key}/name"),
    "key expire": ("GET /api/v1/keys", "PUT /api/v1/keys/{key}/expiry"),
    "key rotate": ("GET /api/v1/keys", "POST /api/v1/keys/{key}/rotate"),
    "key usage": ("GET /api/v1/keys/usage",),
    "simulate": "runs on this machine alone",
    "trust-ca": ("GET /api/v1/ca.pem",),
    "top": ("GET /api/v1/status", "GET /api/v1/nodes"),
    "logs": ("GET /api/v1/logs", "GET /api/v1/nodes/{node}/logs"),
    "events": ("GET /api/v1/events",),
    "metrics-config": (
        "GET /api/v1/keys",
        "POST /api/v1/keys",
        "DELETE /api/v1/keys/{key}",
        "GET /metrics",
        "GET /prometheus/sd",
        "GET /prometheus/nodes/{node}",
    ),
    "audit": ("GET /api/v1/audit",),
    "config": "a group",
    "config show": "reads files and environment of this machine",
    "config check": "reads files and environment of this machine",
    "service": "a group",
    "service install": "runs on this machine alone",
    "service uninstall": "runs on this machine alone",
    "service status": "runs on this machine alone",
    "service restart": "runs on this machine alone",
    "service logs": "runs on this machine alone",
    "doctor": ("GET /api/v1/version", "GET /api/v1/nodes", "GET /api/v1/conditions"),
    "key list": ("GET /api/v1/keys",),
    "key revoke": ("DELETE /api/v1/keys/{key}",),
    "version": ("GET /api/v1/version", "GET /api/v1/nodes"),
    "completion": "prints a script",
}
"""Each verb's routes, or the reason why it has none."""


@pytest.fixture
async def built(tmp_path: Path) -> AsyncIterator[Application]:
    async with application(tmp_path) as made:
        yield made


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield method.upper(), path, operation


def client(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", trust_env=False)


def filled(path: str) -> str:
    return re.sub(r"\{\w+\}", "x", path)


# verbs


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_verbs_line_is_there_and_its_command_can_be_imported(verb: str):
    line = COMMANDS[verb][1]
    command = cluster.get_command(None, verb)  # pyright: ignore[reportArgumentType]  the context is not used
    assert command is not None
    assert (command.help or "").strip()
    assert line.endswith(".")
    assert line[0].isupper()


def test_every_verb_has_its_route_or_a_reason(built: Application):
    verbs = [" ".join(path[1:]) for path, _ in contexts() if len(path) > 1]
    assert set(verbs) ^ set(VERBS) == set(), "name the routes of each verb, or a reason for none, in VERBS"
    assert len(verbs) == len(VERBS)
    documented = {f"{method} {path}" for method, path, _ in operations(built.document())}
    wanted = {route for routes in VERBS.values() if not isinstance(routes, str) for route in routes}
    assert wanted - documented == set()


def test_every_path_that_the_command_requests_is_documented(built: Application):
    documented = {filled(path) for path in built.document()["paths"]}
    asked = {path for file in CLI.rglob("*.py") for path in _paths(ast.parse(file.read_text()))}
    assert asked - documented == set()
    assert len(asked) > 10


def _paths(tree: ast.AST) -> Iterator[str]:
    """Yield every literal path of the API below a module, with its parameters written as x."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        else:
            continue
        if re.match(r"/(api/)?v1/\w", text) and " " not in text and not text.endswith("/"):
            yield text.partition("?")[0]


# routes


def test_every_route_is_described_with_one_scope(built: Application):
    for method, path, operation in operations(built.document()):
        assert operation.get("summary"), f"{method} {path} has no summary"
        if path in OPEN:
            assert operation["security"] == [], f"{method} {path} is open"
            assert "x-scope" not in operation
        else:
            assert operation.get("x-scope") in SCOPES, f"{method} {path} has no scope"
            assert operation["security"], f"{method} {path} needs a key"


def test_what_changes_something_needs_the_scope_admin(built: Application):
    reading = {"/api/v1/place"}
    wrong = [
        f"{method} {path}"
        for method, path, operation in operations(built.document())
        if method != "GET"
        and path not in (*reading, *OPEN)
        and operation.get("x-scope") != "admin"
        and "inference" not in operation["tags"]
    ]
    assert wrong == []


def test_the_document_refers_to_nothing_that_is_not_in_it(built: Application):
    document = built.document()
    text = repr(document)
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in document["components"]["schemas"], name
    schemes = {name for *_, operation in operations(document) for need in operation["security"] for name in need}
    assert schemes == set(document["components"]["securitySchemes"])


def test_every_route_of_the_control_application_is_documented(built: Application):
    documented = {(method, path) for method, path, _ in operations(built.document())}
    routes = [route for route in built.api.app.routes if isinstance(route, Route)]
    assert len(routes) == len(built.api.app.routes)
    served = {(m, r.path_format) for r in routes for m in r.methods or () if m != "HEAD" and r.path not in OPEN}
    assert served <= documented


def test_every_status_that_a_handler_names_is_described(built: Application):
    described = {
        (method, path): operation["responses"].keys() for method, path, operation in operations(built.document())
    }
    named = {
        (method, route.path_format): set(
            re.findall(r"\b[45]\d\d\b", (route.endpoint.__doc__ or "").partition("Raise")[2])
        )
        for route in built.api.app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert sum(map(len, named.values())) > 50
    assert {
        operation: missing
        for operation in named.keys() & described
        if (missing := named[operation] - described[operation])
    } == {}


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer mp_x_y"}, {"Authorization": "Basic YTpi"}, {"x-api-key": ""}],
    ids=["no key", "a wrong key", "another scheme", "an empty key"],
)
async def test_no_route_answers_without_a_key(built: Application, headers: dict[str, str]):
    async with client(built.app) as anybody:
        for method, path, _ in operations(built.document()):
            if path not in OPEN:
                answer = await anybody.request(method, filled(path), headers=headers, json={})
                assert answer.status_code == 401, f"{method} {path} answers {answer.status_code} without a key"


async def test_a_key_opens_only_the_routes_of_its_scope(built: Application):
    keys = {scope: built.admin.create_key(scope, [scope], None)["key"] for scope in SCOPES}
    async with client(built.app) as program:
        for method, path, operation in operations(built.document()):
            if path in OPEN:
                continue
            for scope, key in keys.items():
                if scope not in (operation["x-scope"], "admin"):
                    headers = {"Authorization": f"Bearer {key}"}
                    answer = await program.request(method, filled(path), headers=headers, json={})
                    assert answer.status_code == 403, f"{method} {path} with {scope}: {answer.status_code}"
        headers = {"Authorization": f"Bearer {keys['metrics']}"}
        assert (await program.get("/api/v1/nodes", headers=headers)).status_code == 200


async def test_what_is_not_documented_is_not_found(built: Application):
    async with client(built.app) as anybody:
        for path in ("/docs", "/redoc", "/openapi.json", "/api", "/api/v1", "/api/v1/nothing", "/v1", "/v1/x"):
            assert (await anybody.get(path)).status_code == 404, path

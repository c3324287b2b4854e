"""Encoding of the answers of the control routes."""

import json
import time
from pathlib import Path

import httpx

from coordinator.http.origin_check import OriginCheck
from router.errors import build_invalid
from tests.support.cluster.application import application

REQUESTS = 500


async def test_a_long_answer_takes_the_loop_a_small_multiple_of_the_time_to_parse_it(tmp_path: Path):
    """No token arrives while an answer is encoded."""
    async with application(tmp_path) as built:
        for number in range(REQUESTS):
            built.dispatcher.history.record_invalid(0.0, f"r{number}", "k", build_invalid("no"))
        key = built.admin.create_key("boss", ["admin"], None)["key"]
        transport = httpx.ASGITransport(app=built.app)
        encoded, parsed = list[float](), list[float]()
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers={"authorization": f"Bearer {key}"}
        ) as client:
            for _ in range(4):  # the first request builds the route
                began = time.thread_time()
                answer = await client.get("/api/v1/requests", params={"last": REQUESTS})
                encoded.append(time.thread_time() - began)
                began = time.thread_time()
                assert len(json.loads(answer.content)["requests"]) == REQUESTS
                parsed.append(time.thread_time() - began)
    assert min(encoded) < 12 * min(parsed), (encoded, parsed)


async def test_the_openapi_document_is_built_once_for_all_clients(tmp_path: Path):
    """A client needs no key for it, and no token arrives meanwhile."""
    async with application(tmp_path) as built:
        transport = httpx.ASGITransport(app=built.app)
        sent, parsed, contents = list[float](), list[float](), set[bytes]()
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for _ in range(5):
                began = time.thread_time()
                contents.add((await client.get("/api/v1/openapi.json")).content)
                sent.append(time.thread_time() - began)
                began = time.thread_time()
                assert json.loads(next(iter(contents)))["info"]["title"] == "Macpool"
                parsed.append(time.thread_time() - began)
    assert len(contents) == 1
    assert min(sent) < 6 * min(parsed), (sent, parsed)


async def test_every_error_has_the_id_of_its_request(tmp_path: Path):
    foreign = {"origin": "https://evil.example"}
    async with application(tmp_path) as built:
        key = built.admin.create_key("laptop", ["metrics"], None)["key"]
        transport = httpx.ASGITransport(app=OriginCheck(built.app))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers={"authorization": f"Bearer {key}"}
        ) as client:
            for method, path, headers, status in (
                ("GET", "/api/v1/nodes/nowhere", {}, 404),
                ("GET", "/api/v1/nothing", {}, 404),
                ("GET", "/api/v1/status/", {}, 404),
                ("GET", "/ui/nothing.js", {}, 404),
                ("GET", "/api/v1/keys", {}, 403),
                ("POST", "/api/v1/keys", foreign, 403),
            ):
                named = await client.request(method, path, headers={**headers, "x-request-id": "mine-1"})
                unnamed = await client.request(method, path, headers={**headers, "x-request-id": "not valid"})
                ids = [
                    (answer.json()["error"]["request_id"], answer.headers["x-request-id"])
                    for answer in (named, unnamed)
                ]
                assert (named.status_code, ids[0]) == (status, ("mine-1", "mine-1"))
                assert ids[1][0] == ids[1][1] not in ("", "not valid")


async def test_an_invalid_field_or_parameter_is_named(tmp_path: Path):
    async with application(tmp_path) as built:
        key = built.admin.create_key("boss", ["admin"], None)["key"]
        transport = httpx.ASGITransport(app=built.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers={"authorization": f"Bearer {key}"}
        ) as client:
            for method, path, body, param in (
                ("POST", "/api/v1/keys", {"name": ""}, "name"),
                ("POST", "/api/v1/keys", {"name": "a", "scopes": ["infer", "all"]}, "scopes.1"),
                ("GET", "/api/v1/audit?last=0", None, "last"),
                ("PUT", "/api/v1/keys/a/name", None, None),
            ):
                answer = await client.request(method, path, json=body)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param)
                assert error["message"].startswith(f"{param or 'body'}")

"""The router without a control app: connections that are no HTTP requests, and the keys of requests."""

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from router.admission.api_keys import ApiKey, KeyRing, create_anonymous_key, new_key
from router.admission.rate_limits import KeyLimits
from router.dispatch.request import RequestSpec
from router.errors import FORWARDED_WITHOUT_KEY, NO_KEY, WRONG_KEY, Problem, build_missing_scope, build_wrong_method
from router.http.app import CHAT as CHAT_PATH
from router.http.app import authorize
from router.http.exchange import MAX_INLINE_BYTES, Exchange
from router.http.sse import Message as AsgiMessage
from router.placement.candidate import ResourceDemand
from router.settings import RouterSettings
from tests.support.cluster.asgi_call import CHAT, Call
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode, a_memory, a_model
from wire.frames import CountTokens, GenerationParams, Message
from wire.units import MIB

PEPPER = b"0123456789abcdef"


async def test_websocket_is_closed_before_it_is_accepted():
    events = asyncio.Queue[AsgiMessage]()
    events.put_nowait({"type": "websocket.connect"})
    sent: list[AsgiMessage] = []

    async def send(event: AsgiMessage) -> None:
        sent.append(event)

    cluster = LoopbackCluster(LoopbackNode("studio"))
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await cluster.app(scope, events.get, send)
    assert sent == [{"type": "websocket.close"}]
    assert events.empty(), "the connect event was received first"


async def receive() -> AsgiMessage:
    return {"type": "http.request", "body": b""}


async def send(event: AsgiMessage) -> None:
    raise AssertionError(f"{event} was sent")


def a_ring(*, anonymous: bool = False) -> tuple[KeyRing, ApiKey, str]:
    """Return a ring with one key for inference, the key, and its text."""
    ring = KeyRing(PEPPER, anonymous=create_anonymous_key(0.0) if anonymous else None)
    key, text = new_key(PEPPER, "laptop", ["infer"], created=1.0)
    ring.put(key)
    return ring, key, text


def check(
    ring: KeyRing, text: str | None, method: str = "POST", scope: str = "infer", *, header: bytes = b"accept"
) -> ApiKey | Problem:
    """Authorize a request with a key and another header to a route with the methods GET and POST."""
    headers = [(header, b"1"), *([] if text is None else [(b"x-api-key", text.encode())])]
    exchange = Exchange({"method": method, "path": "/v1/models", "headers": headers}, receive, send)
    return authorize(ring, exchange, ("GET", "POST"), scope)


def test_a_request_is_authorized_by_its_method_and_its_key():
    ring, key, text = a_ring()
    assert check(ring, text) == check(ring, text, "GET") == key
    assert check(ring, text, "DELETE") == build_wrong_method("DELETE", "GET, POST")
    assert check(ring, text, scope="metrics") == build_missing_scope("metrics")
    assert check(ring, None) == NO_KEY
    assert ring.refused == 0
    assert check(ring, "mp_unknown_secret") == WRONG_KEY
    assert ring.refused == 1


def test_a_request_without_a_key_is_anonymous_only_where_that_is_set():
    ring, key, text = a_ring(anonymous=True)
    assert check(ring, None) == check(ring, "sk-other") == ring.anonymous
    assert check(ring, text) == key
    assert check(ring, "mp_unknown_secret") == WRONG_KEY
    assert check(ring, None, scope="metrics") == build_missing_scope("metrics")


@pytest.mark.parametrize("header", [b"x-forwarded-for", b"forwarded", b"via", b"x-real-ip", b"cf-connecting-ip"])
def test_a_request_that_a_proxy_forwarded_needs_a_key(header: bytes):
    ring, key, text = a_ring(anonymous=True)
    assert check(ring, None, header=header) == check(ring, "sk-other", header=header) == FORWARDED_WITHOUT_KEY
    assert check(ring, text, header=header) == key


# other routes


async def call(cluster: LoopbackCluster, path: str, method: str = "GET", body: object = b"", **headers: str) -> Call:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await Call(cluster, body, path=path, method=method, headers=named).run()


@pytest.mark.parametrize(("state", "status", "text"), [("ready", 200, "ok"), ("lost", 503, "unavailable")])
async def test_health_names_the_reason_to_those_with_a_key_only(state: str, status: int, text: str):
    cluster = LoopbackCluster(LoopbackNode("studio", state=state), LoopbackNode("mini", state="lost"))
    with_key = await call(cluster, "/health")
    ready = int(state == "ready")
    found = json.loads(with_key.body)
    assert (with_key.status, found.pop("status"), bool(found.pop("reason"))) == (status, text, not ready)
    assert found == {"nodes_ready": ready, "waiting": 0}
    for key in ("mp_wrong", ""):
        without = await call(cluster, "/health", authorization=f"Bearer {key}")
        assert (without.status, json.loads(without.body)) == (status, {"status": text})
    assert (await call(cluster, "/health", "POST")).status == 405
    assert cluster.dispatcher.counters.answers == {}, "health is no answer of a model route"


async def test_health_counts_the_queued_requests():
    cluster = LoopbackCluster(LoopbackNode("studio", a_memory(MIB)))
    demand, said = ResourceDemand("tiny", 100), (Message("user", "hi"),)
    request = cluster.dispatcher.submit(RequestSpec(demand, "k", "r", said, GenerationParams(), 0, stream=True))
    found = json.loads((await call(cluster, "/health")).body)
    assert (found["nodes_ready"], found["waiting"]) == (1, 1)
    cluster.dispatcher.close(request)


async def test_livez_is_independent_of_nodes():
    cluster = LoopbackCluster()
    assert [(await call(cluster, "/livez", method)).status for method in ("GET", "HEAD", "POST")] == [200, 200, 405]


async def test_models_are_listed_in_the_dialect_of_the_client():
    cluster = LoopbackCluster(LoopbackNode("studio"))
    for version, kind in (({}, "object"), ({"anthropic_version": "2023-06-01"}, "type")):
        listed, one = await call(cluster, "/v1/models", **version), await call(cluster, "/v1/models/tiny", **version)
        (row,) = json.loads(listed.body)["data"]
        assert (listed.status, one.status, row["id"], row[kind]) == (200, 200, "tiny", "model")
        assert json.loads(one.body)["id"] == "tiny"
        assert (await call(cluster, "/v1/models/other", **version)).status == 404
        assert (await call(cluster, "/v1/models", "POST", **version)).status == 405
        assert (await call(cluster, "/v1/models", authorization="", **version)).status == 401


@pytest.mark.parametrize(
    ("path", "method", "body", "status"),
    [
        ("/api/tags", "GET", b"", 200),
        ("/api/tags", "POST", b"", 405),
        ("/api/ps", "GET", b"", 200),
        ("/api/version", "HEAD", b"", 200),
        ("/api/show", "POST", {"model": "tiny"}, 200),
        ("/api/show", "POST", {"model": "other"}, 404),
        ("/api/show", "POST", b"{" + b" " * MAX_INLINE_BYTES, 413),
        ("/api/show", "GET", b"", 405),
        ("/api/pull", "POST", {"model": "tiny"}, 501),
        ("/api/blobs/sha256:00", "HEAD", b"", 501),
        ("/v1/responses/resp_1", "GET", b"", 404),
        ("/v1/responses/resp_1", "DELETE", b"", 404),
        ("/v1/responses/resp_1", "PUT", b"", 405),
        ("/v1/other", "GET", b"", 404),
    ],
)
async def test_routes_without_a_model_answer_check_method_and_key(path: str, method: str, body: object, status: int):
    cluster = LoopbackCluster(LoopbackNode("studio"))
    assert (await call(cluster, path, method, body)).status == status
    if path != "/v1/other":
        assert cluster.dispatcher.counters.answers == {status: 1}
        assert (await call(cluster, path, method, body, authorization="")).status == (405 if status == 405 else 401)


async def test_a_key_sees_its_models_only():
    cluster = LoopbackCluster(LoopbackNode("studio", models=(a_model(), a_model("small"))))
    (key,) = cluster.keys.list()
    cluster.keys.put(replace(key, limits=KeyLimits(models=("small",))))
    listed = [json.loads((await call(cluster, path)).body) for path in ("/v1/models", "/api/tags", "/api/ps")]
    assert [row["id"] for row in listed[0]["data"]] == ["small"]
    assert [[row["model"] for row in one["models"]] for one in listed[1:]] == [["small"], ["small"]]
    assert (await call(cluster, "/v1/models/tiny")).status == 404
    assert (await call(cluster, "/api/show", "POST", {"model": "tiny"})).status == 404


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}], "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
    "/v1/embeddings": {"input": "hi"},
    "/api/embed": {"input": "hi"},
    "/api/embeddings": {"prompt": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["a"]},
    "/v2/rerank": {"query": "hi", "documents": ["a"]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_fields_are_refused_on_every_route_only_if_that_is_set(path: str):
    for rule, refused in (("ignore", False), ("refuse", True)):
        cluster = LoopbackCluster(LoopbackNode("studio"), settings=RouterSettings(unknown_fields=rule))  # pyright: ignore
        assert BODIES.keys() == {*cluster.app.dialects, "/v1/messages/count_tokens"}  # pyright: ignore
        answer = await call(cluster, path, "POST", BODIES[path] | {"model": "unknown", "made_up": 1})
        assert answer.status == (400 if refused else 404)
        assert (b"made_up" in answer.body) is refused


async def test_answers_and_lists_have_the_time_of_the_clock():
    cluster = LoopbackCluster(LoopbackNode("studio"))
    before = int(time.time()) - 1
    listed = json.loads((await call(cluster, "/v1/models")).body)["data"][0]["created"]
    answered = json.loads((await call(cluster, CHAT_PATH, "POST", CHAT)).body)["created"]
    assert before <= min(listed, answered) <= max(listed, answered) <= time.time()


async def test_a_prompt_is_counted_for_the_key():
    node = LoopbackNode("studio")
    cluster = LoopbackCluster(node)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 40}]}
    counted = await call(cluster, "/v1/messages/count_tokens", "POST", body)
    assert (counted.status, counted.body) == (200, b'{"input_tokens":11}')
    assert "x-macpool-ignored" not in counted.headers
    (frame,) = node.heard
    (key,) = cluster.keys.list()
    assert isinstance(frame, CountTokens)
    assert frame.weighted_key.name == key.id
    assert (await call(cluster, "/v1/messages/count_tokens", "GET")).status == 405


async def test_a_count_names_the_fields_without_effect_and_is_counted_by_its_status():
    cluster = LoopbackCluster(LoopbackNode("studio"))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "service_tier": "auto"}
    counted = await call(cluster, "/v1/messages/count_tokens", "POST", body)
    assert (counted.status, counted.headers["x-macpool-ignored"]) == (200, "service_tier")
    assert (await call(cluster, "/v1/models")).status == 200
    assert (await call(cluster, "/v1/models/other")).status == 404
    assert cluster.dispatcher.counters.answers == {200: 2, 404: 1}


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", b"{", 400, "invalid_request"),
        ("/v1/messages/count_tokens", b"{", 400, "invalid_request"),
        ("/v1/messages/count_tokens", {"model": "no", "messages": []}, 400, "invalid_request"),
        (
            "/v1/messages/count_tokens",
            {"model": "no", "messages": [{"role": "user", "content": "x"}]},
            404,
            "model_not_found",
        ),
    ],
)
async def test_an_invalid_request_is_recorded_with_its_key(path: str, body: object, status: int, code: str):
    cluster = LoopbackCluster(LoopbackNode("studio"))
    answer = await call(cluster, path, "POST", body, x_request_id="mine")
    (record,) = cluster.dispatcher.history.find_requests("mine")
    (key,) = cluster.keys.list()
    assert (answer.status, record.outcome, record.key) == (status, code, key.id)


async def test_a_stored_response_is_read_and_deleted_by_its_key_only():
    cluster = LoopbackCluster(LoopbackNode("studio"))
    made = json.loads((await call(cluster, "/v1/responses", "POST", {"model": "tiny", "input": "hi"})).body)
    path = f"/v1/responses/{made['id']}"
    stranger = f"Bearer {cluster.make_key('infer')}"
    for method in ("GET", "DELETE"):
        assert (await call(cluster, path, method, authorization=stranger)).status == 404
    found = await call(cluster, path)
    assert (found.status, json.loads(found.body)["id"]) == (200, made["id"])
    deleted = await call(cluster, path, "DELETE")
    assert (deleted.status, json.loads(deleted.body)["deleted"]) == (200, True)
    assert (await call(cluster, path)).status == 404


async def test_a_short_limit_of_bodies_applies_to_every_route():
    cluster = LoopbackCluster(LoopbackNode("studio"), settings=RouterSettings(max_body_bytes=1024))
    for path in ("/api/show", "/v1/chat/completions"):
        refused = await call(cluster, path, "POST", b'{"model": "' + b"x" * 1024 + b'"}')
        assert (refused.status, b"1024 bytes" in refused.body) == (413, True), refused.body


async def test_a_long_body_that_waits_too_long_for_others_of_its_key_is_refused_with_the_numbers():
    settings = RouterSettings(max_body_bytes=2 * MAX_INLINE_BYTES, body_timeout_seconds=0.2)
    cluster = LoopbackCluster(LoopbackNode("studio"), settings=settings)
    calls = [Call(cluster, b" " * (MAX_INLINE_BYTES + 1), more=True) for _ in range(3)]
    first, *waiting = await asyncio.gather(*(call.run() for call in calls))
    assert first.status == 408
    refused = next(call for call in waiting if call.status == 429)
    assert refused.headers["retry-after"] == "1"
    assert refused.error["message"] == (
        "this API key may send 128.0 KiB of long bodies at the same time; this body of 128.0 KiB waited 0.2 s: send "
        "fewer bodies at once"
    )
    again = await Call(cluster, b" " * (MAX_INLINE_BYTES + 1), more=True).run()
    assert again.status == 408, "the room of the first body is free again"


@pytest.mark.parametrize(
    ("limits", "status", "message"),
    [
        (KeyLimits(concurrency=2), 400, "3 requests, and the limit of this API key is 2 open: send at most 2 prompts"),
        (KeyLimits(requests_per_minute=2), 400, "limit of this API key is 2 per minute: send at most 2 prompts"),
        (KeyLimits(concurrency=3, requests_per_minute=3), 200, ""),
    ],
)
async def test_more_prompts_than_a_key_may_ever_send_are_refused_for_good(limits: KeyLimits, status: int, message: str):
    node = LoopbackNode("studio")
    cluster = LoopbackCluster(node)
    cluster.limits = lambda _: limits
    body = {"model": "tiny", "prompt": ["one", "two", "three"]}
    call = await Call(cluster, body, path="/v1/completions").run()
    assert call.status == status
    if message:
        assert (call.error["code"], call.error["param"], node.heard) == ("invalid_request", "prompt", [])
        assert message in call.error["message"]

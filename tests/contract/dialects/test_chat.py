"""Chat completions through the fast path and the ASGI application, over a real server and a real client library."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import httpx
import openai
import pytest

from router.http.app import OLLAMA_PATHS, build_openapi_paths, build_openapi_schemas
from router.settings import RouterSettings
from tests.support.cluster.loopback_cluster import TEXT, LoopbackCluster, LoopbackNode, a_memory, a_model
from wire.frames import Cancel, Delta, Deltas, Generate
from wire.identity import NodeId
from wire.refusals import RefusalCode, Refused
from wire.units import GIB, MIB

ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
NOT_THERE: dict[str, Any] = ASK | {"model": "tinny"}
CHAT = "/v1/chat/completions"


@pytest.fixture
async def cluster() -> AsyncIterator[LoopbackCluster]:
    async with served(LoopbackCluster(LoopbackNode("studio"), LoopbackNode("mini"))) as one:
        yield one


@pytest.fixture(autouse=True, params=["front", "asgi"])
def by(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run every test through the product's own protocol and through the ASGI app alone: both must answer the same."""
    before, LoopbackCluster.front = LoopbackCluster.front, request.param == "front"
    yield request.param
    LoopbackCluster.front = before


@contextlib.asynccontextmanager
async def served(cluster: LoopbackCluster) -> AsyncIterator[LoopbackCluster]:
    async with cluster.serving() as url:
        cluster.base_url = url
        yield cluster
    cluster.dispatcher.ledger.check()
    assert cluster.dispatcher.ledger.empty
    assert len(cluster.dispatcher.queue) == 0


def library(cluster: LoopbackCluster, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=cluster.base_url + "/v1",
        api_key=cluster.key,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, timeout=60),
        **options,
    )


def plain(cluster: LoopbackCluster, key: str | None = None) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key or cluster.key}"}
    return httpx.AsyncClient(trust_env=False, base_url=cluster.base_url, headers=headers, timeout=20)


async def until(happens) -> None:
    async with asyncio.timeout(30):
        while not happens():  # noqa: ASYNC110  what is waited for tells nobody
            await asyncio.sleep(0.005)


async def collect(stream) -> list:
    return [chunk async for chunk in stream]


# answers


async def test_a_whole_answer(cluster: LoopbackCluster):
    async with library(cluster) as client:
        raw = await client.chat.completions.with_raw_response.create(**ASK)
        answer = raw.parse()
    assert answer.choices[0].message.content == "".join(TEXT)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(TEXT)
    assert raw.headers["x-macpool-node"] in {"studio", "mini"}
    assert raw.headers["x-macpool-attempts"] == "1"
    assert raw.headers["x-request-id"] == answer.id.removeprefix("chatcmpl-")


async def test_a_stream_with_two_choices_and_usage(cluster: LoopbackCluster):
    texts = {0: "", 1: ""}
    reasons: dict[int, str] = {}
    usage = None
    async with library(cluster) as client:
        stream = await client.chat.completions.create(
            **ASK, n=2, stream=True, stream_options={"include_usage": True}, stop=["never"], max_tokens=100
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
    assert texts == {0: "".join(TEXT), 1: "".join(TEXT)}
    assert reasons == {0: "stop", 1: "stop"}
    assert usage is not None
    assert usage.completion_tokens == 2 * len(TEXT)
    sent = next(frame for node in cluster.nodes.values() for frame in node.heard if isinstance(frame, Generate))
    assert (sent.params.n, sent.params.stop, sent.params.max_tokens) == (2, ("never",), 100)


async def test_max_tokens_ends_with_length(cluster: LoopbackCluster):
    async with library(cluster) as client:
        answer = await client.chat.completions.create(**ASK, max_completion_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "The pool "


async def test_the_request_id_is_taken_over_only_if_it_is_safe(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        good = await client.post(CHAT, json=ASK, headers={"x-request-id": "trace-1.a_b"})
        bad = await client.post(CHAT, json=ASK, headers={"x-request-id": "no spaces, please"})
    assert good.headers["x-request-id"] == "trace-1.a_b"
    assert bad.headers["x-request-id"] not in {"", "no spaces, please"}


async def test_many_at_once_share_the_nodes(cluster: LoopbackCluster):
    async with library(cluster) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(40)))
    assert {answer.choices[0].message.content for answer in answers} == {"".join(TEXT)}
    counts = [sum(isinstance(frame, Generate) for frame in node.heard) for node in cluster.nodes.values()]
    assert sum(counts) == 40
    assert min(counts) >= 10


# refusals


async def test_refused_request_is_retried_without_delay(cluster: LoopbackCluster):
    """Place each request first on `studio`, which refuses it: `mini` has less headroom."""
    cluster.nodes[NodeId("mini")].memory = a_memory(4 * GIB)
    cluster.report()
    async with library(cluster) as client:
        await client.chat.completions.create(**ASK)
        slowest = 0.0
        for _ in range(20):
            cluster.nodes[NodeId("studio")].refuse = 1
            started = time.perf_counter()
            raw = await client.chat.completions.with_raw_response.create(**ASK)
            slowest = max(slowest, time.perf_counter() - started)
            assert raw.parse().choices[0].message.content == "".join(TEXT)
            cluster.report()
    assert slowest < 1.0
    assert cluster.dispatcher.counters.retries == 20


async def test_when_all_refuse_the_answer_is_a_503_with_the_numbers():
    settings = RouterSettings(queue_timeout_seconds=0.2)
    nodes = [LoopbackNode(name, memory=a_memory(size)) for name, size in (("a", MIB), ("b", 2 * MIB))]
    async with served(LoopbackCluster(*nodes, settings=settings)) as cluster, plain(cluster) as client:
        answer = await client.post(CHAT, json=ASK)
    assert answer.status_code == 503
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("no_headroom", "server_error")
    assert error["memory"]["headroom"] == 2 * MIB
    assert set(error["memory"]) == {
        "predicted",
        "ceiling",
        "current",
        "reserved",
        "estimate",
        "margin",
        "cap",
        "headroom",
        "bound_by",
    }
    assert "best node b has 2.0 MiB" in error["message"]


async def test_queued_request_starts_when_room_is_free():
    node = LoopbackNode("a", memory=a_memory(MIB))
    async with served(LoopbackCluster(node)) as cluster:
        async with library(cluster) as client:
            waiting = asyncio.create_task(client.chat.completions.create(**ASK))
            await until(lambda: len(cluster.dispatcher.queue) == 1)
            node.memory = a_memory()
            answer = await waiting
        assert answer.choices[0].message.content == "".join(TEXT)
        assert cluster.dispatcher.counters.queue_seconds > 0


async def test_can_never_fit_is_a_400_after_a_node_has_counted():
    refusal = Refused(RefusalCode.TOO_LARGE, "never", None, None, "a")
    async with (
        served(LoopbackCluster(LoopbackNode("a", refuse=1, refusal=refusal))) as cluster,
        plain(cluster) as client,
    ):
        answer = await client.post(CHAT, json=ASK)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "prefill_memory_exceeded"


async def test_over_the_share_of_one_key_is_a_429():
    node = LoopbackNode("a", memory=a_memory(MIB))
    async with (
        served(LoopbackCluster(node, settings=RouterSettings(queue_timeout_seconds=1.0))) as cluster,
        plain(cluster) as client,
    ):
        waiting = [asyncio.create_task(client.post(CHAT, json=ASK)) for _ in range(17)]
        done = [task.result() for task in (await asyncio.wait(waiting, return_when="FIRST_COMPLETED"))[0]]
        node.memory = a_memory()
        answers = await asyncio.gather(*waiting)
    assert [answer.status_code for answer in done] == [429]
    assert done[0].json()["error"]["code"] == "over_share"
    assert "retry-after" in done[0].headers
    assert sorted(answer.status_code for answer in answers) == [200] * 16 + [429]


# clients that disconnect, nodes that crash


async def test_a_client_that_leaves_is_cancelled_at_the_node():
    node = LoopbackNode("a", text=("word ",) * 10_000, step_seconds=0.005)
    async with served(LoopbackCluster(node)) as cluster:
        async with plain(cluster) as client:
            async with client.stream("POST", CHAT, json=ASK | {"stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if "word" in line:
                        break
            await until(lambda: any(isinstance(frame, Cancel) for frame in node.heard))
        await until(lambda: cluster.dispatcher.count_in_flight(node.id) == 0)
        assert cluster.dispatcher.counters.requests == {"cancelled": 1}


@pytest.mark.parametrize("headroom", [8 * GIB, MIB])
async def test_a_client_that_leaves_before_the_answer_frees_everything(headroom: int):
    node = LoopbackNode("a", mute=True, memory=a_memory(headroom))
    async with served(LoopbackCluster(node)) as cluster:
        async with plain(cluster) as client:
            asking = asyncio.create_task(client.post(CHAT, json=ASK))
            await until(lambda: cluster.dispatcher.count_in_flight(node.id) + len(cluster.dispatcher.queue) == 1)
            asking.cancel()
            await until(lambda: cluster.dispatcher.count_in_flight(node.id) + len(cluster.dispatcher.queue) == 0)
        assert cluster.dispatcher.counters.requests == {"cancelled": 1}
        await until(lambda: cluster.dispatcher.counters.answers == {499: 1})


async def test_a_node_lost_before_the_first_byte_is_not_noticed(cluster: LoopbackCluster):
    for node in cluster.nodes.values():
        node.mute = True
    async with library(cluster) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASK))
        await until(lambda: any(node.reserved for node in cluster.nodes.values()))
        first, other = sorted(cluster.nodes.values(), key=lambda node: not node.reserved)
        other.mute = False
        cluster.cut(first)
        answer = await asking
    assert answer.choices[0].message.content == "".join(TEXT)


@pytest.mark.parametrize("end", ["cut", "fail", "drain", "stop"])
async def test_a_node_lost_in_the_middle_is_not_noticed(end: str):
    nodes = [LoopbackNode(name, text=tuple(f"{number} " for number in range(200)), step_seconds=0.002) for name in "ab"]
    async with (
        served(LoopbackCluster(*nodes)) as cluster,
        plain(cluster) as client,
        client.stream("POST", CHAT, json=ASK | {"stream": True, "stream_options": {"include_usage": True}}) as answer,
    ):
        chunks, line = list[Any](), None
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunks.append(json.loads(line.removeprefix("data: ")))
            if len(chunks) == 50:
                went = next(node for node in nodes if node.reserved)
                if end == "cut":
                    cluster.cut(went)
                elif end == "drain":
                    went.state = "draining"
                    cluster.report()
                else:
                    cluster.fail(went, "engine_lost" if end == "fail" else "node_stopping")
        assert line == ""
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == "".join(f"{number} " for number in range(200))
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks if chunk["choices"]].count("assistant") == 1
    assert chunks[-1]["usage"]["completion_tokens"] == 200
    assert answer.headers["x-macpool-attempts"] == "1"
    assert [sum(isinstance(frame, Generate) for frame in node.heard) for node in nodes] == [1, 1]


async def test_a_node_lost_in_the_middle_without_another_node_is_an_error():
    node = LoopbackNode("a", text=("word ",) * 10_000, step_seconds=0.005)
    async with (
        served(LoopbackCluster(node)) as cluster,
        plain(cluster) as client,
        client.stream("POST", CHAT, json=ASK | {"stream": True}) as answer,
    ):
        lines: list[str] = []
        async for line in answer.aiter_lines():
            lines.append(line)
            if "word" in line and node.up:
                cluster.cut(node)
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert error["code"] == "node_lost"
    assert error["request_id"] == answer.headers["x-request-id"]
    assert not any("[DONE]" in line for line in lines)


async def test_the_client_library_raises_what_happened_in_the_middle():
    node = LoopbackNode("a", text=("word ",) * 10_000, step_seconds=0.005)
    async with served(LoopbackCluster(node)) as cluster, library(cluster) as client:
        stream = await client.chat.completions.create(**ASK, stream=True)
        await anext(stream)
        cluster.fail(node)
        with pytest.raises(openai.APIError, match="the engine ended with signal 6"):
            await collect(stream)


async def test_an_engine_that_crashes_before_the_first_byte_is_a_500(cluster: LoopbackCluster):
    for node in cluster.nodes.values():
        node.mute = True
    async with plain(cluster) as client:
        asking = asyncio.create_task(client.post(CHAT, json=ASK))
        await until(lambda: any(node.reserved for node in cluster.nodes.values()))
        for node in cluster.nodes.values():
            cluster.fail(node)
        answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_crashed")


async def test_a_reader_that_does_not_read_loses_its_stream_alone():
    node = LoopbackNode("a", mute=True)
    settings = RouterSettings(slow_client_bytes=1 * MIB)
    async with served(LoopbackCluster(node, settings=settings)) as cluster:
        host, port = cluster.base_url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(ASK | {"stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {cluster.key}\r\n"
        writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        await until(lambda: node.reserved)
        cast("asyncio.Transport", writer.transport).pause_reading()
        request = next(iter(node.reserved))
        async with asyncio.timeout(20):
            while not any(isinstance(frame, Cancel) for frame in node.heard):
                cluster.say(node, Deltas((Delta(request, 0, (1,), ((0, "x" * 50_000),)),)))
                await asyncio.sleep(0)
        node.mute = False
        async with library(cluster) as client:
            answer = await client.chat.completions.create(**ASK)
        assert answer.choices[0].message.content == "".join(TEXT)
        assert cluster.dispatcher.counters.slow_clients == 1
        writer.close()


async def test_a_long_prefill_keeps_the_connection_alive():
    node = LoopbackNode("a", mute=True)
    async with served(LoopbackCluster(node, settings=RouterSettings(keepalive_seconds=0.1))) as cluster:
        async with plain(cluster) as client, client.stream("POST", CHAT, json=ASK | {"stream": True}) as answer:
            comments = 0
            async for line in answer.aiter_lines():
                comments += line == ": waiting"
                if comments == 2:
                    break
        assert answer.status_code == 200


async def test_a_connection_at_rest_is_closed_and_one_that_waits_for_an_answer_is_not():
    node = LoopbackNode("a")
    cluster = LoopbackCluster(node)
    cluster.rest = 0.3
    async with served(cluster):
        host, port = cluster.base_url.removeprefix("http://").split(":")
        body = json.dumps(ASK).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {cluster.key}\r\n"
        asked = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        reader, writer = await asyncio.open_connection(host, int(port))
        resting, other = await asyncio.open_connection(host, int(port))
        writer.write(asked)
        assert b" 200 " in await reader.readuntil(b"\r\n"), "from now on it could be closed"
        other.write(asked)
        assert b" 200 " in await resting.readuntil(b"\r\n")
        node.mute = True
        writer.write(asked)
        await asyncio.wait_for(resting.read(), 20)
        await until(lambda: node.reserved)
        assert not cluster.dispatcher.idle, "the first waits still"
        cluster.fail(node)
        assert b" 500 " in await asyncio.wait_for(reader.read(), 20), "it is answered, and closed after its own rest"
        for each in (writer, other):
            each.close()
            await each.wait_closed()


async def test_stopping_ends_streams_honestly():
    node = LoopbackNode("a", mute=True)
    async with served(LoopbackCluster(node)) as cluster, plain(cluster) as client:
        asking = asyncio.create_task(client.post(CHAT, json=ASK))
        await until(lambda: node.reserved)
        cluster.dispatcher.shutdown()
        answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert "retry-after" in answer.headers


# keys, methods, paths


async def test_every_way_a_key_can_be_wrong(cluster: LoopbackCluster):
    expired = cluster.make_key("infer", expires=time.time() - 1)
    async with httpx.AsyncClient(trust_env=False, base_url=cluster.base_url) as client:
        for path in ("/v1/models", CHAT):
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": f"Basic {cluster.key}"},
                {"x-api-key": "ü"},
                {"authorization": f"Bearer {expired}"},
                {"authorization": f"Bearer {cluster.key}x"},
            ):
                method = "GET" if path == "/v1/models" else "POST"
                raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
                answer = await client.request(method, path, headers=raw)
                assert answer.status_code == 401, (path, headers)
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        good = await client.get("/v1/models", headers={"x-api-key": cluster.key})
        assert good.status_code == 200


async def test_a_key_without_the_scope_is_a_403(cluster: LoopbackCluster):
    async with plain(cluster, cluster.make_key("metrics")) as client:
        answer = await client.post(CHAT, json=ASK)
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
        assert "--scope infer" in answer.json()["error"]["message"]
    async with plain(cluster, cluster.make_key("admin")) as client:
        assert (await client.post(CHAT, json=ASK)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", CHAT, "POST"),
        ("OPTIONS", CHAT, "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/tiny", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
        ("POST", "/livez", "GET, HEAD"),
    ],
)
async def test_wrong_method_is_a_405_with_allow(cluster: LoopbackCluster, method: str, path: str, allow: str):
    async with plain(cluster) as client:
        answer = await client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert answer.json()["error"]["code"] == "method_not_allowed"


async def test_models_are_listed_and_shown(cluster: LoopbackCluster):
    async with library(cluster) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "macpool"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("org/other")
    async with plain(cluster) as client:
        head = await client.head("/v1/models")
        got = await client.get("/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"] == str(len(got.content))


async def test_names_with_slashes_are_models_too():
    node = LoopbackNode("a", models=(a_model("mlx-community/Qwen3-4B-4bit"),))
    async with served(LoopbackCluster(node)) as cluster, library(cluster) as client:
        assert (await client.models.retrieve("mlx-community/Qwen3-4B-4bit")).id == "mlx-community/Qwen3-4B-4bit"


async def test_an_unknown_model_is_a_404_with_near_names(cluster: LoopbackCluster):
    async with library(cluster) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(**NOT_THERE)
    assert caught.value.code == "model_not_found"
    assert "tiny" in str(caught.value)


async def test_other_paths_are_served_by_the_control_app():
    seen: list[str] = []

    async def control(scope, receive, send) -> None:
        seen.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with (
        served(LoopbackCluster(LoopbackNode("a"), control=control)) as cluster,
        httpx.AsyncClient(trust_env=False, base_url=cluster.base_url) as client,
    ):
        assert (await client.get("/metrics")).status_code == 204
        assert (await client.get("/v1/other")).status_code == 204
    assert seen == ["/metrics", "/v1/other"]


async def test_health_is_green_only_if_a_request_could_be_served_now():
    node = LoopbackNode("a")
    async with (
        served(LoopbackCluster(node)) as cluster,
        httpx.AsyncClient(trust_env=False, base_url=cluster.base_url) as client,
    ):
        assert (await client.get("/health")).json() == {"status": "ok"}
        head = await client.head("/health")
        assert (head.status_code, head.content) == (200, b"")
        node.memory = a_memory(MIB)
        cluster.report()
        full = await client.get("/health", headers={"authorization": f"Bearer {cluster.key}"})
        assert full.status_code == 503
        assert "best node a has 1.0 MiB" in full.json()["reason"]
        assert (full.json()["nodes_ready"], full.json()["waiting"]) == (1, 0)
        node.memory, node.engine = a_memory(), "restarting"
        cluster.report()
        for stranger in ({}, {"authorization": "Bearer mp_x_y"}):
            assert (await client.get("/health", headers=stranger)).json() == {"status": "unavailable"}
        restarting = await client.get("/health", headers={"authorization": f"Bearer {cluster.key}"})
        assert restarting.status_code == 503
        assert "has an engine that is restarting" in restarting.json()["reason"]
        node.engine = "ready"
        cluster.report()
        assert (await client.get("/health")).status_code == 200
        node.state = "lost"
        cluster.report()
        lost = await client.get("/health", headers={"authorization": f"Bearer {cluster.key}"})
        assert (lost.status_code, lost.json()["nodes_ready"]) == (503, 0)
        assert (await client.get("/livez")).status_code == 200


def test_the_description_of_these_routes_is_whole():
    paths, schemas = build_openapi_paths(), build_openapi_schemas()
    door: Any = LoopbackCluster(LoopbackNode("a")).app
    by_pattern = {
        "/v1/models",
        "/v1/models/{model}",
        "/v1/responses/{response}",
        "/v1/messages/count_tokens",
        "/api/blobs/{digest}",
        "/health",
        "/livez",
    }
    elsewhere = {path for path in paths if path.startswith("/v1/videos")}  # these have tests of their own
    assert set(paths) - elsewhere == set(door.dialects) | OLLAMA_PATHS | by_pattern
    text = json.dumps(paths) + json.dumps(schemas)
    for reference in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in schemas
    assert "max_completion_tokens" in schemas["ChatBody"]["properties"]


def raw(cluster: LoopbackCluster, content: str, *, stream: bool = False) -> bytes:
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}], "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {cluster.key}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def answered(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    if b"chunked" in head:
        return head, await reader.readuntil(b"0\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    return head, await reader.readexactly(length)


async def test_requests_sent_ahead_are_answered_in_order():
    async with served(LoopbackCluster(LoopbackNode("a"))) as cluster:
        host, _, port = cluster.base_url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        models = (
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer " + cluster.key.encode() + b"\r\n\r\n"
        )
        last = raw(cluster, "last")
        writer.write(
            raw(cluster, "one") + raw(cluster, "two", stream=True) + models + raw(cluster, "three") + last[:50]
        )
        kinds: list[bytes] = []
        for _ in range(4):
            head, body = await answered(reader)
            assert head.startswith(b"HTTP/1.1 200"), head + body
            kinds.append(b"event" if b"[DONE]" in body else b"list" if b'"list"' in body else b"whole")
        writer.write(last[50:])
        head, body = await answered(reader)
        kinds.append(b"whole" if b"chat.completion" in body else body)
        assert kinds == [b"whole", b"event", b"list", b"whole", b"whole"]
        writer.close()
        await writer.wait_closed()


async def test_a_head_that_is_not_http_is_no_request():
    async with served(LoopbackCluster(LoopbackNode("a"))) as cluster:
        host, _, port = cluster.base_url.removeprefix("http://").partition(":")
        for old, new in ((b"host:", b"ho st:"), (b"host:", b" host:"), (b"localhost", b"local\0host")):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(raw(cluster, "one").replace(old, new, 1))
            assert b" 400 " in await reader.readline()
            writer.close()
            await writer.wait_closed()

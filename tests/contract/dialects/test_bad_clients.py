"""Every generating route over a real socket: bad bodies, slow clients, disconnects. No resource may be left behind."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.settings import RouterSettings
from tests.contract.dialects.test_chat import plain, until
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode, a_memory
from wire.frames import Cancel
from wire.units import MIB

HELLO = [{"role": "user", "content": "hello"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": HELLO},
    "/v1/completions": {"model": "tiny", "prompt": ["hello", "you"]},
    "/v1/responses": {"model": "tiny", "input": "hello"},
    "/v1/messages": {"model": "tiny", "messages": HELLO, "max_tokens": 50},
    "/api/chat": {"model": "tiny", "messages": HELLO},
    "/api/generate": {"model": "tiny", "prompt": "hello"},
}
OTHERS = {"/v1/messages/count_tokens": {"model": "tiny", "messages": HELLO}, "/api/show": {"model": "tiny"}}
ALL = ROUTES | OTHERS
SLOW = RouterSettings(max_body_bytes=10_000, body_timeout_seconds=0.3, keepalive_seconds=0.2)


@pytest.fixture
async def cluster() -> AsyncIterator[LoopbackCluster]:
    one = LoopbackCluster(LoopbackNode("a"), settings=SLOW)
    async with one.serving() as url:
        one.base_url = url
        yield one
        await until(lambda: one.dispatcher.idle)
    one.dispatcher.ledger.check()
    assert one.dispatcher.ledger.empty
    assert len(one.dispatcher.commands) == 0


def message_of(route: str, body: bytes) -> str:
    """Read an error in the dialect's own shape."""
    found = json.loads(body)
    if route.startswith("/api/"):
        return found["error"]
    if route.startswith("/v1/messages"):
        assert found["type"] == "error"
    assert found["error"]["type"]
    return found["error"]["message"]


BAD = [
    b"",
    b"{",
    b"nonsense",
    b"[]",
    b'"x"',
    b"null",
    b'{"model":"\xff"}',
    b'{"model":"x","model":"y"}',
    b'{"n":NaN}',
    b"{}",
    b'{"model":' + b"[" * 4000,
    b'{"model":"\\ud800"}',
    b'{"model":1e999}',
    b'{"model":{"a":{}}}',
    b'{"model":"tiny","messages":"x","input":7,"prompt":{}}',
    b'{"stream":true}',
    b"\x00" * 50,
    b'{"model":"tiny","' + b"x" * 5000 + b'":1}',
]


@pytest.mark.parametrize("route", ALL)
async def test_a_bad_body_is_a_400_in_the_shape_of_its_dialect(cluster: LoopbackCluster, route: str):
    async with plain(cluster) as client:
        for body in BAD:
            answer = await client.post(route, content=body)
            assert answer.status_code == 400, (body, answer.text)
            assert message_of(route, answer.content)
            assert answer.headers["x-request-id"]


@pytest.mark.parametrize("route", ALL)
async def test_a_long_body_and_other_methods_are_refused(cluster: LoopbackCluster, route: str):
    async with plain(cluster) as client:
        long = await client.post(route, content=b" " * 10_001)
        other = await client.put(route, content=b"{}")
        nobody = await client.post(route, content=b" " * 10_001, headers={"authorization": ""})
    assert (long.status_code, other.status_code, nobody.status_code) == (413, 405, 401)
    for answer in (long, other, nobody):
        assert message_of(route, answer.content)
    assert other.headers["allow"] == "POST"


async def raw(cluster: LoopbackCluster, route: str, length: int, body: bytes) -> asyncio.StreamWriter:
    host, port = cluster.base_url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST {route} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {cluster.key}\r\ncontent-length: {length}\r\n\r\n"
    )
    writer.write(head.replace("host: x", f"host: {host}").encode() + body)
    await writer.drain()
    return writer


@pytest.mark.parametrize("route", ALL)
async def test_a_client_that_leaves_within_its_body_costs_nothing(cluster: LoopbackCluster, route: str):
    writer = await raw(cluster, route, 5_000, b'{"model"')
    writer.close()
    await until(lambda: cluster.dispatcher.counters.answers.get(499) == 1)
    assert cluster.dispatcher.idle


@pytest.mark.parametrize("route", ALL)
async def test_a_body_that_arrives_too_slowly_is_given_up(cluster: LoopbackCluster, route: str):
    writer = await raw(cluster, route, 5_000, b'{"model"')
    await until(lambda: cluster.dispatcher.counters.answers.get(408) == 1)
    writer.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("phase", ["in line", "admitted", "answering"])
async def test_a_client_may_leave_in_every_phase(route: str, stream: bool, phase: str):
    """The reservation is released, the node gets a Cancel, and the queue entry is removed."""
    node = LoopbackNode("a", step_seconds=0.03, mute=phase == "admitted")
    if phase == "in line":
        node.memory = a_memory(headroom_bytes=1 * MIB)
    cluster = LoopbackCluster(node, settings=SLOW)
    async with cluster.serving() as url:
        cluster.base_url = url
        body = json.dumps(ROUTES[route] | {"stream": stream}).encode()
        writer = await raw(cluster, route, len(body), body)
        if phase == "in line":
            await until(lambda: len(cluster.dispatcher.queue))
        elif phase == "admitted":
            await until(lambda: node.reserved)
        else:
            await until(lambda: cluster.dispatcher.counters.first_tokens)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        await until(lambda: cluster.dispatcher.idle)
        cluster.dispatcher.ledger.check()
        assert cluster.dispatcher.ledger.empty
        assert len(cluster.dispatcher.queue) == 0
        if phase != "in line":
            await until(lambda: any(isinstance(frame, Cancel) for frame in node.heard))
            assert not node.reserved


@pytest.mark.parametrize("route", ROUTES)
async def test_a_long_prefill_shows_signs_of_life_that_are_no_answer(route: str):
    node = LoopbackNode("a", mute=True)
    cluster = LoopbackCluster(node, settings=SLOW)
    async with cluster.serving() as url, plain(cluster) as _:
        cluster.base_url = url
        async with (
            plain(cluster) as client,
            client.stream("POST", route, json=ROUTES[route] | {"stream": True}) as answer,
        ):
            assert answer.status_code == 200
            first = await anext(answer.aiter_lines())
        if route.startswith("/api/"):
            line = json.loads(first)
            assert line["done"] is False
            assert line.get("response", "") + line.get("message", {}).get("content", "") == ""
        else:
            assert first == ("event: ping" if route == "/v1/messages" else ": waiting")
        await until(lambda: cluster.dispatcher.idle)

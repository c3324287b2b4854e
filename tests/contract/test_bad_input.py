"""Bad input over a real socket: each is a clear error, without a cost for other clients."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from router.settings import RouterSettings
from tests.support.cluster.loopback_cluster import TEXT, LoopbackCluster, LoopbackNode

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture
async def cluster() -> AsyncIterator[LoopbackCluster]:
    one = LoopbackCluster(LoopbackNode("a"), settings=RouterSettings(max_body_bytes=10_000, body_timeout_seconds=0.3))
    async with one.serving() as url:
        one.base_url = url
        yield one
        status, answer = await post(one, json.dumps(ASK).encode())
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == "".join(TEXT)
    assert one.dispatcher.ledger.empty


async def exchange(cluster: LoopbackCluster, *parts: bytes, pause: float = 0.0) -> bytes:
    """Send raw bytes; return all bytes until the server closes or has answered."""
    host, port = cluster.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause)
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
            _, known, length = head.lower().partition(b"content-length: ")
            rest = reader.readexactly(int(length.split(b"\r\n")[0])) if known else reader.read()
            return head + await rest
    finally:
        writer.close()


def head(cluster: LoopbackCluster, *lines: str) -> bytes:
    first = [f"POST {CHAT} HTTP/1.1", "host: x", f"authorization: Bearer {cluster.key}"]
    return ("\r\n".join([*first, *lines]) + "\r\n\r\n").encode()


async def post(cluster: LoopbackCluster, body: bytes) -> tuple[int, dict]:
    return parsed(await exchange(cluster, head(cluster, f"content-length: {len(body)}") + body))


def parsed(raw: bytes) -> tuple[int, dict]:
    top, _, body = raw.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'{"model":"\xff"}',
        b'{"model":"x","model":"y"}',
        b'{"n":NaN}',
        b"{}",
        b'{"model":' + b"[" * 4000,
        json.dumps(ASK | {"max_tokens": -2}).encode(),
        json.dumps(ASK | {"n": 10**9}).encode(),
        json.dumps(ASK | {"messages": []}).encode(),
        json.dumps(ASK | {"stream": "yes"}).encode(),
        b'{"model":"\\ud800"}',
    ],
)
async def test_a_bad_body_is_a_400_in_openai_shape(cluster: LoopbackCluster, body: bytes):
    status, answer = await post(cluster, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"]
    assert answer["error"]["request_id"]


async def test_a_declared_length_above_the_limit_is_refused_before_it_is_read(cluster: LoopbackCluster):
    status, answer = parsed(await exchange(cluster, head(cluster, "content-length: 10001")))
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


async def test_a_length_beyond_all_numbers_is_refused(cluster: LoopbackCluster):
    for digits, expected in ((15, 413), (19, 400)):
        status, _ = parsed(await exchange(cluster, head(cluster, "content-length: " + "9" * digits)))
        assert status == expected


async def test_a_chunked_body_is_counted(cluster: LoopbackCluster):
    chunk = b"2000\r\n" + b" " * 0x2000 + b"\r\n"
    raw = await exchange(cluster, head(cluster, "transfer-encoding: chunked"), chunk, chunk, pause=0.02)
    assert parsed(raw)[0] == 413


async def test_a_chunked_body_within_the_limit_is_answered(cluster: LoopbackCluster):
    body = json.dumps(ASK).encode()
    chunks = b"".join(b"1\r\n" + body[at : at + 1] + b"\r\n" for at in range(len(body))) + b"0\r\n\r\n"
    assert parsed(await exchange(cluster, head(cluster, "transfer-encoding: chunked"), chunks))[0] == 200


async def test_a_stream_to_a_client_of_http_1_0_has_no_chunks_and_ends_with_the_connection(cluster: LoopbackCluster):
    body = json.dumps(ASK | {"stream": True}).encode()
    top = head(cluster, f"content-length: {len(body)}").replace(b"HTTP/1.1", b"HTTP/1.0")
    answer = await exchange(cluster, top, body)
    begin, _, events = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in begin.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


async def test_a_body_of_exactly_the_limit_is_read(cluster: LoopbackCluster):
    body = json.dumps(ASK).encode().ljust(10_000)
    assert (await post(cluster, body))[0] == 200


async def test_a_body_that_arrives_too_slowly_is_given_up(cluster: LoopbackCluster):
    raw = await exchange(cluster, head(cluster, "content-length: 9000"), *[b"{"] * 5, pause=0.02)
    assert (parsed(raw)[0], parsed(raw)[1]["error"]["code"]) == (408, "request_timeout")


async def test_a_client_that_leaves_within_its_body_costs_nothing(cluster: LoopbackCluster):
    host, port = cluster.base_url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(head(cluster, "content-length: 9000") + b'{"model"')
    await writer.drain()
    writer.close()
    async with asyncio.timeout(30):
        while cluster.dispatcher.counters.answers.get(499) != 1:  # noqa: ASYNC110  the counter tells nobody
            await asyncio.sleep(0.005)


async def test_a_large_body_without_a_key_is_a_401_and_is_not_read(cluster: LoopbackCluster):
    raw = await exchange(cluster, f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n".encode())
    assert parsed(raw)[0] == 401


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_with_a_wrong_key_is_counted_once(cluster: LoopbackCluster, *, stream: bool):
    body = json.dumps(ASK | {"stream": stream}).encode()
    for number in (1, 2):
        request = head(cluster, f"content-length: {len(body)}").replace(cluster.key.encode(), b"mp_wrong_key") + body
        status, _ = parsed(await exchange(cluster, request))
        assert (status, cluster.keys.refused) == (401, number)

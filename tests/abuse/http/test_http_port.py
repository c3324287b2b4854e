"""The HTTP port of a running pool against clients that misbehave.

Each gets a clear answer or loses its connection. An honest request is served at the same time, and right afterwards.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from coordinator.api.body import BODY_TIMEOUT_SECONDS
from coordinator.http.http_protocol import HEAD_TIMEOUT_SECONDS
from tests.support.processes import Pool, pool

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
QUESTION: dict[str, Any] = {
    "model": "scripted-1",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 3,
}
Patient = dict[str, Future[None]]
CANARY = "canary-in-the-prompt-7f3a"


@pytest.fixture(scope="module")
def running() -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        made.up()
        made.join("one", "engine.scripted.step_ms=5")
        yield made


@pytest.fixture(autouse=True)
async def still_serves(running: Pool) -> Any:
    yield
    assert await ask(running) == 200


@pytest.fixture(scope="module")
def patient(running: Pool) -> Iterator[Patient]:
    """Start the requests that last as long as a deadline all at once. Each test then awaits its own."""
    with ThreadPoolExecutor(4) as threads:
        yield {
            one.__name__: threads.submit(asyncio.run, one(running))
            for one in (drips_heads, drips_a_body, idles, streams)
        }


async def raw(running: Pool, *parts: bytes, seconds: float = 20.0) -> bytes:
    """Send bytes; return the received bytes until the server closes, or its first complete answer."""
    reader, writer = await dial(running)
    answer = b""
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        async with asyncio.timeout(seconds):
            with suppress(ConnectionError):
                while not _whole(answer) and (data := await reader.read(65536)):
                    answer += data
    finally:
        writer.transport.abort()
    return answer


def _whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return bool(end) and length.isdigit() and len(body) >= int(length)


async def dial(running: Pool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = urlsplit(running.base)
    assert where.hostname is not None
    return await asyncio.open_connection(where.hostname, where.port)


def request(running: Pool, *lines: str, path: str = CHAT, host: str = "127.0.0.1", method: str = "POST") -> bytes:
    first = [f"{method} {path} HTTP/1.1", f"host: {host}", f"authorization: Bearer {running.key}"]
    return ("\r\n".join([*first, *lines]) + "\r\n\r\n").encode()


async def ask(running: Pool, *lines: str, body: bytes | None = None, **how: str) -> int:
    """Send a complete chat; return the status."""
    content = json.dumps(QUESTION).encode() if body is None else body
    return status(await raw(running, request(running, f"content-length: {len(content)}", *lines, **how) + content))


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def error(answer: bytes) -> dict[str, Any]:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "a.b.local",
        "localhost:80:80",
        "",
        "127.1.",
        "127.0.0.1, evil.example",
        "localhost\tevil",
    ],
)
async def test_names_that_are_not_ours_are_421(running: Pool, host: str) -> None:
    assert await ask(running, host=host) in (421, 400)


async def test_two_hosts_or_none_are_refused(running: Pool) -> None:
    assert await ask(running, "host: 127.0.0.1") == 400
    assert status(await raw(running, b"GET /livez HTTP/1.1\r\n\r\n")) == 400
    assert status(await raw(running, b"GET /livez HTTP/1.0\r\n\r\n")) == 421


@pytest.mark.parametrize(
    "line",
    [
        "origin: https://evil.example",
        "origin: null",
        "sec-fetch-site: cross-site",
        "sec-fetch-site: same-site",
        "origin: http://localhost:1",
    ],
)
async def test_posts_from_pages_of_other_sites_are_403(running: Pool, line: str) -> None:
    assert await ask(running, line) == 403


async def test_heads_that_drip_or_never_come_have_ten_seconds(patient: Patient) -> None:
    await asyncio.wrap_future(patient["drips_heads"])


async def drips_heads(running: Pool) -> None:
    began = time.monotonic()
    silent, dripping, second = await asyncio.gather(*(dial(running) for _ in range(3)))
    second[1].write(request(running, "content-length: 0", path="/livez", method="GET"))
    assert b"200 OK" in await second[0].readuntil(b"}")
    drips = [asyncio.create_task(_drip(writer)) for _, writer in (dripping, second)]
    for reader, _ in (silent, dripping, second):
        async with asyncio.timeout(HEAD_TIMEOUT_SECONDS + 3):
            with suppress(ConnectionError):
                assert await reader.read(4096) == b""
    assert HEAD_TIMEOUT_SECONDS - 1 < time.monotonic() - began < HEAD_TIMEOUT_SECONDS + 3
    for drip in drips:
        drip.cancel()
    for _, writer in (silent, dripping, second):
        writer.transport.abort()


async def _drip(writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        writer.write(b"GET /livez HTTP/1.1\r\n")
        while True:
            writer.write(b"x-slow: yes\r\n")
            await writer.drain()
            await asyncio.sleep(0.5)


async def test_a_body_that_drips_to_the_control_api_has_ten_seconds(patient: Patient) -> None:
    await asyncio.wrap_future(patient["drips_a_body"])


async def drips_a_body(running: Pool) -> None:
    began = time.monotonic()
    head = request(running, "content-length: 100", path="/api/v1/place")
    answer = await raw(running, head.replace(running.key.encode(), running.secret.encode()) + b"{")
    assert status(answer) == 408
    assert BODY_TIMEOUT_SECONDS - 1 < time.monotonic() - began < BODY_TIMEOUT_SECONDS + 3


@pytest.mark.parametrize(
    ("told", "body"),
    [
        pytest.param(b"content-length: 99999999", b"", id="announced"),
        pytest.param(b"transfer-encoding: chunked", b"186a0\r\n" + b"x" * 100_000 + b"\r\n", id="in pieces"),
    ],
)
async def test_a_long_body_to_the_control_api_is_not_read(running: Pool, told: bytes, body: bytes):
    for key, expected in (
        (b"", (401, "invalid_api_key")),
        (b"authorization: Bearer " + running.secret.encode() + b"\r\n", (413, "request_too_large")),
    ):
        head = b"POST /api/v1/keys HTTP/1.1\r\nhost: 127.0.0.1\r\n" + key + told + b"\r\n\r\n"
        answer = await raw(running, head, body)
        assert (status(answer), error(answer)["code"]) == expected


async def test_an_idle_connection_is_kept_between_requests(patient: Patient) -> None:
    await asyncio.wrap_future(patient["idles"])


async def idles(running: Pool) -> None:
    reader, writer = await dial(running)
    with closing(writer):
        for _ in range(2):
            writer.write(request(running, path="/livez", method="GET"))
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"}"), 30)
            await asyncio.sleep(HEAD_TIMEOUT_SECONDS / 2 + 1)


async def test_a_stream_longer_than_the_head_deadline_is_not_cut(patient: Patient) -> None:
    await asyncio.wrap_future(patient["streams"])


async def streams(running: Pool) -> None:
    body = json.dumps(QUESTION | {"stream": True, "max_tokens": int((HEAD_TIMEOUT_SECONDS + 2) / 0.005)}).encode()
    lines = (f"content-length: {len(body)}", "connection: close")
    answers = await asyncio.gather(
        raw(running, request(running, *lines) + body, seconds=60),
        _in_two_packets(running, request(running, *lines, "expect: 100-continue"), body),
    )
    for answer in answers:
        assert b"data: [DONE]" in answer[-60:]


async def _in_two_packets(running: Pool, head: bytes, body: bytes) -> bytes:
    """Send a body once the server has read the head, as most clients do; return all bytes until the server closes."""
    reader, writer = await dial(running)
    with closing(writer):
        writer.write(head)
        await asyncio.wait_for(reader.readuntil(b"100 Continue\r\n\r\n"), 30)
        writer.write(body)
        async with asyncio.timeout(60):
            return await reader.read()


@pytest.mark.parametrize("spread", [1, 64])
async def test_a_head_of_two_mebibytes_is_431(running: Pool, spread: int) -> None:
    line = b"x-long: " + b"a" * (2 * 2**20 // spread) + b"\r\n"
    answer = await raw(running, b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n" + line * spread + b"\r\n")
    assert status(answer) in (431, 0)
    few = b"x-a: b\r\n" * 6000
    answer = await raw(running, b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n" + few + b"\r\n")
    assert (status(answer), error(answer)["code"]) == (431, "head_too_large")


async def test_a_head_just_within_the_limit_is_read_in_any_pieces(running: Pool) -> None:
    head = request(running, "x-long: " + "a" * 30_000, path="/livez", method="GET")
    assert status(await raw(running, head[:20_000], head[20_000:])) == 200


@pytest.mark.parametrize(
    "lines",
    [
        ("content-length: 5", "transfer-encoding: chunked"),
        ("content-length: 5", "content-length: 6"),
        ("content-length: -1",),
        ("content-length: 0x10",),
        ("transfer-encoding: chunked, identity",),
        ("content-length : 5",),
        ("a b: c",),
    ],
)
async def test_ambiguous_framing_is_a_400_and_the_connection_ends(running: Pool, lines: tuple[str, ...]) -> None:
    answer = await raw(
        running, request(running, *lines) + b"0\r\n\r\nGET /api/v1/nodes HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    )
    assert status(answer) == 400
    assert answer.count(b"HTTP/1.1") == 1
    assert error(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("content-length: " + "0" * 4300 + "5",), (400, "malformed_http")),
        (("authorization: Bearer mp_x_y",), (400, "header_twice")),
        (("content-length: 2", "x-api-key: a", "x-api-key: b"), (400, "header_twice")),
        (("expect: 200-ok",), (417, "expectation_failed")),
        (("content-length: 2", "content-encoding: gzip"), (415, "content_encoding_unknown")),
        (("transfer-encoding: gzip, chunked",), (501, "transfer_coding_unknown")),
    ],
)
async def test_ambiguous_heads_are_refused(running: Pool, lines: tuple[str, ...], expected: tuple[int, str]) -> None:
    hidden = request(running, path="/livez", method="GET")
    for path in (CHAT, "/livez", "/api/v1/keys"):
        answer = await raw(running, request(running, *lines, path=path) + hidden)
        assert (status(answer), error(answer)["code"]) == expected
        assert answer.count(b"HTTP/1.1") == 1


async def test_an_offer_to_upgrade_is_not_taken_and_the_body_is_the_body(running: Pool) -> None:
    """If the body were read as the next request, it would bypass any proxy in front of this port."""
    hidden = request(running, path="/livez", method="GET")
    offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__")
    answer = await raw(running, request(running, *offer, f"content-length: {len(hidden)}") + hidden, seconds=3)
    assert (status(answer), answer.count(b"HTTP/1.1")) == (400, 1)
    assert "JSON" in error(answer)["message"]
    assert await ask(running, *offer) == 200


async def test_a_key_in_a_trailer_opens_nothing(running: Pool) -> None:
    body = json.dumps(QUESTION).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    trailer = f"0\r\nauthorization: Bearer {running.key}\r\n\r\n".encode()
    assert status(await raw(running, head + b"%x\r\n%s\r\n" % (len(body), body) + trailer)) == 401


async def test_more_than_eight_mebibytes_are_413(running: Pool) -> None:
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    answer = await raw(running, request(running, "transfer-encoding: chunked"), *[chunk] * 9)
    assert (status(answer), error(answer)["code"]) == (413, "request_too_large")
    answer = await raw(running, request(running, f"content-length: {2**33}"))
    assert (status(answer), error(answer)["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":' + b"[" * 10_000,
        b'{"a":' * 10_000,
        b'{"model":"a","model":"b"}',
        json.dumps(QUESTION)[:-1].encode() + b',"temperature":NaN}',
        json.dumps(QUESTION | {"n": 10**9}).encode(),
        json.dumps(QUESTION | {"max_tokens": -2}).encode(),
        b"\xff\xfe",
        b"",
    ],
)
async def test_absurd_bodies_are_a_400(running: Pool, body: bytes) -> None:
    assert await ask(running, body=body) == 400


async def test_five_hundred_connections_do_not_stop_the_service(running: Pool) -> None:
    opened = await asyncio.gather(*(dial(running) for _ in range(500)))
    for _, writer in opened[:250]:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n")
    began = time.monotonic()
    assert await ask(running) == 200
    assert time.monotonic() - began < 3
    for _, writer in opened:
        writer.transport.abort()
    await asyncio.sleep(0)


async def test_the_end_of_a_body_that_was_refused_unread_is_no_head(running: Pool):
    size = 9 * 1024 * 1024
    part = 40_000
    reader, writer = await dial(running)
    writer.write(request(running, f"content-length: {size}"))
    async with asyncio.timeout(20):
        assert b" 413 " in await reader.readuntil(b"\r\n\r\n")
        assert b"larger than" in await reader.readuntil(b"}}")
        for _ in range(size // part - 1):
            writer.write(b"x" * part)
            await writer.drain()
        await asyncio.sleep(0.5)  # the rest arrives in a separate read, longer than a head may be
        writer.write(b"x" * (part + size % part))
        question = json.dumps(QUESTION).encode()
        writer.write(request(running, f"content-length: {len(question)}") + question)
        assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()


async def test_secrets_and_prompts_are_in_no_log(running: Pool) -> None:
    token = running.token()
    known, secret = token.rsplit(".", 1)
    changed = f"{known}.{'b' if secret[0] == 'a' else 'a'}{secret[1:]}"  # the last character has unused bits
    body = json.dumps(QUESTION | {"messages": [{"role": "user", "content": CANARY}]}).encode()
    assert await ask(running, body=body) == 200
    assert await ask(running, body=body[:-1] + b',"functions":[1]}') == 400
    assert await ask(running, body=body.replace(b"scripted-1", b"no-model")) == 404
    wrong = running.run(
        "join",
        running.facts["cluster_url"],
        "--token-file",
        running.token_file("x", changed),
        "--state",
        str(running.folder / "x"),
    )
    assert wrong.returncode == 4
    words = [CANARY, running.key, running.secret, secret, changed.rsplit(".", 1)[1]]
    logs = [*running.folder.rglob("*.log"), *running.folder.rglob("*.err")]
    assert len(logs) >= 4
    for log in logs:
        text = log.read_text()
        assert not [word for word in words if word in text], log

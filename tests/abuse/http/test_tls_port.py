"""The endpoint with TLS against clients that misbehave before and after the handshake, while good ones are served."""

import asyncio
import contextlib
import json
import re
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from coordinator.http.http_protocol import HEAD_TIMEOUT_SECONDS
from coordinator.http.server import HANDSHAKE_TIMEOUT_SECONDS
from tests.support.processes import Pool, pool

pytestmark = pytest.mark.slow

QUESTION = json.dumps(
    {"model": "scripted-1", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
).encode()
Dialed = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def running() -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        made.up("http.tls=on")
        made.join("one", "engine.scripted.step_ms=1")
        yield made


def context() -> ssl.SSLContext:
    made = ssl.create_default_context()
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


async def dial(running: Pool, tls: ssl.SSLContext | None) -> Dialed:
    where = urlsplit(running.base)
    return await asyncio.open_connection(where.hostname, where.port, ssl=tls)


def chat(running: Pool, *lines: str) -> bytes:
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: 127.0.0.1",
        f"authorization: Bearer {running.key}",
        f"content-length: {len(QUESTION)}",
        *lines,
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + QUESTION


async def until_closed(dialed: Dialed, seconds: float) -> bytes:
    """Return all bytes until the server closes; raise TimeoutError if it does not."""
    got = b""
    async with asyncio.timeout(seconds):
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while data := await dialed[0].read(65536):
                got += data
    return got


async def good(running: Pool) -> None:
    """Send an honest request."""
    dialed = await dial(running, context())
    began = time.monotonic()
    dialed[1].write(chat(running, "connection: close"))
    assert (await until_closed(dialed, 10)).startswith(b"HTTP/1.1 200 ")
    assert time.monotonic() - began < 5
    dialed[1].transport.abort()


@pytest.fixture
async def served_meanwhile(running: Pool) -> AsyncIterator[None]:
    """Send honest requests repeatedly; none may wait."""
    ended = asyncio.Event()

    async def ask() -> None:
        while not ended.is_set():
            await good(running)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.2)

    asking = asyncio.create_task(ask())
    yield
    ended.set()
    await asking
    await good(running)


HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(32)
"""A ClientHello that announces 200 bytes and has a fifth of them."""


@pytest.mark.usefixtures("served_meanwhile")
async def test_handshakes_that_stall_are_given_up(running: Pool):
    """Covers silent handshakes, half ones, slow ones, and those without a request afterwards."""
    began = time.monotonic()
    stalled = [await dial(running, None) for _ in range(200)]
    for _, writer in stalled[50:]:
        writer.write(HELLO)
    shaken = [await dial(running, context()) for _ in range(20)]
    for _, writer in shaken[10:]:
        writer.write(b"GET /livez HTTP/1.1\r\nx-a: ")

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                for _, writer in (*stalled[100:], *shaken[15:]):
                    writer.write(b"\0" if writer.get_extra_info("ssl_object") is None else b"x")
                await asyncio.sleep(0.5)

    dripping = asyncio.create_task(drip())
    most = max(HANDSHAKE_TIMEOUT_SECONDS, HEAD_TIMEOUT_SECONDS) + 5
    for got in await asyncio.gather(*(until_closed(one, most) for one in (*stalled, *shaken))):
        assert b"HTTP" not in got
    assert time.monotonic() - began > min(HANDSHAKE_TIMEOUT_SECONDS, HEAD_TIMEOUT_SECONDS) - 1
    dripping.cancel()
    for _, writer in (*stalled, *shaken):
        writer.transport.abort()


@pytest.mark.usefixtures("served_meanwhile")
async def test_connection_without_a_tls_handshake_is_closed(running: Pool):
    for sent in (
        b"GE",
        b"get / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"SSH-2.0-x\r\n",
        b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10" + bytes(40),
        b"\x15\x03\x01\x00\x02\x02\x28",
        b"\x16\x03\x01\xff\xff" + bytes(100_000),
        b"\0" * 200_000,
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",
    ):
        dialed = await dial(running, None)
        dialed[1].write(sent)
        got = await until_closed(dialed, HANDSHAKE_TIMEOUT_SECONDS + 5)
        assert b"HTTP/1" not in got, sent[:20]
        dialed[1].transport.abort()


@pytest.mark.usefixtures("served_meanwhile")
async def test_old_tls_versions_are_refused(running: Pool):
    old = context()
    with pytest.warns(DeprecationWarning, match="TLS"):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await dial(running, old)
    only_h2 = context()
    only_h2.set_alpn_protocols(["h2"])
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        dialed = await dial(running, only_h2)
        dialed[1].write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert (await until_closed(dialed, 5)).startswith(b"HTTP/1.1 4")


def get(*lines: str, path: str = "/livez", method: str = "GET", version: str = "HTTP/1.1") -> bytes:
    return "\r\n".join([f"{method} {path} {version}".rstrip(), "host: 127.0.0.1", *lines]).encode() + b"\r\n\r\n"


SHAPES: dict[str, tuple[bytes, list[int]]] = {
    "a huge header": (get("x-a: " + "a" * 2**21), [431]),
    "a flood of headers": (get(*["x-a: b"] * 50_000), [431]),
    "requests ahead": (get() * 3 + get("connection: close"), [200, 200, 200, 200]),
    "length and chunks": (
        get("content-length: 3", "transfer-encoding: chunked", method="POST") + b"0\r\n\r\n" + get(),
        [400],
    ),
    "two lengths": (get("content-length: 3", "content-length: 4", method="POST") + b"abcd" + get(), [400]),
    "a folded line": (get("x-a: b\r\n c: d\r\n\thost: evil.example"), [400]),
    "a bare newline": (b"GET /livez HTTP/1.1\nhost: 127.0.0.1\n\n" + get(), [400]),
    "an absolute target": (get(path="http://evil.example/livez"), [400]),
    "CONNECT": (get(path="127.0.0.1:22", method="CONNECT") + b"SSH-2.0-x\r\n", [400]),
    "TRACE": (get("cookie: a=b", "connection: close", method="TRACE"), [405]),
    "HTTP/0.9": (b"GET /livez\r\n\r\n", [400]),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400]),
    "HTTP/3.7": (get(version="HTTP/3.7"), [400]),
    "an upgrade to h2c": (
        get("connection: upgrade, http2-settings, close", "upgrade: h2c", "http2-settings: AAMAAABkAAQ"),
        [200],
    ),
    "another encoding": (get("transfer-encoding: gzip, chunked, identity", method="POST") + get(), [400]),
    "chunk sizes that overflow": (
        get("transfer-encoding: chunked", method="POST") + b"f" * 17 + b"\r\n" + get(),
        [400, 405],
    ),
    "bytes that are nothing": (bytes(range(128, 256)) * 50 + b"\r\n\r\n", [400]),
}


@pytest.mark.usefixtures("served_meanwhile")
@pytest.mark.parametrize("name", SHAPES)
async def test_shapes_within_tls(running: Pool, name: str):
    """A valid request is answered. An ambiguous request gets a 4xx, and the connection ends there."""
    sent, wanted = SHAPES[name]
    dialed = await dial(running, context())
    dialed[1].write(sent)
    got = await until_closed(dialed, HEAD_TIMEOUT_SECONDS + 5)
    found = [int(one) for one in re.findall(rb"HTTP/1\.1 (\d{3})", got)]
    assert found == wanted or (len(found) == 1 and found[0] in wanted) or (found == [] and 431 in wanted), (
        found,
        got[:300],
    )
    assert b"a=b" not in got
    dialed[1].transport.abort()


@pytest.mark.usefixtures("served_meanwhile")
async def test_a_body_with_something_after_it_is_answered_and_the_connection_ends(running: Pool):
    dialed = await dial(running, context())
    chunked = chat(running, "transfer-encoding: chunked").replace(f"content-length: {len(QUESTION)}\r\n".encode(), b"")
    chunked = chunked.replace(QUESTION, b"%x\r\n%s\r\n0\r\n\r\n" % (len(QUESTION), QUESTION))
    dialed[1].write(chunked + b"junk of all kinds\r\n\r\n" + get())
    got = await until_closed(dialed, 10)
    assert [int(one) for one in re.findall(rb"HTTP/1\.1 (\d{3})", got)] == [200]
    dialed[1].transport.abort()


@pytest.mark.usefixtures("served_meanwhile")
async def test_expect_continue_gets_a_100(running: Pool):
    dialed = await dial(running, context())
    raw = chat(running, "expect: 100-continue", "connection: close")
    dialed[1].write(raw[: -len(QUESTION)])
    assert await asyncio.wait_for(dialed[0].readuntil(b"\r\n\r\n"), 30) == b"HTTP/1.1 100 Continue\r\n\r\n"
    dialed[1].write(QUESTION)
    assert (await until_closed(dialed, 10)).startswith(b"HTTP/1.1 200 ")
    refused = await dial(running, context())
    refused[1].write(raw[: -len(QUESTION)].replace(running.key.encode(), b"x"))
    assert (await asyncio.wait_for(refused[0].readuntil(b"\r\n\r\n"), 30)).startswith(b"HTTP/1.1 401 ")
    for _, writer in (dialed, refused):
        writer.transport.abort()


async def test_plain_http_gets_the_url_with_https(running: Pool, served_meanwhile: None):
    for first in (chat(running), b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"POST /" + b"a" * 200_000):
        dialed = await dial(running, None)
        dialed[1].write(first)
        began = time.monotonic()
        head, _, body = (await until_closed(dialed, 5)).partition(b"\r\n\r\n")
        assert time.monotonic() - began < 4
        assert head.startswith(b"HTTP/1.1 400 ")
        error = json.loads(body)["error"]
        assert error["code"] == "https_required"
        assert f"use {running.base}, and run `cluster trust-ca {running.base}`" in error["message"]
        dialed[1].transport.abort()


async def test_a_silent_client_has_one_timeout_for_its_first_byte_and_its_handshake(
    running: Pool, served_meanwhile: None
):
    dialed = await dial(running, None)
    began = time.monotonic()
    await asyncio.sleep(HANDSHAKE_TIMEOUT_SECONDS / 2)
    dialed[1].write(b"\x16\x03\x01")
    assert await until_closed(dialed, HANDSHAKE_TIMEOUT_SECONDS) == b""
    assert time.monotonic() - began < HANDSHAKE_TIMEOUT_SECONDS + 2
    dialed[1].transport.abort()

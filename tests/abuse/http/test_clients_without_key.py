"""Clients without a key: none may hold the loop, have a body read, or keep an honest client out."""

import asyncio
import itertools
import json
import resource
import socket
import tempfile
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from coordinator.http.http_protocol import SLICE_BYTES
from tests.abuse.http.test_http_port import ask, dial, error, raw, request, status
from tests.support.loop_watch import Held, max_held_seconds, watch_server
from tests.support.processes import Pool, pool, until
from wire.units import MIB

pytestmark = pytest.mark.slow

NUMBERS = itertools.count(1)
VISITS = b"POST /api/v1/page/visits HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def running() -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        made.up("router.body_timeout_seconds=2")
        made.join("one", "engine.scripted.step_ms=3")
        yield made


@pytest.fixture
def held(running: Pool) -> Iterator[Held]:
    """Watch the coordinator for the whole test: its loop must not be held."""
    assert running.coordinator is not None
    with watch_server(running.base, running.coordinator.pid) as found:
        yield found
    assert found.ticks > 1
    assert found.seconds < max_held_seconds()


def twice(size: int) -> bytes:
    """Make an object of nearly `size` bytes whose last key repeats the one before it."""
    names = [f'"{number:x}":1' for number in range(size // 10)]
    return ("{" + ",".join([*names, names[-1]]) + "}").encode()


@pytest.mark.usefixtures("held")
async def test_a_long_body_to_an_open_route_is_not_read(running: Pool):
    for body in (twice(65_000), b'{"code":"' + b"x" * 65_000 + b'"}', b"[" * 65_000):
        for _ in range(5):
            answer = await raw(running, VISITS + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert (status(answer), error(answer)["code"]) == (413, "request_too_large")
    pieces = b"%x\r\n%s\r\n" % (60_000, b" " * 60_000)
    answer = await raw(running, VISITS + b"transfer-encoding: chunked\r\n\r\n" + pieces)
    assert (status(answer), error(answer)["code"]) == (413, "request_too_large")


async def test_a_code_of_the_longest_size_is_read(running: Pool):
    body = json.dumps({"code": "\u00e9" * 100}).encode()
    answer = await raw(running, VISITS + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert (status(answer), error(answer)["code"]) == (401, "link_used_up")


@pytest.mark.usefixtures("held")
async def test_objects_of_many_keys_that_stand_twice_are_refused(running: Pool):
    for path, size in (("/api/v1/place", 64_000), ("/v1/completions", 256_000)):
        body = twice(size)
        head = request(running, f"content-length: {len(body)}", "content-type: application/json", path=path)
        answer = await raw(running, head.replace(running.key.encode(), running.secret.encode()) + body)
        assert status(answer) == 400, answer
        assert "keys" in error(answer)["message"]


async def test_a_body_is_not_waited_for_before_its_key_is_good(running: Pool):
    """The answer arrives before the body."""
    for path in ("/api/v1/keys", "/api/v1/place", "/api/v1/models/load", "/v1/chat/completions", "/v1/videos"):
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000\r\n"
        for key in ("", "authorization: Bearer mp_wrong_wrong\r\n"):
            reader, writer = await dial(running)
            writer.write(f"{head}{key}\r\n".encode() + b'{"model')
            async with asyncio.timeout(10):
                assert (await reader.readline()).split()[1] == b"401", path
            writer.transport.abort()
    assert await ask(running) == 200


async def test_pipelined_bytes_are_discarded_and_released(running: Pool):
    """Twelve connections ask for a long answer and send 8 MiB of requests behind it, without reading."""
    assert running.coordinator is not None
    process = psutil.Process(running.coordinator.pid)
    before = process.memory_info().rss
    get = b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    ahead = get * (8 * MIB // len(get))
    with watch_server(running.base, running.coordinator.pid) as held:
        opened = [await dial(running) for _ in range(12)]
        for _, writer in opened:
            writer.write(ahead)
        await asyncio.sleep(2)
        assert await ask(running) == 200
        grown = process.memory_info().rss - before
        for _, writer in opened:
            writer.transport.abort()
    assert held.seconds < 2 * max_held_seconds(), "one turn may have bytes of all twelve connections"
    assert grown < 64 * MIB


async def test_idle_connections_are_closed_for_active_ones(running: Pool):
    """Open far more connections than there are slots: the longest idle ones end, an honest client is served at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    opened = list[socket.socket]()
    try:
        where = urlsplit(running.base)
        for _ in range(min(2600, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200)):
            opened.append(socket.create_connection((str(where.hostname), where.port or 0), timeout=10))
        began = time.monotonic()
        assert await ask(running) == 200
        assert time.monotonic() - began < 8, "the slots were not waited for, whose first bytes may take 10 s"
        assert running.coordinator is not None
        assert psutil.Process(running.coordinator.pid).num_fds() < 2048 + 100
    finally:
        for one in opened:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_connection_with_too_many_pipelined_bytes_ends_after_its_answer(running: Pool, path: str):
    asked: dict[str, Any] = {"model": "scripted-1", "max_tokens": 30, "stream": path.startswith("/v1/chat")}
    asked |= {"messages": [{"role": "user", "content": "a"}]} if path.endswith("chat/completions") else {"prompt": "a"}
    body = json.dumps(asked).encode()
    reader, writer = await dial(running)
    head = request(running, f"content-length: {len(body)}", path=path)
    writer.write(head + body + b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 3000)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.transport.abort()
    assert status(answer) == 200
    assert answer.count(b"HTTP/1.1") <= 1 + SLICE_BYTES // 40, "those of the slice in which the request ended"
    assert b"[DONE]" in answer if asked["stream"] else b"usage" in answer


@pytest.mark.parametrize(
    "more", [b"", b"x", b"\r\n", b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", b"x" * 60_000, b"x" * 200_000]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_client_that_leaves_is_seen_whatever_it_sent_ahead(running: Pool, more: bytes, path: str):
    """Covers the fast path (chat completions) and the ASGI application (completions)."""
    asked: dict[str, Any] = {"model": "scripted-1", "max_tokens": 3000}
    asked |= {"messages": [{"role": "user", "content": "a"}]} if path.endswith("chat/completions") else {"prompt": "a"}
    body, name = json.dumps(asked).encode(), f"leaves-{next(NUMBERS)}"
    _, writer = await dial(running)
    head = request(running, f"content-length: {len(body)}", f"x-request-id: {name}", path=path)
    writer.write(head + body + more)
    await asyncio.to_thread(until, lambda: under_way(running, name), 10, "the request is under way")
    writer.transport.abort()
    await asyncio.to_thread(until, lambda: not under_way(running, name), 2, "the request ends")


def under_way(running: Pool, name: str) -> bool:
    try:
        return bool(running.get(f"/api/v1/requests/{name}")["under_way"])
    except urllib.error.HTTPError:  # 404: the request is not known yet, or no longer
        return False


async def test_a_body_that_never_begins_ends_after_its_time(running: Pool):
    """The body is announced, also with an expectation that is met, and never sent."""
    for lines in ((), ("expect: 100-continue",)):
        began = time.monotonic()
        head = request(running, "content-length: 100", *lines)
        answer = (await raw_after_continue(running, head))[-1]
        assert (status(answer), error(answer)["code"]) == (408, "request_timeout")
        assert 1 < time.monotonic() - began < 5


async def test_a_short_body_in_chunks_does_not_wait_for_another_one_of_its_key(running: Pool):
    """Its length is not announced. It reserves no room until it is long."""
    lines = ("transfer-encoding: chunked", "content-type: application/json")
    slow = [await dial(running) for _ in range(3)]
    for _, writer in slow:
        writer.write(request(running, *lines) + b"5\r\n{" + b'"mod' + b"\r\n")
    await asyncio.sleep(0.2)
    body = b'{"model":"scripted-1","max_tokens":1,"messages":[{"role":"user","content":"a"}]}'
    began = time.monotonic()
    reader, writer = await dial(running)
    slow.append((reader, writer))
    for part in (body[:20], body[20:]):  # in two reads, because it must not end at the first
        writer.write((request(running, *lines) if part == body[:20] else b"") + b"%x\r\n%s\r\n" % (len(part), part))
        await asyncio.sleep(0.1)
    writer.write(b"0\r\n\r\n")
    assert status(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)) == 200
    assert time.monotonic() - began < 1.5
    for _, writer in slow:
        writer.transport.abort()


async def raw_after_continue(running: Pool, head: bytes) -> list[bytes]:
    """Send a head; return every answer until the time of the body is over."""
    reader, writer = await dial(running)
    writer.write(head)
    got = b""
    async with asyncio.timeout(10):
        while b"request_timeout" not in got:
            got += await reader.read(65536)
    writer.transport.abort()
    return [b"HTTP/1.1 " + one for one in got.split(b"HTTP/1.1 ")[1:]]

"""Clients without a key: none of them may hold the loop, have a body read, or keep an honest client out."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.abuse.test_http_port import ask, dial, error, raw, request, status
from tests.support.loop_watch import MAX_HELD_SECONDS, Held, watch_server
from tests.support.processes import Pool, pool

pytestmark = pytest.mark.slow

VISITS = b"POST /api/v1/page/visits HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def running() -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        made.up()
        made.join("one", "engine.scripted.step_ms=1")
        yield made


@pytest.fixture
def held(running: Pool) -> Iterator[Held]:
    """Watch the coordinator for the whole test: nothing in it may hold the loop."""
    assert running.coordinator is not None
    with watch_server(running.base, running.coordinator.pid) as found:
        yield found
    assert found.ticks > 1
    assert found.seconds < MAX_HELD_SECONDS


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
    """The answer comes while the body is still to come."""
    for path in ("/api/v1/keys", "/api/v1/place", "/api/v1/models/load", "/v1/chat/completions", "/v1/videos"):
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000\r\n"
        for key in ("", "authorization: Bearer mp_wrong_wrong\r\n"):
            reader, writer = await dial(running)
            writer.write(f"{head}{key}\r\n".encode() + b'{"model')
            async with asyncio.timeout(3):
                assert (await reader.readline()).split()[1] == b"401", path
            writer.transport.abort()
    assert await ask(running) == 200

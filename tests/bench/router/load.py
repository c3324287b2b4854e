"""Bounded load over raw sockets: streams that are counted event by event, and plain requests in a few lanes."""

import asyncio
import json
import re
import selectors
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import urlsplit

PATIENCE = 30
"""Seconds after which an answer counts as lost."""
LINGERS = 2.0
"""Seconds after an answer in which a server either closes its connection or keeps it."""


@dataclass(slots=True)
class Seen:
    """Results of a load.

    `gaps`: Seconds between two events of one stream.
    `transit`: Seconds from the node's clock to the client.
    `took`: Seconds of each plain request.
    """

    events: int = 0
    requests: int = 0
    failed: int = 0
    gaps: list[float] = field(default_factory=list)
    transit: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list[float])
    seconds: float = 0.0


def request(base: str, key: str, body: Mapping[str, object]) -> bytes:
    """Return the bytes of one request."""
    parts = urlsplit(base)
    content = json.dumps(body).encode()
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.hostname}:{parts.port}\r\n"
        f"authorization: Bearer {key}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    ).encode() + content


async def connect(base: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to a base URL."""
    parts = urlsplit(base)
    return await asyncio.open_connection(parts.hostname, parts.port, limit=2**20)


async def _stream(base: str, key: str, tokens: int, seen: Seen) -> None:
    reader, writer = await connect(base)
    body = {
        "model": "scripted-1",
        "messages": [{"role": "user", "content": "hello there"}],
        "stream": True,
        "max_tokens": tokens,
    }
    writer.write(request(base, key, body))
    last = None
    try:
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                if line.startswith(b"data: [DONE]"):
                    break
                continue
            start = line.find(b'"content":"')
            if start < 0:
                continue
            now = time.monotonic()
            word = line[start + 11 : line.find(b'"', start + 11)].strip()
            if not word:
                continue
            seen.events += 1
            if word.isdigit():
                seen.transit.append(now - int(word) / 1e9)
            if last is not None:
                seen.gaps.append(now - last)
            last = now
        else:
            seen.failed += 1
    finally:
        writer.close()


async def streams(base: str, key: str, count: int, tokens: int) -> Seen:
    """Run `count` streams of `tokens` tokens in parallel."""
    seen = Seen()
    began = time.monotonic()
    await asyncio.gather(*[_stream(base, key, tokens, seen) for _ in range(count)])
    seen.seconds = time.monotonic() - began
    return seen


def apart(base: str, model: str, count: int, tokens: int, most: float) -> list[float]:
    """Run `count` streams in parallel and return the seconds between consecutive reads of any stream.

    Gaps of `most` and more are left out, because they are the time between two steps.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "hello there"}],
        "stream": True,
        "max_tokens": tokens,
    }
    parts, times = urlsplit(base), list[float]()
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection((parts.hostname or "", parts.port or 0), 30))
            connection.sendall(request(base, "none", body))
            selector.register(connection, selectors.EVENT_READ, connection)
        while selector.get_map():
            ready = selector.select(30)
            if not ready:
                raise RuntimeError(f"{base} sends no more data")
            for key, _ in ready:
                data = key.data.recv(2**16)
                times.append(time.monotonic())
                if not data or b"data: [DONE]" in data:
                    selector.unregister(key.data)
    return [later - one for one, later in pairwise(times) if later - one < most]


def manners(base: str, model: str) -> str:
    """Return the HTTP version of a server's plain answer, and whether the server then closes the connection."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 2}
    parts = urlsplit(base)
    with socket.create_connection((parts.hostname or "", parts.port or 0), 30) as connection:
        connection.sendall(request(base, "none", body))
        answer = connection.recv(2**16)
        version = answer.partition(b" ")[0].decode()
        connection.settimeout(LINGERS)
        try:
            while answer:
                answer = connection.recv(2**16)
        except TimeoutError:
            return f"{version}, keeps the connection"
    return f"{version}, closes the connection"


async def _lane(base: str, key: str, count: int, tokens: int, seen: Seen, pause: float) -> None:
    reader, writer = await connect(base)
    body = {"model": "scripted-1", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": tokens}
    sent = request(base, key, body)
    try:
        for _ in range(count):
            begun = time.monotonic()
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:")
            await reader.readexactly(length)
            seen.took.append(time.monotonic() - begun)
            seen.requests += 1
            if not head.startswith(b"HTTP/1.1 200"):
                seen.failed += 1
            if pause:
                await asyncio.sleep(pause)
    finally:
        writer.close()


async def plain(base: str, key: str, lanes: int, count: int, tokens: int, pause: float = 0.0) -> Seen:
    """Run `count` plain requests in each of `lanes` lanes, and wait for `pause` seconds after each."""
    seen = Seen()
    began = time.monotonic()
    await asyncio.gather(*[_lane(base, key, count, tokens, seen, pause) for _ in range(lanes)])
    seen.seconds = time.monotonic() - began
    return seen


SCRIPT = """
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
wrk.headers["authorization"] = "Bearer %s"
local bodies = {%s}
request = function() return wrk.format(nil, nil, nil, bodies[math.random(#bodies)]) end
local refused = false
response = function(status, headers, body)
  if status > 299 and not refused then
    refused = true
    io.stderr:write("the first refusal: " .. status .. " " .. body .. "\\n")
  end
end
"""


def rush(base: str, key: str, lanes: int, seconds: int, tokens: Sequence[int], body: Mapping[str, object]) -> int:
    """Run plain requests in `lanes` connections for `seconds` and return the number of answers.

    The program wrk sends the requests, because its own speed does not limit the result. Each request asks for one of
    the lengths in `tokens`. Raise RuntimeError if wrk is not installed, or an answer is no success; the text has the
    first such answer.
    """
    if shutil.which("wrk") is None:
        raise RuntimeError("wrk is not installed (Debian: apt-get install wrk)")
    bodies = [{"model": "scripted-1", **body, "max_tokens": length} for length in tokens]
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(SCRIPT % (key, ", ".join(json.dumps(json.dumps(body)) for body in bodies)))
        script.flush()
        command = [
            "wrk",
            "-t1",
            f"-c{lanes}",
            f"-d{seconds}",
            f"--timeout={PATIENCE}",
            "-s",
            script.name,
            base + "/v1/chat/completions",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"(\d+) requests in", done.stdout)
    if found is None or "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise RuntimeError(f"{base}: {done.stderr}{done.stdout}")
    return int(found[1])

"""Mutated HTTP streams through the product's protocol class, compared with h11.

Every request that reaches a route here must be the request that h11 reads at the same position: the same method,
target, headers and body. More refusals than h11's are allowed (docs/decisions/0023-limits-at-the-edge.md lists them). A
different or additional request is a surprise. Other surprises are an exception, an answer of 5xx other than 501, and an
answer without a request.
"""

import asyncio
import logging
import random
import re
from collections.abc import Iterator
from typing import Any, cast

import h11
import uvicorn
from uvicorn.server import ServerState

from coordinator.http.chat_fast_path import FastPath, FastPathProtocol, ParsedHead
from coordinator.http.origin_check import OriginCheck
from router.admission.api_keys import KeyRing
from router.settings import RouterSettings

COUNT = 200_000
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
KEY = b"authorization: Bearer mp_key_secret\r\n"
HOST = b"host: 127.0.0.1\r\n"
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\n"
SEEDS = (
    b"GET /livez HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /v1/models?limit=5 HTTP/1.1\r\n" + HOST + KEY + b"accept: */*\r\nx-long: a b\tc\r\n\r\n",
    b"HEAD / HTTP/1.0\r\n" + HOST + b"\r\n",
    CHAT + HOST + KEY + b"content-length: 7\r\n\r\n" + b'{"a":1}',
    CHAT + HOST + KEY + b"content-length: 7\r\nconnection: keep-alive\r\n\r\n" + b'{"a":1}',
    CHAT + HOST + KEY + b"transfer-encoding: chunked\r\n\r\n3\r\n" + b'{"a\r\n4;x=y\r\n":1}\r\n0\r\n\r\n',
    CHAT + HOST + KEY + b"transfer-encoding: chunked\r\ntrailer: x-a\r\n\r\n2\r\n{}\r\n0\r\nx-a: b\r\n" + KEY + b"\r\n",
    b"POST /api/v1/keys HTTP/1.1\r\n" + HOST + KEY + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
    b"POST /api/v1/keys HTTP/1.1\r\n" + HOST + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAMAAABkAAQAAP__\r\ncontent-length: 51\r\n\r\n"
    b"GET /api/v1/nodes HTTP/1.1\r\nhost: 127.0.0.1\r\nx: y\r\n\r\n",
    b"DELETE /api/v1/keys/x HTTP/1.1\r\n" + HOST + KEY + b"connection: close\r\n\r\n",
    b"PUT /api/v1/nodes/x/labels HTTP/1.1\r\n" + HOST + b"x-api-key: a\r\ncontent-encoding: identity\r\n"
    b"content-length: 13\r\n\r\n" + b'{"labels":[]}',
)
PIECES = (
    b"\r\n",
    b"\n",
    b"\r",
    b" ",
    b"\t",
    b"\0",
    b"\x0b",
    b"\x7f",
    b"\x85",
    b"\xff",
    b":",
    b",",
    b";",
    b"0",
    b"1",
    b"a",
    b"content-length: 5\r\n",
    b"content-length: 0\r\n",
    b"content-length: +5\r\n",
    b"content-length: 5, 5\r\n",
    b"content-length: " + b"0" * 4300 + b"5\r\n",
    b"transfer-encoding: chunked\r\n",
    b"transfer-encoding: gzip, chunked\r\n",
    b"transfer-encoding: identity\r\n",
    b"Transfer-Encoding:\tchunked\r\n",
    b"transfer-encoding : chunked\r\n",
    KEY,
    HOST,
    b"expect: 100-continue\r\n",
    b"expect: x\r\n",
    b"content-encoding: gzip\r\n",
    b"upgrade: websocket\r\n",
    b"connection: upgrade\r\n",
    b"connection: close\r\n",
    b"connection: keep-alive\r\n",
    b"trailer: host\r\n",
    b"x-api-key: b\r\n",
    b" folded\r\n",
    b"\tfolded: x\r\n",
    b": empty\r\n",
    b"x-a:\r\n",
    b"x a: b\r\n",
    b"0\r\n\r\n",
    b"5\r\nhello\r\n",
    b"ffffffffffffffff\r\n",
    b"-1\r\n",
    b"0x5\r\n",
    b"5 \r\nhello\r\n",
    b"5;\n",
    b"HTTP/1.0",
    b"HTTP/1.1",
    b"HTTP/2.0",
    b"HTTP/0.9",
    b"http/1.1",
    b"http://evil.example",
    b"CONNECT ",
    b"%0d%0a",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    b"\xef\xbb\xbf",
    b"\r\n\r\n",
    b"\n\n",
)
Seen = tuple[bytes, bytes, tuple[tuple[bytes, bytes], ...], bytes]
"""Method, target, headers, body."""
_SPACES = re.compile(rb"\A([^\r\n ]+) +([^\r\n ]+) +HTTP/")
"""Empty lines before a request, and several spaces in its first line, are accepted (RFC 9112, 2.2 and 3); h11 refuses
them."""
HOT = ((b"", b""),)
"""Headers of a request that the fast path answers itself: none are kept."""


def streams(seed: int, count: int) -> list[bytes]:
    """Make the inputs."""
    draw = random.Random(seed)
    return [_mutated(draw) for _ in range(count)]


def _mutated(draw: random.Random) -> bytes:
    data = b"".join(draw.choice(SEEDS) for _ in range(draw.choice((1, 1, 1, 2, 3))))
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3, 5))):
        data = _changed(data, draw)
    return data


def _changed(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    how = draw.randrange(8)
    if how == 0:
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    if how == 1:
        return data[:at] + data[at + draw.choice((1, 1, 2, 8)) :]
    if how == 2:
        return data[:at] + draw.choice(PIECES) + data[at:]
    if how == 3:
        return data[:at]
    lines = data.split(b"\r\n")
    line = draw.randrange(len(lines))
    if how == 4:
        lines.insert(draw.randrange(len(lines) + 1), lines[line])
    elif how == 5:
        other = draw.randrange(len(lines))
        lines[line], lines[other] = lines[other], lines[line]
    elif how == 6:
        lines.insert(line, draw.choice(PIECES).removesuffix(b"\r\n"))
    else:
        return data.replace(draw.choice((b"\r\n", b": ", b"1", b"a", b"-")), draw.choice(PIECES), 1)
    return b"\r\n".join(lines)


# -- ours -----------------------------------------------------------------------------------------


class Transport:
    """A connection that records its output."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = False

    def write(self, data: bytes) -> None:
        if not self.closed:
            self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


class RecordingDoor(FastPath):
    """Accepts every body that the fast path would examine."""

    def job(self, head: ParsedHead, body: bytes) -> Any:
        return body


class Recorded(FastPathProtocol):
    """The product's protocol. Requests of the fast path are recorded and get an empty answer."""

    seen: list[Seen]

    def _start(self, job: Any) -> None:
        self.seen.append((b"POST", b"/v1/chat/completions", HOT, bytes(job)))
        self._deadline.cancel()
        self.transport.write(ANSWER)
        if self._pipelined:
            self.loop.call_soon(self._parse_held_bytes)


class Ours:
    """Reads streams as the HTTP port does."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._config = uvicorn.Config(
            self._app,
            interface="asgi3",
            loop="none",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
        )
        self._config.load()
        Recorded.fast_path = RecordingDoor(cast("Any", None), KeyRing(b"p"), RouterSettings(), OriginCheck(self._app))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            part = await receive()
            if part["type"] != "http.request":
                return
            body += part["body"]
            if not part["more_body"]:
                break
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        self.seen.append((scope["method"].encode(), target, _headers(scope["headers"]), body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def read(self, data: bytes, cuts: list[int]) -> tuple[list[Seen], bytes]:
        """Return the requests that reached a route, and all written bytes."""
        self.seen = []
        transport = Transport()
        protocol = Recorded(config=self._config, server_state=ServerState(), app_state={})
        protocol.seen = self.seen
        protocol.connection_made(cast("asyncio.Transport", transport))
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            if end > begin and not transport.closed:
                protocol.data_received(data[begin:end])
                await asyncio.sleep(0)
        for _ in range(6 + 4 * len(self.seen)):
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        for _ in range(3):
            await asyncio.sleep(0)
        return self.seen, bytes(transport.written)


def _headers(found: Any) -> tuple[tuple[bytes, bytes], ...]:
    """Return headers without those of an offer to upgrade, in the form that both sides can have."""
    dropped = (b"connection", b"upgrade", b"http2-settings")
    return tuple((bytes(name), bytes(value).strip(b" \t")) for name, value in found if name not in dropped)


# -- h11 --------------------------------------------------------------------------------------------


def strictly(data: bytes) -> Iterator[Seen]:
    """Yield the requests that h11 reads. Answer each of them, because h11 then reads the next one."""
    while True:
        conn = h11.Connection(h11.SERVER, max_incomplete_event_size=64 * 1024)
        conn.receive_data(_SPACES.sub(rb"\1 \2 HTTP/", data.lstrip(b"\r\n")))
        request, body = None, b""
        try:
            while not isinstance(event := conn.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                else:
                    return
        except h11.RemoteProtocolError:
            return
        if request is None:
            return
        yield request.method, request.target, _headers(request.headers), body
        conn.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        conn.send(h11.EndOfMessage())
        if conn.our_state is not h11.DONE:
            return
        data = conn.trailing_data[0]


# -- both -------------------------------------------------------------------------------------------


class _Errors(logging.Handler):
    """Records errors in the log: exceptions that reached the server."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(f"{record.getMessage()} {record.exc_info and record.exc_info[1]!r}")


def run(seed: int, count: int) -> list[str]:
    """Run the group (`tests.fuzz`)."""
    errors, quiet = _Errors(), logging.getLogger("uvicorn.error")
    level, quiet.propagate = quiet.level, False
    quiet.addHandler(errors)
    quiet.setLevel(logging.ERROR)
    try:
        return asyncio.run(_run(seed, count, errors))
    finally:
        quiet.removeHandler(errors)
        quiet.setLevel(level)
        quiet.propagate = True


async def _run(seed: int, count: int, errors: _Errors) -> list[str]:
    ours, found = Ours(), list[str]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.found.append(f"{context}"))
    draw = random.Random(seed + 1)
    for number, data in enumerate(streams(seed, count)):
        cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice((0, 0, 1, 3)))) if data else []
        try:
            seen, written = await ours.read(data, cuts)
            why = _difference(seen, list(strictly(data)), written, errors.found)
        except Exception as error:
            why = repr(error)
        if why:
            found.append(f"{number}: {why}: {data!r} cut at {cuts}")
        errors.found.clear()
    return found


def _difference(seen: list[Seen], strict: list[Seen], written: bytes, errors: list[str]) -> str:
    if errors:
        return f"error {errors[0]}"
    if len(seen) > len(strict):
        return f"{len(seen)} requests, h11 reads {len(strict)}: {seen[len(strict)]}"
    for one, other in zip(seen, strict, strict=False):
        if one != other and not (one[2] == HOT and (one[0], one[1], one[3]) == (other[0], other[1], other[3])):
            return f"{one} is {other} for h11"
    answers = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", written)]
    wrong = [status for status in answers if status >= 500 and status != 501]
    if wrong:
        return f"answered {wrong}"
    finals = [status for status in answers if status >= 200]
    return f"{len(finals)} answers for {len(seen)} requests" if len(finals) < len(seen) else ""

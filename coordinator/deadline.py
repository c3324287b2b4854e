"""The HTTP port's patience: uvicorn's protocol with an absolute deadline and a limit for the head of a request.

uvicorn waits for ever for a head that drips, and lets it grow without end. Here a head has HEAD_SECONDS from its first
byte (from the connection for the first one), however its bytes are spread, and HEAD_BYTES. Between two requests
uvicorn's keep-alive rules; nothing here touches a running response. Routes bound their bodies themselves (`router.app`,
`coordinator.api.body`).
"""

import asyncio
from http import HTTPStatus
from typing import Any, ClassVar, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.problems import Problem

HEAD_SECONDS = 10.0
HEAD_BYTES = 32 * 1024
MOST_CONNECTIONS = 4096
VERSIONS = frozenset({"1.0", "1.1"})

TOO_LONG = Problem(431, "head_too_large", f"the head of a request may have {HEAD_BYTES} bytes")
CROWDED = Problem(503, "too_many_connections", "too many connections are open here: try again", retry_after=5.0)
MALFORMED = Problem(400, "malformed_http", "this is not a valid HTTP request")


class DeadlineProtocol(HttpToolsProtocol):
    """One HTTP connection. `most` may be open at a time, so that files are left for the links of the nodes."""

    most: ClassVar[int] = MOST_CONNECTIONS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parsed = 0
        self._unparsed = 0
        self._begun = self._in_body = self._ahead = False
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the clock of the first head."""
        super().connection_made(transport)
        self._arm()
        if len(self.connections) > self.most:
            self._turn_away(CROWDED)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; a head that has begun is on the clock, and so is the rest of a body that nobody waits for."""
        before, answering = self.cycle, self._begun and not self.cycle.response_complete
        super().data_received(data)
        if self.transport.is_closing() or self.cycle is not before:
            return
        if answering:
            self._ahead = self._ahead or not self._in_body
            return
        self._arm()
        if not self._in_body:
            self._unparsed += len(data)
            if self._unparsed > HEAD_BYTES:
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """Begin to count a head."""
        self._parsed = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count. Only a path is a target here: whoever names a host beside the Host header means another server."""
        if not self._parsed and not url.startswith(b"/"):
            raise httptools.HttpParserError("the target is no path")
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count, trailers too."""
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the clock: the head is here. The parser takes versions that nobody speaks."""
        if cast("Any", self.parser).get_http_version() not in VERSIONS:
            raise httptools.HttpParserError("only HTTP/1.0 and 1.1 are spoken here")
        self._disarm()
        self._begun, self._in_body, self._ahead, self._unparsed = True, True, False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that what comes now is another head."""
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the clock if the next head has begun already."""
        super().on_response_complete()
        if self._ahead:
            self._arm()

    def send_400_response(self, msg: str) -> None:
        """Answer in the shape of all other errors, and close."""
        self._turn_away(TOO_LONG if max(self._parsed, self._unparsed) > HEAD_BYTES else MALFORMED)

    def _turn_away(self, problem: Problem) -> None:
        body = problem.body("")
        head = f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\ncontent-type: application/json\r\n"
        head += "".join(f"{name.decode()}: {value.decode()}\r\n" for name, value in problem.headers())
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def _count(self, size: int) -> None:
        self._parsed += size
        if self._parsed > HEAD_BYTES:
            raise httptools.HttpParserError("the head is too long")

    def _arm(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self._too_late)

    def _disarm(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        self.transport.abort()

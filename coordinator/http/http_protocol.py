"""Protocol of the HTTP port: uvicorn's protocol with limits for request heads and pipelined bytes.

Uvicorn has no timeout and no size limit for a request head. Here a head has `MAX_HEAD_BYTES`, and
`HEAD_TIMEOUT_SECONDS` from its first byte. The timeout of a connection's first head starts with the connection. Between
two requests uvicorn's keep-alive timeout applies. A running response has no deadline here. Routes limit their own
bodies (`router.http.app`, `coordinator.api.body`).

Bytes are parsed in slices, and not while a complete request waits for its answer. Bytes that a client sends ahead are
held unparsed. Otherwise a connection could turn 8 MiB into 200,000 requests in memory, and an error in these bytes
would be written into the current answer. The socket is read during an answer as well, because only a read shows that
the client has disconnected. If a client sends more than `MAX_PIPELINED_BYTES` ahead, they are discarded and the
connection ends after the current answer.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from coordinator.http import ambiguous_heads
from coordinator.http.ambiguous_heads import MALFORMED
from coordinator.http.connection_slots import MAX_CONNECTIONS, ConnectionSlot
from coordinator.http.origin_check import Asgi, Message, Receive, Scope, Send
from router.errors import Problem
from router.http.exchange import choose_request_id

HEAD_TIMEOUT_SECONDS = 10.0
"""Maximum seconds until a request head is complete, and for the rest of a body whose answer is already complete."""
MAX_HEAD_BYTES = 32 * 1024
"""Maximum bytes of a request head. A longer head is refused with 431."""
MAX_PIPELINED_BYTES = 64 * 1024
"""Maximum bytes that a client may send ahead of the answer to its last request. With more, the connection ends after
that answer."""
SLICE_BYTES = 512
"""Bytes that are parsed in one call where a head may start. They contain at most 18 of the shortest requests."""
VERSIONS = frozenset({"1.0", "1.1"})
"""Accepted versions of HTTP."""

HEAD_TOO_LONG = Problem(431, "head_too_large", f"the head of a request may have {MAX_HEAD_BYTES} bytes")
TOO_MANY_CONNECTIONS = Problem(
    503, "too_many_connections", "too many connections are open here: try again", retry_after=5.0
)


def build_problem_response(problem: Problem) -> bytes:
    """Return a complete HTTP response with a problem and `connection: close`, for answers that bypass the ASGI app.

    The response has a new request id, because the request's headers were not read completely.
    """
    request_id = choose_request_id(())
    body = problem.encode_body(request_id)
    head = f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\ncontent-type: application/json\r\n"
    head += f"x-request-id: {request_id}\r\n"
    head += "".join(f"{name.decode()}: {value.decode()}\r\n" for name, value in problem.build_headers())
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


class UnchunkedSend:
    """ASGI function `send` for the answer to an HTTP/1.0 request, which must not have chunks (RFC 9112, 6.1).

    Uvicorn sends chunks if an answer has no `content-length`. With this class, the end of the connection ends such an
    answer.
    """

    def __init__(self, cycle: RequestResponseCycle, send: Send) -> None:
        self._cycle = cycle
        self._send = send
        self._without_length = False

    async def __call__(self, message: Message) -> None:
        """Send a message. In an answer without `content-length`, set uvicorn's expected length to that of the part."""
        if message["type"] == "http.response.start":
            self._without_length = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self._without_length:
                self._cycle.chunked_encoding = False
        elif self._without_length:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


async def _serve_without_chunks(
    app: Asgi, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    await app(scope, receive, UnchunkedSend(cycle, send))


class HeadDeadline:
    """Deadline for the rest of a request head, or of a body that the app does not read.

    `abort` is called when the deadline has passed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, abort: Callable[[], None]) -> None:
        self._loop = loop
        self._abort = abort
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the deadline, unless it is already running."""
        if self._timer is None:
            self._timer = self._loop.call_later(HEAD_TIMEOUT_SECONDS, self._expire)

    def cancel(self) -> None:
        """Cancel the deadline, if it is running."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        self._abort()


class DeadlineProtocol(HttpToolsProtocol):
    """Connection of one HTTP client: uvicorn's protocol with the limits of this module.

    A client that exceeds a limit is refused or disconnected. Above `max_connections`, a new connection is answered with
    503, so that file descriptors remain for the links of nodes. `slot` is the slot of the connection
    (`connection_slots`); None if slots are not limited.
    """

    max_connections: ClassVar[int] = MAX_CONNECTIONS

    def __init__(self, *args: Any, slot: ConnectionSlot | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parsed = 0
        self._unparsed = 0
        self._body_left = 0
        self._in_head = self._in_body = self._upgrades = False
        self._pipelined = b""
        self._overrun = False
        self._deadline = HeadDeadline(self.loop, self._abort)
        self._refusal: Problem | None = None
        self._running: RequestResponseCycle | None = None
        self.slot = slot

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the deadline of the first head. Above the limit of connections, answer 503 and close."""
        super().connection_made(transport)
        if self.slot is not None:
            self.slot.bind(transport.abort)
            self.slot.record_handshake_end()
        self._deadline.start()
        if len(self.connections) > self.max_connections:
            self._refuse(TOO_MANY_CONNECTIONS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline, release the slot, and mark every open request of this connection as disconnected."""
        self._deadline.cancel()
        if self.slot is not None:
            self.slot.release()
        self._pipelined = b""
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    # -- bytes in ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse bytes of the current request. Hold bytes that the client sends before the answer is complete.

        Above `MAX_PIPELINED_BYTES`, discard the held bytes, and end the connection after the current answer.
        """
        if self._pipelined or self._overrun or self._is_answering():
            self._hold_bytes(data)
        else:
            self._feed_parser(data)

    def _is_answering(self) -> bool:
        """Return whether a request is complete and its answer is not."""
        if self.pipeline:
            return True
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and not cycle.response_complete and not self._in_body

    def _hold_bytes(self, data: bytes) -> None:
        if not self._overrun:
            self._pipelined += data
        if len(self._pipelined) > MAX_PIPELINED_BYTES:
            self._pipelined, self._overrun = b"", True
            self.shutdown()

    def _parse_held_bytes(self) -> None:
        """Parse the held bytes after an answer is complete."""
        if self._pipelined and not self._is_answering() and not self.transport.is_closing():
            ahead, self._pipelined = self._pipelined, b""
            self._feed_parser(ahead)

    def _feed_parser(self, data: bytes) -> None:
        """Parse in slices until a request is complete. The rest of a body of known length is one slice."""
        self._unset_keepalive_if_required()
        view, at = memoryview(data), 0
        while at < len(view) and not self.transport.is_closing():
            if at and self._is_answering():
                self._hold_bytes(bytes(view[at:]))
                return
            piece = view[at : at + (self._body_left or SLICE_BYTES)]
            at += len(piece)
            unparsed = self._parse(piece)
            if unparsed is None:
                return
            at -= unparsed

    def _parse(self, piece: memoryview) -> int | None:
        """Parse a piece. Return the number of unparsed bytes at its end; None if the connection ends."""
        before, in_body, unparsed = self.cycle, self._in_body, 0
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            unparsed = len(piece) - int(upgrade.args[0])
            if not self._parse_without_upgrade():
                return None
        except httptools.HttpParserError:
            self.send_400_response("")
            return None
        if self.transport.is_closing():
            return None
        if in_body and not self._in_body:  # the end of a body, even of a refused one, is not part of a head
            self._deadline.cancel()
            return unparsed
        if self.cycle is before:
            return unparsed if self._expect_more(len(piece)) else None
        return unparsed

    def _expect_more(self, size: int) -> bool:
        """Start the deadline for an incomplete head, or for the rest of a body that the app does not read.

        Return False if a head is over the limit. A complete request has no deadline, because its answer may take
        minutes.
        """
        if self._is_answering() or (self._in_body and not self.cycle.response_complete):
            return True
        self._deadline.start()
        if not self._in_body:
            self._unparsed += size
            if self._unparsed > MAX_HEAD_BYTES:
                self.send_400_response("")
                return False
        return True

    def _parse_without_upgrade(self) -> bool:
        """Parse a head with an `Upgrade` header again without this header, to read the body as a body.

        Return False if the head is refused then.
        """
        parser, self._upgrades = self.parser, False
        head = ambiguous_heads.serialize_without_upgrade(
            parser.get_method(), self.url, parser.get_http_version(), self.headers
        )
        self.parser = httptools.HttpRequestParser(self)
        try:
            self.parser.feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.send_400_response("")
            return False
        return True

    # -- the parser's calls -------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Reset the count of a head's bytes, because a request begins."""
        self._parsed, self._in_head = 0, True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count the bytes of the request target, and check that the target is a path without a fragment.

        Raise `HttpParserError` if not, or if the head is too long. A target with a host could contradict the Host
        header. A fragment is for the client only, and a proxy may interpret it although the routes do not.
        """
        if not self._parsed and not url.startswith(b"/"):
            raise httptools.HttpParserError("the target is no path")
        if b"#" in url:
            raise httptools.HttpParserError("the target has a fragment")
        self._count_head_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of a header. Raise `HttpParserError` if the head is too long.

        A trailer is counted and discarded, because it arrives after the check of the headers.
        """
        self._count_head_bytes(len(name) + len(value) + 4)
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the complete head, cancel its deadline and mark the connection as busy.

        Raise `HttpParserError` for a head that is refused, and for versions other than 1.0 and 1.1, which httptools
        accepts.
        """
        version = cast("Any", self.parser).get_http_version()
        if version not in VERSIONS:
            raise httptools.HttpParserError("only HTTP/1.0 and HTTP/1.1 are supported")
        self._refusal = ambiguous_heads.find_problem(version, self.headers)
        if self._refusal is not None:
            raise httptools.HttpParserError(self._refusal.code)
        if self.parser.should_upgrade():
            self._upgrades = True
            return
        if version == "1.0":
            self.expect_100_continue = False
        self._deadline.cancel()
        self._in_head, self._in_body, self._unparsed = False, True, 0
        self._body_left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        self._mark_busy()
        super().on_headers_complete()
        if self.pipeline:  # uvicorn pauses reads here, and would miss a disconnect of the client
            self.flow.resume_reading()

    def _mark_busy(self) -> None:
        """Mark this connection as busy while its request is answered. A valid key grants its address more slots."""
        if self.slot is not None:
            self.slot.mark_busy()
            if not self.slot.has_valid_key and self._has_valid_key():
                self.slot.record_valid_key()

    def _has_valid_key(self) -> bool:
        """Return whether the head has a valid key. Overridden by a protocol that has access to the keys."""
        return False

    def on_body(self, body: bytes) -> None:
        """Subtract the size of received bytes from the remaining length of the body."""
        self._body_left = max(0, self._body_left - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record that the request is complete, so that the next bytes belong to another head."""
        if self._upgrades:
            return
        self._in_body, self._body_left = False, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Mark the connection as idle, start the deadline if the next head has begun, and parse held bytes."""
        super().on_response_complete()
        if self.slot is not None and not self.pipeline:
            self.slot.mark_idle()
        if self._in_head:
            self._deadline.start()
        if self._pipelined:
            self.loop.call_soon(self._parse_held_bytes)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start the task that answers a request, and record its request. All requests before it are answered."""
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = partial(_serve_without_chunks, app, cycle)
        super()._start_asgi_task(cycle, app)

    # -- answers of our own -------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed with a problem as JSON, and close the connection. `msg` is not used.

        If an earlier request is unanswered, send nothing and close after its answer, because the client would take the
        problem for that answer. If an answer has begun, abort the connection.
        """
        problem, self._refusal = self._refusal or MALFORMED, None
        if self._is_answering():
            self.cycle.keep_alive = False
            return
        if self._in_body and self.cycle.response_started:
            self.transport.abort()
            return
        self._refuse(HEAD_TOO_LONG if max(self._parsed, self._unparsed) > MAX_HEAD_BYTES else problem)

    def _refuse(self, problem: Problem) -> None:
        self.transport.write(build_problem_response(problem))
        self.transport.close()

    def _count_head_bytes(self, size: int) -> None:
        self._parsed += size
        if self._parsed > MAX_HEAD_BYTES:
            raise httptools.HttpParserError("the head is too long")

    def _abort(self) -> None:
        self.transport.abort()

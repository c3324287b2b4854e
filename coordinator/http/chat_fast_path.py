"""Fast path of the HTTP port: common chat requests go from the socket to the dispatcher without ASGI.

Uvicorn serves every route; `FastPathProtocol` only checks first. A complete `POST /v1/chat/completions` in the buffer
with a valid key and body is answered here. No task and no ASGI scope is made, and a head that was seen before is not
parsed again (docs/decisions/0041 has the measured times). All else passes on unchanged to the ASGI app: another route,
a body in pieces, a wrong key, an invalid parameter. Only the app refuses invalid requests. Answers and dispatcher
errors are the same on both paths.

Rules
- Bytes are examined here only between two requests, while uvicorn's parser is idle.
- Exactly one request at a time: bytes that a client sends ahead are held unparsed (`coordinator.http.http_protocol`).
- Every exit path closes the request.
"""

import itertools
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

from msgspec.structs import replace

from coordinator.http.http_protocol import DeadlineProtocol
from coordinator.http.origin_check import OriginCheck
from router.admission.api_keys import SESSION_HEADER, KeyRing, extract_key, is_forwarded, parse_session
from router.dialects.openai import chat, chat_response
from router.dispatch.active_request import ActiveRequest
from router.dispatch.answer import CollectedAnswer, StreamedAnswer
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.request import Outcome, RequestSpec
from router.errors import Header, Problem
from router.http.exchange import MAX_INLINE_BYTES
from router.http.respond import build_optional_headers
from router.http.sse import StreamPump, build_problem
from router.settings import RouterSettings
from wire.frames import Finished
from wire.identity import is_valid_request_id

REQUEST_START = b"POST /v1/chat/completions HTTP/1.1\r\n"
_HEAD_START_BYTES = len(REQUEST_START) - 2  # the empty line may begin with the line break of the first line
MAX_CACHED_HEADS = 512
"""Maximum cached heads, because clients repeat their heads. A further head empties the cache first."""
MAX_HEAD_BYTES = 8192
"""Maximum bytes of a head on the fast path. The app answers requests with longer heads."""
_COMPLETE_RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n%s"
_ERROR_RESPONSE = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n%s"
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"x-accel-buffering: no\r\ntransfer-encoding: chunked\r\n%s\r\n"
)
_NAME = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_UNUSUAL_HEADERS = frozenset({b"transfer-encoding", b"content-encoding", b"expect", b"upgrade"})


@dataclass(frozen=True, slots=True)
class ParsedHead:
    """Parsed head of a chat request."""

    length: int | None = None
    """Bytes of the body; None if the app must answer the request."""
    key: bytes = b""
    """API key as the client sent it, not yet checked."""
    key_hash: bytes = b""
    """Salted hash of the API key, with which the key ring finds the key."""
    request_id: str = ""
    """Valid request id of the client; empty without one."""
    session: str = ""
    """Name of the conversation from the header `x-session-id`; empty without one."""


class FastPath:
    """Parser of chat requests for the fast path, shared by all connections."""

    def __init__(self, dispatcher: Dispatcher, ring: KeyRing, settings: RouterSettings, guard: OriginCheck) -> None:
        self.dispatcher = dispatcher
        self.max_body_bytes = min(settings.max_body_bytes, MAX_INLINE_BYTES)
        """Maximum bytes of a body on the fast path. The app answers requests with larger bodies."""
        self._ring = ring
        self._guard = guard
        self._strict = settings.unknown_fields == "refuse"
        self._heads: dict[bytes, ParsedHead] = {}
        self._prefix = secrets.token_hex(5)
        self._count = itertools.count(1)

    def parse_head(self, raw: bytes) -> ParsedHead:
        """Parse a request head, without the empty line at its end, or return the cached result.

        `length` of the result is None for an unusual head, whose request the app must answer.
        """
        known = self._heads.get(raw)
        if known is None:
            known = self._parse_new_head(raw)
            if len(self._heads) >= MAX_CACHED_HEADS:
                self._heads.clear()
            self._heads[raw] = known
        return known

    def _parse_new_head(self, raw: bytes) -> ParsedHead:
        headers: list[Header] = []
        for line in raw.split(b"\r\n")[1:]:
            name, colon, value = line.partition(b":")
            if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
                return ParsedHead()
            headers.append((name.lower(), value.strip()))
        names = [name for name, _ in headers]
        if len(set(names)) != len(names) or any(
            name in _UNUSUAL_HEADERS or (name == b"connection" and value.lower() != b"keep-alive")
            for name, value in headers
        ):
            return ParsedHead()
        by_name = dict(headers)
        length, key = by_name.get(b"content-length", b""), extract_key(headers)
        if (
            not length.isdigit()
            or len(length) > 9
            or key is None
            or (self._ring.anonymous is not None and is_forwarded(headers))
            or self._guard.find_problem("POST", headers) is not None
        ):
            return ParsedHead()
        request_id = by_name.get(b"x-request-id", b"").decode("latin-1")
        return ParsedHead(
            int(length),
            key,
            self._ring.compute_salted_hash(key),
            request_id if is_valid_request_id(request_id) else "",
            parse_session(by_name.get(SESSION_HEADER)),
        )

    def is_known_key(self, presented: bytes) -> bool:
        """Return whether an API key is known and not expired (`KeyRing.is_valid`). A wrong key is not counted."""
        return self._ring.is_valid(presented)

    def parse_request(self, head: ParsedHead, body: bytes) -> RequestSpec | None:
        """Check key and body of a complete request, and return its specification; None if the app must answer it."""
        key = self._ring.find(head.key, head.key_hash)  # the app counts a wrong key
        if key is None or not key.allows("infer"):
            return None
        parsed = chat.parse(body, strict=self._strict)
        # the app handles log probabilities (in a thread) and calls of custom tools
        if isinstance(parsed, Problem) or parsed.params.logprobs or parsed.custom:
            return None
        names = self.dispatcher.names
        if names.has_upstreams and names.may_mean_upstream(parsed.demand.model, self.dispatcher.view):
            return None
        job = parsed.to_spec(key.id, head.request_id or f"{self._prefix}{next(self._count):08x}", int(time.time()))
        return replace(job, session=head.session) if head.session else job


class FastPathProtocol(DeadlineProtocol):
    """Connection of one client, with the fast path for chat requests. `create_protocol_class` sets `fast_path`."""

    fast_path: ClassVar[FastPath]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._parsing = False
        self._serving = False
        self._request: ActiveRequest | None = None
        self._stream: ChunkedStream | None = None
        self._closing = False
        self._idle_since = 0.0

    # -- bytes in -------------------------------------------------------------------------------

    def _is_answering(self) -> bool:
        """Return whether a request is complete and its answer is not, here or in the app."""
        return self._request is not None or super()._is_answering()

    def _feed_parser(self, data: bytes) -> None:
        """Answer on the fast path if possible, else pass the bytes to uvicorn."""
        if self._parsing or self._serving or not data.startswith(REQUEST_START) or not self._try_fast_path(data):
            super()._feed_parser(data)

    def _try_fast_path(self, data: bytes) -> bool:
        begin = data.find(b"\r\n\r\n", _HEAD_START_BYTES, MAX_HEAD_BYTES)
        if begin < 0:
            return False
        head = self.fast_path.parse_head(data[:begin])
        if head.length is None or head.length > self.fast_path.max_body_bytes:
            return False
        end = begin + 4 + head.length
        job = None if len(data) < end else self.fast_path.parse_request(head, data[begin + 4 : end])
        if job is None:
            return False
        self._pipelined = data[end:]
        self._start_request(job)
        return True

    def on_message_begin(self) -> None:
        """Record that uvicorn's parser has begun to parse a request."""
        self._parsing = self._serving = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """Record that uvicorn's parser is idle. The answer may still be incomplete."""
        self._parsing = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Permit the fast path after uvicorn's answer, unless further requests wait for their answers."""
        self._serving = bool(self.pipeline)
        super().on_response_complete()

    def _has_valid_key(self) -> bool:
        """Return whether the head has a valid key."""
        presented = extract_key(self.headers)
        return presented is not None and self.fast_path.is_known_key(presented)

    # -- one request ------------------------------------------------------------------------------

    def _start_request(self, spec: RequestSpec) -> None:
        self._deadline.cancel()
        if self.slot is not None:
            self.slot.mark_busy()
            if not self.slot.has_valid_key:
                self.slot.record_valid_key()
        self.server_state.total_requests += 1
        request = self._request = self.fast_path.dispatcher.submit(spec)
        answer = request.answer
        answer.attach(self._on_request_event)
        if answer.outcome is not None or (isinstance(answer, StreamedAnswer) and answer.ready):
            self._on_request_event()

    def _on_request_event(self) -> None:
        """Handle an event of the request: its first delta, a keep-alive, or its outcome."""
        request = self._request
        assert request is not None  # noqa: S101  detached at its end
        answer = request.answer
        outcome = answer.outcome
        if isinstance(answer, StreamedAnswer) and (outcome is None or isinstance(outcome, Finished)):
            self._open_stream(request, answer)
        elif outcome is not None:
            self._send_answer(request, outcome)

    def _send_answer(self, request: ActiveRequest, outcome: Outcome) -> None:
        """Send a complete answer or error in one write."""
        answer = request.answer
        if isinstance(outcome, Finished) and isinstance(answer, CollectedAnswer):
            complete = answer.build_answer(request.version.fingerprint)
            body = chat_response.encode_completion(request.spec, complete, outcome)
            self.transport.write(_COMPLETE_RESPONSE % (len(body), _build_headers(request), body))
            self._close_request(200)
            return
        problem = build_problem(outcome)
        if problem is None:
            self._close_request(499)
            return
        body = problem.encode_body(request.spec.request_id)
        own = b"".join(b"%s: %s\r\n" % header for header in problem.build_headers())
        status = b"%d %s" % (problem.status, HTTPStatus(problem.status).phrase.encode())
        headers = own + _build_headers(request)
        self.transport.write(_ERROR_RESPONSE % (status, len(body), headers, body))
        self._close_request(problem.status)

    def _open_stream(self, request: ActiveRequest, answer: StreamedAnswer) -> None:
        """Send the head with the first events, and start the pump for the rest."""
        chunks = chat_response.ChatChunks(request.spec, fingerprint=request.fingerprint)
        stream = self._stream = ChunkedStream(self.transport, _STREAM % _build_headers(request), self._end_stream)
        if self.flow.write_paused:
            stream.pause()
        answer.mark_opened()
        StreamPump(answer, chunks, stream)

    def _end_stream(self, complete: bool) -> None:
        """Record the end of the stream. An incomplete stream aborts the connection."""
        if not complete:
            self.transport.abort()
        self._close_request(200)

    def _close_request(self, status: int) -> None:
        request, self._request, self._stream = self._request, None, None
        if request is None:
            return
        request.answer.detach()
        self.fast_path.dispatcher.close(request)
        self.fast_path.dispatcher.counters.count_answer(status)
        if self.transport.is_closing():
            return
        if self._closing:
            self.transport.close()
            return
        if self.slot is not None:
            self.slot.mark_idle()
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._start_keep_alive_timer(self.timeout_keep_alive)
        if self._pipelined:
            self.loop.call_soon(self._parse_held_bytes)

    def _start_keep_alive_timer(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection after its idle timeout, or set the timer again. A timer per request would cost more."""
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        self.timeout_keep_alive_task = None
        if self._request is None and left <= 0:
            super().timeout_keep_alive_handler()
        elif self._request is None:
            self._start_keep_alive_timer(left)

    # -- the connection -----------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the request of a client that has disconnected."""
        if self._request is not None:
            self._close_request(499 if self._stream is None else 200)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Stop sending to a slow client. The request buffers its deltas; too many of them end the stream."""
        super().pause_writing()
        if self._stream is not None:
            self._stream.pause()

    def resume_writing(self) -> None:
        """Resume sending, because the client has received enough that the transport's buffer has room again."""
        super().resume_writing()
        if self._stream is not None:
            self._stream.resume()

    def shutdown(self) -> None:
        """Close the connection, after the answer to a running request. Uvicorn calls this when the server stops."""
        if self._request is not None:
            self._closing = True
        else:
            super().shutdown()


class ChunkedStream:
    """Sink that immediately writes the events of one streamed answer as HTTP chunks.

    The interface is that of `router.http.sse.EventSink`. `head` is the response head, sent with the first events.
    `ended` is called at the end, with True if the stream is complete.
    """

    __slots__ = ("_ended", "_head", "_ready", "_write", "busy")

    def __init__(self, transport: Any, head: bytes, ended: Callable[[bool], None]) -> None:
        self._write: Callable[[bytes], None] = transport.write
        self._head = head
        self._ended = ended
        self.busy = False
        """Whether the transport's buffer is full. The stream then waits."""
        self._ready: Callable[[], None] = _do_nothing

    def call_when_ready(self, then: Callable[[], None]) -> None:
        """Set the function to call each time that the transport accepts writes again."""
        self._ready = then

    def pause(self) -> None:
        """Mark the transport as not writable."""
        self.busy = True

    def resume(self) -> None:
        """Mark the transport as writable, and call the function of `call_when_ready`."""
        self.busy = False
        self._ready()

    def push(self, events: bytes, *, last: bool = False) -> bool:
        """Send complete events; `last` ends the response. Return whether the buffer has room; True with `last`."""
        chunk = b"%s%x\r\n%s\r\n" % (self._head, len(events), events) if events else self._head
        self._head = b""
        if last:
            self._ready = _do_nothing
            self._write(chunk + b"0\r\n\r\n")
            self._ended(True)
            return True
        self._write(chunk)
        return not self.busy

    def abandon(self) -> None:
        """End the stream as incomplete: call `ended` with False, which aborts the connection."""
        self._ready = _do_nothing
        self._ended(False)


def _build_headers(request: ActiveRequest) -> bytes:
    name, request_id = request.life.node_name, request.spec.request_id.encode()
    node = b"x-macpool-node: %s\r\n" % name.encode("ascii", "replace") if name else b""
    about = b"x-request-id: %s\r\n%sx-macpool-attempts: %d\r\n" % (request_id, node, request.life.attempts)
    optional = build_optional_headers(request)
    return about + b"".join([b"%s: %s\r\n" % header for header in optional]) if optional else about


def _do_nothing() -> None:
    return


def create_protocol_class(fast_path: FastPath) -> type[FastPathProtocol]:
    """Return a subclass of `FastPathProtocol` whose connections use `fast_path`."""
    return type("FrontProtocol", (FastPathProtocol,), {"fast_path": fast_path})

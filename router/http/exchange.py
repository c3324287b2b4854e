"""HTTP exchange: one request and its single answer over plain ASGI."""

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, cast

from router.dialects.shared.interface import OPENAI, DialectStyle
from router.errors import Header, Problem, build_body_too_long
from router.http.coroutine_driver import CoroutineDriver, Step
from router.http.sse import Message, Send
from router.settings import RouterSettings
from wire.identity import is_valid_request_id

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
ReserveBody = Callable[[int], Awaitable[Problem | None]]
"""Function that waits until a body of a number of bytes may be received. It returns a problem to refuse the body."""

_JSON = (b"content-type", b"application/json")
_PROCESS = secrets.token_hex(6)
_numbers = itertools.count(1)
"""Counter for new request ids, which are unique but not secret."""
MAX_INLINE_BYTES = 64 * 1024
"""Maximum bytes of a body that is parsed on the event loop."""
CLIENT_CLOSED = 499
"""Status, for counters only, of an exchange whose client disconnected before an answer."""


class Exchange:
    """One HTTP request and its answer.

    `style` selects the dialect of errors. The attribute `status` is the status of the answer, and `CLIENT_CLOSED`
    before an answer begins. `request_id` is the client's `x-request-id` if that is valid, else a new id.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, style: DialectStyle = OPENAI) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.headers: list[Header] = scope["headers"]
        self.receive = receive
        self.send = send
        self.style = style
        self.request_id = choose_request_id(self.headers)
        self.status = CLIENT_CLOSED

    def use_style(self, style: DialectStyle) -> None:
        """Set the dialect of errors and headers, for a route whose dialect depends on a request header."""
        self.style = style

    def get_header(self, name: bytes) -> bytes | None:
        """Return the value of a request header by its lower-case name; None if the header is absent."""
        return next((value for known, value in self.headers if known == name), None)

    def build_id_headers(self) -> list[Header]:
        """Return the headers with the id of the request, which have the names that the dialect uses."""
        return [(name, self.request_id.encode()) for name in self.style.names]

    def begin(self, status: int = 200) -> None:
        """Record that the caller now sends an answer with this status itself."""
        self.status = status

    async def answer(self, body: bytes, status: int = 200, headers: list[Header] | None = None) -> None:
        """Send a complete JSON answer. A HEAD request gets no body.

        `headers` are added to the content type, the content length and the id of the request.
        """
        self.status = status
        head: list[Header] = [_JSON, (b"content-length", str(len(body)).encode()), *self.build_id_headers()]
        await self.send({"type": "http.response.start", "status": status, "headers": head + (headers or [])})
        await self.send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def refuse(self, problem: Problem, headers: list[Header] | None = None) -> None:
        """Send a problem as the answer, in the dialect. `headers` are added to the headers of the problem."""
        body = self.style.error(problem, self.request_id)
        await self.answer(body, problem.status, problem.build_headers() + (headers or []))

    async def respond(self, result: bytes | Problem) -> None:
        """Send `result`: a JSON body with status 200, or a problem with its status."""
        await (self.refuse(result) if isinstance(result, Problem) else self.answer(result))

    async def receive_body(
        self, settings: RouterSettings, reserve: ReserveBody | None = None
    ) -> bytes | Problem | None:
        """Receive and return the body, within the limits of size and time in `settings`.

        Return a problem if the body is too long (413) or too slow (408), and None if the client disconnects before its
        end. An invalid `content-length` counts as too long.

        When more than `MAX_INLINE_BYTES` have arrived before the end of the body, `reserve` is awaited once with the
        maximum size of the body in bytes. A problem that `reserve` returns ends the reception and is returned. The
        timeout of the body is suspended during `reserve` and then starts again in full.
        """
        limit = settings.max_body_bytes
        length = self.get_header(b"content-length")
        if length is not None and not (length.isdigit() and len(length) <= 18 and int(length) <= limit):
            return build_body_too_long(limit)
        size = limit if length is None else int(length)
        body = bytearray()
        try:
            async with asyncio.timeout(settings.body_timeout_seconds) as clock:
                ended = await _receive_until(self.receive, body, limit, MAX_INLINE_BYTES)
                if ended is False:
                    if reserve is not None:
                        clock.reschedule(None)  # the time for a body to arrive does not count its wait for room
                        refused = await reserve(size)
                        if refused is not None:
                            return refused
                        clock.reschedule(asyncio.get_running_loop().time() + settings.body_timeout_seconds)
                    ended = await _receive_until(self.receive, body, limit, limit)
                return bytes(body) if ended is True else ended or None
        except TimeoutError:
            seconds = settings.body_timeout_seconds
            return Problem(408, "request_timeout", f"the body did not arrive within {seconds:.0f} s")


def choose_request_id(headers: Iterable[Header]) -> str:
    """Return the client's `x-request-id` if that is valid, else a new id. Header names are in lower case."""
    for name, value in headers:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if is_valid_request_id(text):
                return text
    return f"{_PROCESS}{next(_numbers):012x}"


async def _receive_until(receive: Receive, body: bytearray, limit: int, pause: int) -> bool | Problem | None:
    """Append received parts to `body`, until its end or a limit.

    Return True at the end, False beyond `pause` bytes, a problem beyond `limit` bytes, and None if the client
    disconnects.
    """
    while True:
        part = await receive()
        if part["type"] != "http.request":
            return None
        body += part.get("body", b"")
        if len(body) > limit:
            return build_body_too_long(limit)
        if not part.get("more_body", False):
            return True
        if len(body) > pause:
            return False


class DisconnectWatch:
    """Watcher that calls `on_disconnect` when the client disconnects or the reception fails.

    The constructor begins the watch, and calls `on_disconnect` if the client has already disconnected. The caller must
    `close` the watch.
    """

    __slots__ = ("_on_disconnect", "_receive", "_stepper", "disconnected")

    def __init__(self, receive: Receive, on_disconnect: Callable[[], None]) -> None:
        self.disconnected = False
        """Whether the client has disconnected or the reception has failed."""
        self._receive = cast("Callable[[], Step]", receive)
        self._on_disconnect = on_disconnect
        self._stepper = CoroutineDriver(self._handle_message)
        self._stepper.run(self._receive())

    def close(self) -> None:
        """End the watch. After this call, `on_disconnect` is not called."""
        self._on_disconnect = _do_nothing
        self._stepper.close()

    def _handle_message(self, message: Message | None) -> None:
        if message is None or message["type"] == "http.disconnect":
            self.disconnected = True
            self._on_disconnect()
        else:
            self._stepper.run(self._receive())


def _do_nothing() -> None:
    return

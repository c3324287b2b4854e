"""Request bodies of the control plane: read after the key check, within the route's limit, and parsed strictly.

A body with an unknown field is refused. The inference routes refuse one only with `router.unknown_fields = "refuse"`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.routing import compile_path, get_name
from starlette.types import Receive, Scope, Send

from coordinator.api.deferred_commands import PREFERS_ASYNC, has_async_preference
from coordinator.api.errors import ProblemError
from coordinator.api.route import MAX_BODY_BYTES
from router.dialects.shared.strict_json import read_object
from router.errors import Problem

BODY_TIMEOUT_SECONDS = 10.0
"""Maximum seconds for reading the body of a control request. A request whose body takes longer is refused with 408."""
_DIGITS = 18
"""Maximum digits of a Content-Length."""
PLAIN_TEXT_PATTERN = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""Pattern of a text without control characters, because a terminal would interpret them."""


class Body(BaseModel):
    """Base of all request bodies of the control plane.

    A body with an unknown field, or with a value of another type, such as `"3"` for a number, is refused with 400.
    """

    model_config = ConfigDict(extra="forbid", strict=True)


class StrictRequest(Request):
    """Request whose `body` has been read completely, and whose JSON is parsed strictly."""

    def __init__(self, scope: Scope, receive: Receive, body: bytes) -> None:
        super().__init__(scope, receive)
        self._body = body

    async def json(self) -> Any:
        """Return the body as a JSON object.

        Raise `HTTPException` (400) if the body is not valid JSON or not an object.
        """
        body = read_object(self._body)
        if isinstance(body, Problem):
            raise HTTPException(body.status, body.message)
        return body


class StrictRoute(APIRoute):
    """Route that authenticates first, and then reads its body up to `max_body_bytes` bytes, if its handler takes one.

    FastAPI reads bodies before it resolves dependencies. The key check is therefore not a dependency, because the body
    of a request without a valid key must not be read.

    The FastAPI part of a route is built at its first request, or for the OpenAPI document. This saves a tenth of the
    CPU time of the coordinator's start.
    """

    check: Callable[[Request], Awaitable[None]] | None = None
    """Function that raises `ProblemError` for a request without a sufficient key; None for a public route."""
    max_body_bytes = MAX_BODY_BYTES
    """Maximum bytes of the body of a request."""
    ends_with_client = False
    """Whether the handler is cancelled when the client disconnects (`Route.ends_with_client`)."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self._options: dict[str, Any] | None = options
        self.path, self.endpoint, self.name = path, endpoint, get_name(endpoint)
        self.methods: set[str] = set(options["methods"])
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self.app = self._build_and_serve

    def build(self) -> None:
        """Build the FastAPI part of this route, unless it is built already."""
        options, self._options = self._options, None
        if options is not None:
            super().__init__(self.path, self.endpoint, **options)

    async def _build_and_serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.build()
        await self.app(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, preceded by the key check and the read of the body.

        The handler raises `ProblemError` for a request without a sufficient key (401 or 403). It also raises
        `ProblemError` for a body that is too long (413), late (408) or incomplete (400). An invalid `Content-Length`
        counts as too long. Invalid JSON raises `HTTPException` (400). With `ends_with_client`, it raises `ProblemError`
        (499) if the client disconnects.
        """
        plain = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if self.check is not None:
                await self.check(request)
            body = b"" if self.body_field is None else await _read_body(request, self.max_body_bytes)
            PREFERS_ASYNC.set(has_async_preference(request))
            answering = plain(StrictRequest(request.scope, request.receive, body))
            return await (_run_while_connected(request, answering) if self.ends_with_client else answering)

        return handle


async def _run_while_connected(request: Request, answering: Coroutine[Any, Any, Response]) -> Response:
    """Run the handler of a request whose body has been read, and return its response.

    If the client disconnects, cancel the handler and raise `ProblemError` (499).
    """
    answer, left = asyncio.ensure_future(answering), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise ProblemError(Problem(499, "client_left", "the client left before the end of its command"))
    finally:
        answer.cancel()
        left.cancel()


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Read a body of at most `max_bytes` bytes. Raise `ProblemError` if the body is longer, late or incomplete."""
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or len(announced) > _DIGITS or int(announced) > max_bytes:
        raise _build_too_long(max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            return await _collect_body(request.receive, max_bytes)
    except TimeoutError:
        late = Problem(408, "request_timeout", f"the body did not arrive within {BODY_TIMEOUT_SECONDS:.0f} s")
        raise ProblemError(late) from None


async def _collect_body(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        part = await receive()
        if part["type"] != "http.request":
            raise ProblemError(Problem(400, "client_left", "the client left before the end of its body"))
        body += part.get("body", b"")
        if len(body) > max_bytes:
            raise _build_too_long(max_bytes)
        if not part.get("more_body", False):
            return bytes(body)


def _build_too_long(max_bytes: int) -> ProblemError:
    return ProblemError(Problem(413, "request_too_large", f"a request here may have {max_bytes} bytes"))

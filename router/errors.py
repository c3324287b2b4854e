"""Convert refusals and failures to HTTP errors in OpenAI's format: status, headers, and a body or a stream event.

`wire/refusals.py` defines the status of each refusal, this module the status of each failure. The memory numbers of a
refusal are in the object `error.memory`, with the field names of `MemoryNumbers`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from itertools import takewhile
from types import MappingProxyType

import msgspec

from wire.refusals import FailureCode, MemoryNumbers, RefusalCode, Refused

Header = tuple[bytes, bytes]

_TYPES: dict[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_FAILED: dict[str, int] = {
    FailureCode.NODE_LOST: 502,
    FailureCode.ENGINE_CRASHED: 500,
    FailureCode.SHUTTING_DOWN: 503,
    FailureCode.SLOW_CLIENT: 408,
    FailureCode.COMMAND_TIMEOUT: 504,
    FailureCode.LINK_LOST: 502,
    FailureCode.UPSTREAM_FAILED: 502,
    FailureCode.NODE_STOPPING: 503,
    FailureCode.MEMORY_PRESSURE: 503,
    FailureCode.NO_HEADROOM: 503,
    FailureCode.GRAMMAR_FAILED: 400,
}
"""HTTP status by failure code; 500 for any other code. It applies only before the first byte of the answer."""

_ONCE = frozenset({HTTPStatus.CONFLICT, HTTPStatus.INTERNAL_SERVER_ERROR})
"""Statuses that client libraries retry by default, although a retry is harmful or useless.

A request that was running during a crash must not be sent again, and a model with broken files stays broken. The
header `x-should-retry: false` tells these libraries not to retry.
"""


_PREFIXES = frozenset({"v1", "api", "openai", "v1beta"})
"""Path prefixes that a client may send because its base URL is wrong, alone or repeated."""


_ROUTES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "chat/completions",
                "completions",
                "embeddings",
                "models",
                "responses",
                "videos",
                "messages",
                "messages/count_tokens",
                "rerank",
            ),
            "/v1/",
        ),
        **dict.fromkeys(("chat", "embed", "generate", "tags", "show", "ps", "version"), "/api/"),
    }
)
"""Path prefix by route name."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Error response to a request: a complete response, or the last event of a stream.

    The methods encode the error in OpenAI's format; other dialects have their own encoders (`DialectStyle.error`).
    """

    status: int
    code: str
    """Code of a refusal or a failure, or another machine-readable reason."""
    message: str
    param: str | None = None
    """Request parameter that caused the error; None if no single parameter did."""
    memory: MemoryNumbers | None = None
    """Numbers of a memory refusal in bytes; None for any other problem."""
    retry_after: float | None = None
    """Retry-After in seconds; None omits the header."""
    allow: str = ""
    """Allowed methods, for a 405; empty for any other status."""

    @property
    def type(self) -> str:
        """OpenAI's error type for the status, such as `rate_limit_error` or `server_error`."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def encode_body(self, request_id: str) -> bytes:
        """Return the error as a JSON body, with the id of the request as `error.request_id`."""
        return msgspec.json.encode({"error": self._build_error(request_id)})

    def encode_event(self, request_id: str) -> bytes:
        """Return the error as the SSE event that ends a running stream. No `[DONE]` follows."""
        return b"data: " + self.encode_body(request_id) + b"\n\n"

    def build_headers(self) -> list[Header]:
        """Return the headers that this error needs: Retry-After, Allow, x-should-retry or WWW-Authenticate, or none."""
        headers: list[Header] = []
        if self.retry_after is not None:
            headers.append((b"retry-after", str(round_retry_seconds(self.retry_after)).encode()))
        if self.allow:
            headers.append((b"allow", self.allow.encode()))
        if self.status in _ONCE:
            headers.append((b"x-should-retry", b"false"))
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers

    def _build_error(self, request_id: str) -> dict[str, object]:
        error: dict[str, object] = {
            "message": self.message,
            "type": self.type,
            "code": self.code,
            "param": self.param,
            "request_id": request_id,
        }
        if self.memory is not None:
            error["memory"] = msgspec.structs.asdict(self.memory)
        return error


def round_retry_seconds(seconds: float) -> int:
    """Round up to whole seconds, limited to the range that clients honour: 1 to 60. Infinity and NaN become 60."""
    return max(1, min(60, math.ceil(seconds))) if math.isfinite(seconds) else 60


def from_refused(refused: Refused, param: str | None = None) -> Problem:
    """Build the problem for a refusal.

    `param` is the request parameter at fault. With None, a 404 names `model` and any other status names no parameter.
    The `retry_after` of a final refusal is ignored. A 429 or 503 without a Retry-After gets 1 s.
    """
    status = refused.status
    wait = None if refused.final else refused.retry_after
    if wait is None and status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        wait = 1.0
    if param is None and status == HTTPStatus.NOT_FOUND:
        param = "model"
    return Problem(status, refused.code.value, refused.message, param, refused.numbers, wait)


def from_failure(code: str, message: str) -> Problem:
    """Build the problem for a request or a command that failed after it had started.

    `code` determines the status; an unknown code becomes a 500. A 503 has a Retry-After of 1 s, any other status none.
    """
    status = _FAILED.get(code, 500)
    return Problem(status, code, message, retry_after=1.0 if status == HTTPStatus.SERVICE_UNAVAILABLE else None)


def build_invalid(message: str, param: str | None = None, code: str = RefusalCode.INVALID) -> Problem:
    """Build the 400 problem for an invalid request. `param` is the parameter at fault; None if there is none."""
    return Problem(400, code, message, param)


NO_KEY = Problem(
    401,
    "invalid_api_key",
    "an API key is required: send Authorization: Bearer KEY or x-api-key: KEY; `cluster key create NAME` creates one",
)
FORWARDED_WITHOUT_KEY = Problem(
    401,
    "invalid_api_key",
    "a proxy forwarded this request, and http.anonymous accepts only requests from this machine without an API key: "
    "send Authorization: Bearer KEY; `cluster key create NAME` creates one",
)
WRONG_KEY = Problem(
    401, "invalid_api_key", "this API key is unknown, expired or revoked: create another with `cluster key create NAME`"
)


def build_missing_scope(scope: str) -> Problem:
    """Build the 403 problem for an API key that lacks `scope`."""
    return Problem(
        403,
        "insufficient_scope",
        f"this API key has no scope {scope!r}: create one with `cluster key create NAME --scope {scope}`",
    )


def build_not_found(path: str, server: str = "http(s)://HOST:8080") -> Problem:
    """Build the 404 problem for an unknown path. If the path suggests a wrong base URL, the message has the right one.

    `server` is the scheme and host of the request.
    """
    parts = [part for part in path.split("/") if part]
    before = list(takewhile(_PREFIXES.__contains__, parts))
    meant = "/".join(parts[len(before) :])
    route = _ROUTES.get(meant) or _ROUTES.get(meant.partition("/")[0])
    text = f"unknown path {path[:200]}"
    if route is None or path == route + meant:
        return Problem(404, "not_found", text)
    if path == f"{route}{meant}/":
        return Problem(404, "not_found", f"{text}: leave out the slash at its end")
    # a client that sends /v1/v1/... appends /v1 to its base URL; a client that sends no /v1 does not
    base = server if route == "/api/" or before.count("v1") > 1 else f"{server}/v1"
    return Problem(404, "not_found", f"{text}, the API is at {route}{meant[:80]}: set the client's base URL to {base}")


def build_wrong_method(method: str, allow: str) -> Problem:
    """Build the 405 problem. `allow` lists the allowed methods, as in the header Allow."""
    return Problem(405, "method_not_allowed", f"{method} is not allowed on this path: use {allow}", allow=allow)


def build_body_too_long(limit: int) -> Problem:
    """Build the 413 problem for a body that is longer than `limit` bytes."""
    return Problem(
        413, "request_too_large", f"the body is larger than {limit} bytes: shorten it, or raise router.max_body_bytes"
    )

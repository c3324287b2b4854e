"""Cross-origin resource sharing (CORS): pages of listed origins may use the models.

Only the origins of `http.allowed_origins` are allowed, and only on the inference routes. They cannot use the control
API and the page. There are no cookies: a web page needs an API key, like any other client.
"""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from router.errors import Header

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
PREFIXES = ("/v1/", "/v2/", "/api/")
"""Prefixes of the paths of the inference routes, including those of Ollama's API."""
CONTROL_PREFIX = "/api/v1/"
"""Prefix of the paths of the control API."""
PREFLIGHT_SECONDS = 7200
"""Seconds for which a browser may reuse the answer to a preflight request; Chrome's maximum."""
_NETWORK = b"access-control-request-private-network"


class CrossOriginAccess:
    """Origins whose pages may use the models. `origins` is a comma-separated list, such as `app://obsidian.md`."""

    def __init__(self, origins: str = "") -> None:
        self._origins = frozenset(origin.strip().lower().encode() for origin in origins.split(",") if origin.strip())

    def find_origin(self, path: str, headers: Iterable[Header]) -> bytes:
        """Return the origin of a request if pages of that origin may send it; empty otherwise.

        Header names are in lower case.
        """
        if not self._origins or not path.startswith(PREFIXES) or path.startswith(CONTROL_PREFIX):
            return b""
        origin = next((value for name, value in headers if name == b"origin"), b"")
        return origin if origin.lower() in self._origins else b""


def is_preflight(method: str, headers: Iterable[Header]) -> bool:
    """Return whether a request is a CORS preflight request, which asks whether a page may send another request.

    Browsers send preflight requests without an API key. Header names are in lower case.
    """
    return method == "OPTIONS" and any(name == b"access-control-request-method" for name, _ in headers)


async def answer_preflight(origin: bytes, headers: Iterable[Header], send: Send) -> None:
    """Answer a preflight request with 204.

    `origin` is a non-empty result of `find_origin`. `headers` are those of the preflight request. The answer permits
    GET, HEAD, POST and DELETE with the headers that the preflight request names, for `PREFLIGHT_SECONDS`. It permits
    private network access if the browser asks for it, so that a page of the internet can reach this server.
    """
    asked = dict(headers)
    allowed: list[Header] = [
        *_build_origin_headers(origin),
        (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"),
        (b"access-control-allow-headers", asked.get(b"access-control-request-headers", b"*")),
        (b"access-control-max-age", str(PREFLIGHT_SECONDS).encode()),
    ]
    if asked.get(_NETWORK) == b"true":  # a page of the internet wants to reach the local network
        allowed.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})


async def send_to_origin(origin: bytes, send: Send, message: Message) -> None:
    """Send an ASGI message of a response. Add the headers that let pages of `origin` read the response."""
    if message["type"] == "http.response.start":
        exposed: Header = (b"access-control-expose-headers", b"*")
        headers = [*message.get("headers", ()), *_build_origin_headers(origin), exposed]
        message = {**message, "headers": headers}
    await send(message)


def _build_origin_headers(origin: bytes) -> list[Header]:
    return [(b"access-control-allow-origin", origin), (b"vary", b"origin")]

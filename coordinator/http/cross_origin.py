"""Cross-origin resource sharing (CORS): pages of listed origins may use the models.

Only the origins of `http.allowed_origins` are allowed, and only on the routes of inference. The control API and the
page stay closed for them. There are no cookies: a page needs an API key, as every other client.
"""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from router.errors import Header

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
PREFIXES = ("/v1/", "/v2/", "/api/")
"""Beginnings of the paths of inference, and of Ollama's routes."""
CONTROL_PREFIX = "/api/v1/"
"""Beginning of the paths of the control API."""
PREFLIGHT_SECONDS = 7200
"""Seconds for which a browser may reuse the answer to a preflight request: the maximum of Chrome."""
_NETWORK = b"access-control-request-private-network"


class CrossOriginAccess:
    """Origins whose pages may use the models. `origins` are separated by commas, such as `app://obsidian.md`."""

    def __init__(self, origins: str = "") -> None:
        self._origins = frozenset(origin.strip().lower().encode() for origin in origins.split(",") if origin.strip())

    def find_origin(self, path: str, headers: Iterable[Header]) -> bytes:
        """Return the origin of a request if a page of that origin may send it; empty otherwise.

        Header names are in lower case.
        """
        if not self._origins or not path.startswith(PREFIXES) or path.startswith(CONTROL_PREFIX):
            return b""
        origin = next((value for name, value in headers if name == b"origin"), b"")
        return origin if origin.lower() in self._origins else b""


def is_preflight(method: str, headers: Iterable[Header]) -> bool:
    """Return whether a request is a preflight request: it asks whether a page may send another request (CORS).

    Browsers send preflight requests without an API key.
    """
    return method == "OPTIONS" and any(name == b"access-control-request-method" for name, _ in headers)


async def answer_preflight(origin: bytes, headers: Iterable[Header], send: Send) -> None:
    """Answer a preflight request with 204.

    The answer permits GET, HEAD, POST and DELETE with the headers that the preflight request names, for
    `PREFLIGHT_SECONDS`. If the browser asks for private network access, a page outside the local network may also send
    requests to this server. `origin` is a result of `find_origin`, and not empty. `headers` are those of the preflight
    request.
    """
    asked = dict(headers)
    allowed: list[Header] = [
        *_build_origin_headers(origin),
        (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"),
        (b"access-control-allow-headers", asked.get(b"access-control-request-headers", b"*")),
        (b"access-control-max-age", str(PREFLIGHT_SECONDS).encode()),
    ]
    if asked.get(_NETWORK) == b"true":  # a page of the internet asks for a server of the local network
        allowed.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})


async def send_to_origin(origin: bytes, send: Send, message: Message) -> None:
    """Send an ASGI message of an answer, with the headers that let pages of `origin` read it."""
    if message["type"] == "http.response.start":
        exposed: Header = (b"access-control-expose-headers", b"*")
        headers = [*message.get("headers", ()), *_build_origin_headers(origin), exposed]
        message = {**message, "headers": headers}
    await send(message)


def _build_origin_headers(origin: bytes) -> list[Header]:
    return [(b"access-control-allow-origin", origin), (b"vary", b"origin")]

"""Outermost layer of the HTTP port, which refuses unknown hosts and cross-site requests of browsers.

A page in a user's browser can send requests here (DNS rebinding, cross-site posts). A host that is an IP address is
accepted, because it cannot be rebound. A host name must be known. A request that can change state must not come from a
page of another site, except on the routes that `cross_origin` opens to listed origins.
"""

import ipaddress
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import partial
from typing import Any

from coordinator.http.cross_origin import CrossOriginAccess, answer_preflight, is_preflight, send_to_origin
from router.errors import Problem
from router.http.exchange import choose_request_id

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

_MARKS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_MARKED = frozenset(name for name, _ in _MARKS)
CROSS_SITE = (
    "requests from pages of other sites are refused: to let a page use models, add it to http.allowed_origins; a "
    "reverse proxy must pass the Host header unchanged"
)
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change no state."""


async def send_problem(scope: Scope, send: Send, problem: Problem) -> None:
    """Send a problem as the complete response to the request of `scope`, with its id in the body and the headers."""
    request_id = choose_request_id(scope["headers"])
    body = problem.encode_body(request_id)
    headers = [
        (b"x-request-id", request_id.encode()),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *problem.build_headers(),
    ]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class PrivateResponses:
    """ASGI middleware that sets headers against caching and content sniffing in every response of `app`.

    Headers of these names that the app sets are replaced.
    """

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app and add the headers to its response."""

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in _MARKED]
                message = {**message, "headers": [*own, *_MARKS]}
            await send(message)

        await self._app(scope, receive, send_marked)


class OriginCheck:
    """ASGI middleware that checks host and origin of requests.

    `hosts` are additional host names, comma-separated. Pages of `origins`, comma-separated, may use the inference
    routes. If `local` is false, names under `.local` are accepted only if they are in `hosts`. Any machine on the
    network can claim a `.local` name. Without API keys (`http.anonymous`), a page under such a name could use the
    models.
    """

    def __init__(self, app: Asgi, hosts: str = "", *, local: bool = True, origins: str = "") -> None:
        self._app = app
        self._access = CrossOriginAccess(origins)
        self._local = local
        self._hosts = {"localhost", *(host.strip().lower() for host in hosts.split(",") if host.strip())}
        self._known: dict[bytes, bool] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and call the app. Answer a refused request with 421 or 403.

        A preflight request of an allowed origin is answered with 204. A message that is not an HTTP request goes to the
        app unchecked.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, headers = scope["method"], scope["headers"]
        origin = self._access.find_origin(scope["path"], headers)
        problem = self.find_problem(method, headers, is_allowed_origin=origin != b"")
        if problem is not None:
            await send_problem(scope, send, problem)
        elif not origin:
            await self._app(scope, receive, send)
        elif is_preflight(method, headers):
            await answer_preflight(origin, headers, send)
        else:
            await self._app(scope, receive, partial(send_to_origin, origin, send))

    def find_problem(
        self, method: str, headers: Iterable[tuple[bytes, bytes]], *, is_allowed_origin: bool = False
    ) -> Problem | None:
        """Return the problem of a request's host and origin; None if the request is accepted.

        An unknown, missing or repeated host is a problem (421). A request that can change state from a page of another
        origin is a problem as well (403). Header names are in lower case. `is_allowed_origin` is whether pages of the
        request's origin may send this request.
        """
        hosts: list[bytes] = []
        origin = site = b""
        for name, value in headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value
        if len(hosts) != 1 or not self._is_known_host(hosts[0]):
            return Problem(
                421,
                "unknown_host",
                "this host name is not one of ours: use an IP address, localhost, a "
                ".local name, or add it to http.allowed_hosts",
            )
        if method in SAFE_METHODS or is_allowed_origin:
            return None
        foreign = site not in (b"", b"same-origin", b"none") or (
            origin != b"" and origin.partition(b"://")[2] != hosts[0]
        )
        return Problem(403, "cross_site", CROSS_SITE) if foreign else None

    def _is_known_host(self, host: bytes) -> bool:
        known = self._known.get(host)
        if known is None:
            known = self._is_own_host(host)
            if len(self._known) < 256:
                self._known[host] = known
        return known

    def _is_own_host(self, host: bytes) -> bool:
        text = host.decode("latin-1").lower()
        name, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
        if not colon:
            name = text
        elif not port.isdecimal():
            return False
        if name in self._hosts or (self._local and name.endswith(".local") and name.count(".") == 1):
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

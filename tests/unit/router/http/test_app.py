"""The router without a control app: connections that are no HTTP requests, and the keys of requests."""

import asyncio

from router.admission.api_keys import ApiKey, KeyRing, create_anonymous_key, new_key
from router.errors import NO_KEY, WRONG_KEY, Problem, build_missing_scope, build_wrong_method
from router.http.app import authorize
from router.http.exchange import Exchange
from router.http.sse import Message
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode

PEPPER = b"0123456789abcdef"


async def test_websocket_is_closed_before_it_is_accepted():
    events = asyncio.Queue[Message]()
    events.put_nowait({"type": "websocket.connect"})
    sent: list[Message] = []

    async def send(event: Message) -> None:
        sent.append(event)

    cluster = LoopbackCluster(LoopbackNode("studio"))
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await cluster.app(scope, events.get, send)
    assert sent == [{"type": "websocket.close"}]
    assert events.empty(), "the connect event was received first"


async def receive() -> Message:
    return {"type": "http.request", "body": b""}


async def send(event: Message) -> None:
    raise AssertionError(f"{event} was sent")


def a_ring(*, anonymous: bool = False) -> tuple[KeyRing, ApiKey, str]:
    """Return a ring with one key for inference, the key, and its text."""
    ring = KeyRing(PEPPER, anonymous=create_anonymous_key(0.0) if anonymous else None)
    key, text = new_key(PEPPER, "laptop", ["infer"], created=1.0)
    ring.put(key)
    return ring, key, text


def check(ring: KeyRing, text: str | None, method: str = "POST", scope: str = "infer") -> ApiKey | Problem:
    """Authorize a request with a key to a route with the methods GET and POST."""
    headers = [] if text is None else [(b"x-api-key", text.encode())]
    exchange = Exchange({"method": method, "path": "/v1/models", "headers": headers}, receive, send)
    return authorize(ring, exchange, ("GET", "POST"), scope)


def test_a_request_is_authorized_by_its_method_and_its_key():
    ring, key, text = a_ring()
    assert check(ring, text) == check(ring, text, "GET") == key
    assert check(ring, text, "DELETE") == build_wrong_method("DELETE", "GET, POST")
    assert check(ring, text, scope="metrics") == build_missing_scope("metrics")
    assert check(ring, None) == NO_KEY
    assert ring.refused == 0
    assert check(ring, "mp_unknown_secret") == WRONG_KEY
    assert ring.refused == 1


def test_a_request_without_a_key_is_anonymous_only_where_that_is_set():
    ring, key, text = a_ring(anonymous=True)
    assert check(ring, None) == check(ring, "sk-other") == ring.anonymous
    assert check(ring, text) == key
    assert check(ring, "mp_unknown_secret") == WRONG_KEY
    assert check(ring, None, scope="metrics") == build_missing_scope("metrics")

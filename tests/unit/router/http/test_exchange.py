"""Bodies, ids and answers of HTTP requests."""

import asyncio
import json

import pytest

from router.dialects.shared.interface import OPENAI
from router.errors import Problem, build_body_too_long
from router.http.exchange import CLIENT_CLOSED, MAX_INLINE_BYTES, DisconnectWatch, Exchange
from router.http.sse import Message
from router.settings import RouterSettings

LIMIT = 4 * MAX_INLINE_BYTES
SETTINGS = RouterSettings(max_body_bytes=LIMIT, body_timeout_seconds=30.0)
TOO_LONG = build_body_too_long(LIMIT)
REFUSED = Problem(429, "rate_limited", "no room")


class Client:
    """Client of an exchange, with the parts of its body and the messages of the answer."""

    def __init__(
        self, *parts: bytes | None, headers: dict[str, str] | None = None, method: str = "POST", ended: bool = True
    ) -> None:
        self.parts = asyncio.Queue[Message]()
        for number, part in enumerate(parts, 1):
            self.put(part, more=not ended or number < len(parts))
        self.sent: list[Message] = []
        named = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {"method": method, "path": "/v1/models", "headers": named}
        self.exchange = Exchange(scope, self.parts.get, self._send)

    def put(self, part: bytes | None, *, more: bool = False) -> None:
        """Send a part of the body; None: disconnect."""
        gone: Message = {"type": "http.disconnect"}
        self.parts.put_nowait(gone if part is None else {"type": "http.request", "body": part, "more_body": more})

    async def _send(self, message: Message) -> None:
        self.sent.append(message)


@pytest.mark.parametrize(
    ("parts", "length", "received"),
    [
        ([b""], None, b""),
        ([b"a", b"b"], None, b"ab"),
        ([b"x" * LIMIT], None, b"x" * LIMIT),
        ([b"x" * LIMIT], str(LIMIT), b"x" * LIMIT),
        ([b"x" * MAX_INLINE_BYTES, b"y"], None, b"x" * MAX_INLINE_BYTES + b"y"),
        ([b"x" * LIMIT, b"y"], None, TOO_LONG),
        ([b"x" * (LIMIT + 1)], None, TOO_LONG),
        ([b"never read"], str(LIMIT + 1), TOO_LONG),
        ([b"never read"], "-1", TOO_LONG),
        ([b"never read"], "many", TOO_LONG),
        ([b"never read"], "0" * 19, TOO_LONG),
        ([b"a", None], None, None),
        ([b"x" * (MAX_INLINE_BYTES + 1), None], None, None),
    ],
)
async def test_a_body_is_received_up_to_the_limit(
    parts: list[bytes | None], length: str | None, received: bytes | Problem | None
):
    client = Client(*parts, headers=None if length is None else {"content-length": length})
    assert await client.exchange.receive_body(SETTINGS) == received


async def test_room_is_reserved_once_for_a_long_body_with_its_length():
    sizes: list[int] = []

    async def reserve(size: int) -> None:
        sizes.append(size)

    part = b"x" * (MAX_INLINE_BYTES // 2 + 1)
    for headers, size in ((None, LIMIT), ({"content-length": str(3 * len(part))}, 3 * len(part))):
        client = Client(part, part, part, headers=headers)
        assert await client.exchange.receive_body(SETTINGS, reserve) == 3 * part
        assert sizes == [size]
        sizes.clear()
    assert await Client(b"x" * MAX_INLINE_BYTES).exchange.receive_body(SETTINGS, reserve) == b"x" * MAX_INLINE_BYTES
    whole = Client(b"x" * (MAX_INLINE_BYTES + 1))
    assert isinstance(await whole.exchange.receive_body(SETTINGS, reserve), bytes)
    assert sizes == [], "a body that has arrived needs no room"


async def test_a_refused_reservation_ends_the_reception():
    async def refuse(_: int) -> Problem:
        return REFUSED

    client = Client(b"x" * (MAX_INLINE_BYTES + 1), b"rest")
    assert await client.exchange.receive_body(SETTINGS, refuse) is REFUSED
    assert client.parts.qsize() == 1


async def test_a_slow_body_is_refused_but_the_wait_for_room_does_not_count():
    settings = RouterSettings(max_body_bytes=LIMIT, body_timeout_seconds=0.02)
    late = Client(b"first", ended=False)
    problem = await late.exchange.receive_body(settings)
    assert isinstance(problem, Problem)
    assert (problem.status, problem.code) == (408, "request_timeout")

    async def wait(_: int) -> None:
        await asyncio.sleep(0.04)

    part = b"x" * (MAX_INLINE_BYTES + 1)
    assert await Client(part, b"rest").exchange.receive_body(settings, wait) == part + b"rest"
    problem = await Client(part, ended=False).exchange.receive_body(settings, wait)
    assert isinstance(problem, Problem)
    assert problem.status == 408, "the time starts again after the wait"


@pytest.mark.parametrize(("method", "sent"), [("GET", b'{"a":1}'), ("HEAD", b"")])
async def test_an_answer_has_its_length_and_its_id(method: str, sent: bytes):
    client = Client(method=method, headers={"x-request-id": "mine-1"})
    assert client.exchange.status == CLIENT_CLOSED
    await client.exchange.answer(b'{"a":1}', 201, [(b"x-more", b"yes")])
    start, body = client.sent
    assert (client.exchange.status, start["status"], body["body"]) == (201, 201, sent)
    assert dict(start["headers"]) == {
        b"content-type": b"application/json",
        b"content-length": b"7",
        b"x-more": b"yes",
    } | dict.fromkeys(OPENAI.names, b"mine-1")


async def test_a_problem_is_an_answer_with_its_status_and_headers():
    client = Client()
    await client.exchange.respond(Problem(429, "rate_limited", "later", retry_after=2.0))
    start, body = client.sent
    assert (client.exchange.status, start["status"]) == (429, 429)
    assert dict(start["headers"])[b"retry-after"] == b"2"
    assert json.loads(body["body"])["error"]["code"] == "rate_limited"
    client = Client()
    await client.exchange.respond(b"{}")
    assert [message.get("status") or message["body"] for message in client.sent] == [200, b"{}"]


def test_only_a_valid_id_of_the_client_is_used():
    assert Client(headers={"x-request-id": "mine-1"}).exchange.request_id == "mine-1"
    ids = [Client(headers={"x-request-id": name}).exchange.request_id for name in ("", "two words", "x" * 1000)]
    ids.append(Client(headers={"other": "mine-1"}).exchange.request_id)
    assert len(set(ids)) == 4
    assert not {"", "two words", "x" * 1000, "mine-1"} & set(ids)


async def test_a_disconnect_is_reported_once_and_not_after_the_end_of_the_watch():
    client, calls = Client(), list[str]()
    DisconnectWatch(client.exchange.receive, lambda: calls.append("left"))
    client.put(b"late part of the body")
    client.put(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert calls == ["left"]
    watch = DisconnectWatch(client.exchange.receive, lambda: calls.append("closed"))
    watch.close()
    client.put(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert calls == ["left"]


async def test_a_reception_that_fails_counts_as_a_disconnect():
    calls: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)

    async def receive() -> Message:
        await asyncio.sleep(0)
        raise OSError("broken")

    DisconnectWatch(receive, lambda: calls.append("left"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert calls == ["left"]

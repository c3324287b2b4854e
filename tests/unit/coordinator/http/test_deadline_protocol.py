"""Connections of the HTTP port on a loopback socket: accepted and refused heads, held bytes, and ends."""

import asyncio
import json
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from coordinator.http import http_protocol
from coordinator.http.connection_slots import ConnectionSlots
from coordinator.http.http_protocol import DeadlineProtocol

SECONDS = 2.0
"""Seconds after which a test gives up."""
DEADLINE = 0.2
"""Seconds for a head, in tests of the deadline."""


class App:
    """An application that reads bodies, and answers with the number of the request. While `held` is set, its answers
    wait for `release` or for the end of the client. With `deaf`, it waits for `release` before it reads. With
    `refuses`, it answers 413 before it reads anything."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.bodies: list[bytes] = []
        self.left: list[int] = []
        """Numbers of the requests whose client left before the answer."""
        self.held = self.deaf = self.refuses = False
        self.release = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        number, status = len(self.scopes), 413 if self.refuses else 200
        if self.deaf:
            await self.release.wait()
        if not self.refuses:
            body, more = b"", True
            while more:
                message = await receive()
                body, more = body + message.get("body", b""), message.get("more_body", False)
            self.bodies.append(body)
        if self.held and not await self._wait(receive):
            self.left.append(number)
            return
        content = b"%d" % number
        headers = [(b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _wait(self, receive: Any) -> bool:
        """Wait for `release`; return False if the client leaves before."""
        released, received = asyncio.ensure_future(self.release.wait()), asyncio.ensure_future(receive())
        await asyncio.wait([released, received], return_when=asyncio.FIRST_COMPLETED)
        has_left = received.done() and received.result()["type"] == "http.disconnect"
        for one in (released, received):
            one.cancel()
        return not has_left


class Client:
    """One connection to the port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *parts: bytes) -> "Client":
        """Send parts, each in a packet of its own."""
        for part in parts:
            self.writer.write(part)
            await asyncio.sleep(0.01)
        return self

    async def read_answer(self) -> tuple[int, bytes]:
        """Return status and body of the next answer; status 0 if the connection ends instead."""
        async with asyncio.timeout(SECONDS):
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                return 0, b""
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            return int(head.split(b" ")[1]), await self.reader.readexactly(int(length))

    async def read_rest(self) -> bytes:
        """Return all bytes until the connection ends."""
        received = b""
        async with asyncio.timeout(SECONDS):
            with suppress(ConnectionError):
                while data := await self.reader.read(65536):
                    received += data
        return received


class Port:
    """A port with connections of `DeadlineProtocol`."""

    def __init__(self) -> None:
        self.app = App()
        self.slots: ConnectionSlots | None = ConnectionSlots()
        self.state = ServerState()
        self._config = uvicorn.Config(self.app, ws="none", lifespan="off", log_config=None, timeout_keep_alive=SECONDS)  # type: ignore[arg-type]
        self._config.load()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(self._accept, "127.0.0.1", 0)
        self._number = self._server.sockets[0].getsockname()[1]

    def _accept(self) -> DeadlineProtocol:
        slot = None if self.slots is None else self.slots.reserve_slot("10.0.0.1")
        assert slot is not None or self.slots is None
        return DeadlineProtocol(config=self._config, server_state=self.state, app_state={}, slot=slot)

    async def dial(self) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._number)
        self._writers.append(writer)
        return Client(reader, writer)

    async def ask(self, *parts: bytes) -> tuple[int, bytes]:
        """Send parts on a new connection; return status and body of the answer."""
        client = await self.dial()
        return await (await client.send(*parts)).read_answer()

    async def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the deadline of a head to `DEADLINE` seconds."""
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_SECONDS", DEADLINE)


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    made = Port()
    await made.start()
    yield made
    await made.close()


def head(*lines: str, target: str = "/a", version: str = "1.1", method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/{version}", "host: x", *lines, "", ""]).encode()


def code(body: bytes) -> str:
    return json.loads(body)["error"]["code"]


async def until(condition: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110  the port has no event for tests
            await asyncio.sleep(0.005)


async def test_requests_are_answered_in_order_on_one_connection(port: Port):
    client = await port.dial()
    body = head("content-length: 5", method="POST") + b"hello"
    await client.send(head() + body, head(target="/b?c=d"))
    assert [await client.read_answer() for _ in range(3)] == [(200, b"1"), (200, b"2"), (200, b"3")]
    assert port.app.bodies == [b"", b"hello", b""]
    assert [(one["path"], one["query_string"]) for one in port.app.scopes] == [("/a", b""), ("/a", b""), ("/b", b"c=d")]
    assert (b"host", b"x") in port.app.scopes[0]["headers"]


@pytest.mark.parametrize(("version", "status"), [("1.0", 200), ("1.1", 200), ("0.9", 400), ("1.2", 400), ("2.0", 400)])
async def test_only_versions_1_0_and_1_1_are_answered(port: Port, version: str, status: int):
    assert (await port.ask(head(version=version)))[0] == status
    assert len(port.app.scopes) == (status == 200)


@pytest.mark.parametrize("target", ["http://evil/a", "*", "evil:443", "/a#b", "#"])
async def test_a_target_that_is_no_path_or_has_a_fragment_is_refused(port: Port, target: str):
    status, body = await port.ask(head(target=target))
    assert (status, code(body)) == (400, "malformed_http")
    assert port.app.scopes == []


async def test_a_target_may_arrive_in_parts_and_each_is_checked(port: Port):
    assert (await port.ask(b"GET /a", b"b HTTP/1.1\r\nhost: x\r\n\r\n"))[0] == 200
    assert port.app.scopes[0]["path"] == "/ab"
    assert (await port.ask(b"GET /a", b"#b HTTP/1.1\r\nhost: x\r\n\r\n"))[0] == 400


async def test_a_head_has_a_limit_of_bytes_with_its_target_and_trailer(port: Port, monkeypatch: pytest.MonkeyPatch):
    counted = len("/a") + len("host") + len("x") + 4
    monkeypatch.setattr(http_protocol, "MAX_HEAD_BYTES", counted + 20)
    assert (await port.ask(head("a: " + 15 * "b")))[0] == 200
    status, body = await port.ask(head("a: " + 16 * "b"))
    assert (status, code(body)) == (431, "head_too_large")
    assert (await port.ask(head(target="/" + 21 * "a")))[0] == 200
    assert (await port.ask(head(target="/" + 22 * "a")))[0] == 431
    chunked = head("transfer-encoding: chunked", method="POST")
    monkeypatch.setattr(http_protocol, "MAX_HEAD_BYTES", 100)
    assert (await port.ask(chunked + b"0\r\na: b\r\n\r\n"))[0] == 200
    assert (await port.ask(chunked + b"0\r\na: " + 100 * b"b" + b"\r\n\r\n"))[0] != 200


async def test_a_key_in_a_trailer_is_no_header(port: Port):
    chunked = head("transfer-encoding: chunked", method="POST")
    assert (await port.ask(chunked + b"2\r\nhi\r\n0\r\nauthorization: Bearer key\r\n\r\n"))[0] == 200
    assert port.app.bodies == [b"hi"]
    assert [name for name, _ in port.app.scopes[0]["headers"]] == [b"host", b"transfer-encoding"]


@pytest.mark.parametrize("lines", [("host: y",), ("content-length: 1", "content-length: 1"), ("expect: more",)])
async def test_an_ambiguous_head_is_refused_by_its_problem(port: Port, lines: tuple[str, ...]):
    status, body = await port.ask(head(*lines))
    assert status in (400, 417)
    assert code(body) in ("header_twice", "expectation_failed", "malformed_http")
    assert port.app.scopes == []


@pytest.mark.usefixtures("short")
async def test_a_slow_head_ends_its_connection_and_a_slow_answer_does_not(port: Port):
    begun = time.monotonic()
    silent, slow = await port.dial(), await (await port.dial()).send(b"GET /")
    assert await silent.read_rest() == await slow.read_rest() == b""
    assert time.monotonic() - begun > DEADLINE / 2
    port.app.held = True
    client = await (await port.dial()).send(head())
    await asyncio.sleep(2 * DEADLINE)
    port.app.release.set()
    assert await client.read_answer() == (200, b"1")
    await asyncio.sleep(2 * DEADLINE)
    assert await (await client.send(head())).read_answer() == (200, b"2"), "no deadline runs between two requests"
    await client.send(b"GET /")
    assert await client.read_rest() == b"", "the next head has its own deadline"


@pytest.mark.usefixtures("short")
async def test_a_head_that_drips_has_one_deadline(port: Port):
    port.slots = None
    silent, client = await port.dial(), await (await port.dial()).send(b"GET /")
    rest = asyncio.ensure_future(client.read_rest())
    until = time.monotonic() + 5 * DEADLINE
    while not rest.done() and time.monotonic() < until:
        await client.send(b"a")
    assert rest.done()
    assert await silent.read_rest() == b""
    port.app.held = True
    client = await (await port.dial()).send(b"GET /", b"a", b"b HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.sleep(2 * DEADLINE)
    port.app.release.set()
    assert await client.read_answer() == (200, b"1"), "no deadline of its head is left"


async def test_connections_above_the_limit_get_a_503(port: Port, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DeadlineProtocol, "max_connections", 2)
    first, second = [await (await port.dial()).send() for _ in range(2)]
    await asyncio.sleep(0.02)
    third = await port.dial()
    status, body = await third.read_answer()
    assert (status, code(body)) == (503, "too_many_connections")
    assert await third.read_rest() == b""
    for number, client in enumerate((first, second), 1):
        assert await (await client.send(head())).read_answer() == (200, b"%d" % number)


async def test_a_connection_has_its_slot_until_its_end(port: Port):
    port.slots = slots = ConnectionSlots(max_handshakes=1)
    client, silent = await (await port.dial()).send(head()), await port.dial()
    assert await client.read_answer() == (200, b"1")
    await asyncio.sleep(0.02)
    assert (len(slots), slots.shed) == (2, 0), "their handshakes have ended"
    for one in (client, silent):
        one.writer.close()
    await until(lambda: not slots and not port.state.connections)
    port.slots = ConnectionSlots(max_unauthenticated=1)
    idle = await port.dial()
    await asyncio.sleep(0.02)
    other = await (await port.dial()).send(head())
    assert await idle.read_rest() == b"", "it was closed for the new one"
    assert await other.read_answer() == (200, b"2")


async def test_a_connection_whose_request_runs_is_not_closed_for_a_new_one(port: Port):
    port.slots = slots = ConnectionSlots(max_unauthenticated=1)
    port.app.held = True
    client = await (await port.dial()).send(head())
    await until(lambda: port.app.scopes)
    assert slots.reserve_slot("10.0.0.1") is None
    port.app.release.set()
    assert await client.read_answer() == (200, b"1")
    assert slots.reserve_slot("10.0.0.1") is not None
    assert await client.read_rest() == b""


async def test_an_offer_to_upgrade_is_not_taken(port: Port):
    offer = ("connection: upgrade, keep-alive", "upgrade: h2c")
    client = await port.dial()
    smuggled = head(target="/smuggled")
    await client.send(head(*offer, f"content-length: {len(smuggled)}", method="POST") + smuggled + head(target="/b"))
    assert [await client.read_answer() for _ in range(2)] == [(200, b"1"), (200, b"2")]
    assert port.app.bodies == [smuggled, b""]
    assert [one["path"] for one in port.app.scopes] == ["/a", "/b"]
    assert [name for name, _ in port.app.scopes[0]["headers"]] == [b"host", b"content-length", b"connection"]


async def test_a_client_of_http_1_1_is_asked_to_continue(port: Port):
    client = await (await port.dial()).send(head("expect: 100-continue", "content-length: 2", method="POST"))
    async with asyncio.timeout(SECONDS):
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert await (await client.send(b"hi")).read_answer() == (200, b"1")
    older = head("expect: 100-continue", "content-length: 2", method="POST", version="1.0")
    assert await port.ask(older, b"hi") == (200, b"2")


async def test_what_a_client_sends_ahead_takes_little_memory(port: Port):
    port.app.held = True
    client = await (await port.dial()).send(head())
    tracemalloc.start()
    for _ in range(8):
        client.writer.write(bytes(512 * 1024))
        await client.writer.drain()
    await asyncio.sleep(0.1)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1024 * 1024


async def test_bytes_that_are_no_request_are_refused_once(port: Port):
    client = await (await port.dial()).send(b"nonsense\r\n\r\n" + head())
    status, body = await client.read_answer()
    assert (status, code(body)) == (400, "malformed_http")
    assert json.loads(body)["error"]["request_id"]
    assert await client.read_rest() == b""
    assert port.app.scopes == []


@pytest.mark.parametrize("over", [0, 1])
async def test_a_connection_with_too_many_bytes_ahead_ends_after_its_answer(
    port: Port, monkeypatch: pytest.MonkeyPatch, over: int
):
    ahead = head(target="/ahead")
    monkeypatch.setattr(http_protocol, "MAX_PIPELINED_BYTES", len(ahead) - over)
    port.app.held = True
    client = await (await port.dial()).send(head(), ahead[:9], ahead[9:])
    if over:
        await client.send(ahead)
    port.app.release.set()
    assert await client.read_answer() == (200, b"1")
    if over:
        assert await client.read_rest() == b""
        assert len(port.app.scopes) == 1
    else:
        assert await client.read_answer() == (200, b"2")


@pytest.mark.parametrize("has_slots", [True, False])
@pytest.mark.parametrize("ahead", [b"", head(target="/ahead"), 3000 * b"x"])
async def test_a_running_request_sees_that_its_client_left(port: Port, ahead: bytes, has_slots: bool):
    port.slots = port.slots if has_slots else None
    port.app.held = True
    client = await (await port.dial()).send(head() + ahead)
    await until(lambda: port.app.bodies)
    client.writer.transport.abort()
    await until(lambda: port.app.left == [1] and not port.state.connections)
    assert len(port.app.scopes) == 1, "what it sent ahead is not run"


async def test_a_connection_whose_client_left_ends_although_its_request_does_not_read(port: Port):
    port.app.deaf = True
    client = await (await port.dial()).send(head() + head(target="/ahead"))
    await until(lambda: port.app.scopes)
    client.writer.transport.abort()
    await until(lambda: not port.state.connections)
    port.app.release.set()


@pytest.mark.usefixtures("short")
async def test_the_end_of_a_refused_body_is_no_head(port: Port):
    port.app.refuses = True
    client = await (await port.dial()).send(head("content-length: 20", method="POST"))
    assert (await client.read_answer())[0] == 413
    await client.send(10 * b"x", 10 * b"x")
    port.app.refuses = False
    await asyncio.sleep(2 * DEADLINE)
    assert await (await client.send(head())).read_answer() == (200, b"2"), "no deadline runs between two requests"


@pytest.mark.usefixtures("short")
async def test_a_refused_body_that_does_not_end_has_a_deadline(port: Port):
    port.app.refuses = True
    client = await (await port.dial()).send(head("content-length: 20", method="POST"))
    assert (await client.read_answer())[0] == 413
    await client.send(10 * b"x")
    assert await client.read_rest() == b""


@pytest.mark.usefixtures("short")
async def test_the_beginning_of_a_head_behind_a_request_has_its_deadline_after_the_answer(port: Port):
    port.app.held = True
    client = await (await port.dial()).send(head() + b"GET /")
    await asyncio.sleep(2 * DEADLINE)
    port.app.release.set()
    assert await client.read_answer() == (200, b"1")
    assert await client.read_rest() == b""


async def test_bytes_behind_a_running_request_that_are_none_end_the_connection_after_its_answer(port: Port):
    port.app.held = True
    client = await (await port.dial()).send(head() + b"nonsense\r\n\r\n")
    await until(lambda: port.app.bodies)
    port.app.release.set()
    assert await client.read_answer() == (200, b"1")
    assert await client.read_rest() == b""
    assert len(port.app.scopes) == 1


async def test_an_invalid_rest_of_a_body_gets_no_second_answer(port: Port):
    port.app.refuses = True
    client = await (await port.dial()).send(head("transfer-encoding: chunked", method="POST"))
    assert (await client.read_answer())[0] == 413
    await client.send(b"no chunk\r\n")
    assert await client.read_rest() == b""


async def test_each_head_of_a_connection_has_the_whole_limit(port: Port, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_protocol, "MAX_HEAD_BYTES", 2 * len(head()))
    client = await port.dial()
    for number in range(1, 5):
        await client.send(head()[:-1], head()[-1:])
        assert await client.read_answer() == (200, b"%d" % number)

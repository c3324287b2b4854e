"""The HTTP server: its accept loop, its handshakes, plain requests on a port for HTTPS, and its stop."""

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from coordinator.http import server
from coordinator.http.chat_fast_path import FastPath
from coordinator.http.connection_slots import ConnectionSlot, ConnectionSlots
from coordinator.http.listen import open_listener
from coordinator.http.origin_check import OriginCheck
from coordinator.http.server import Listener, run_http_server
from coordinator.tls.https_ca import HttpsCa
from router.http.app import App, serve_not_found
from tests.support.cluster.loopback_cluster import LoopbackCluster

Dialed = tuple[asyncio.StreamReader, asyncio.StreamWriter]
REQUEST = b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


@asynccontextmanager
async def serving(
    tls: ssl.SSLContext | None = None, slots: ConnectionSlots | None = None, control: App = serve_not_found
) -> AsyncIterator[int]:
    """Serve the routes of a pool without nodes, and yield the port."""
    cluster = LoopbackCluster(control=control)
    app = OriginCheck(cluster.app)
    fast_path = FastPath(cluster.dispatcher, cluster.keys, cluster.settings, app)
    with closing(open_listener("127.0.0.1", 0)) as listener:
        async with run_http_server(app, fast_path, [listener], tls, slots or ConnectionSlots(100)):
            yield listener.getsockname()[1]


async def dial(port: int, tls: ssl.SSLContext | None = None) -> Dialed:
    return await asyncio.open_connection(
        "127.0.0.1", port, ssl=tls, server_hostname=None if tls is None else "127.0.0.1"
    )


async def ask(dialed: Dialed, request: bytes = REQUEST) -> bytes:
    """Send a request and return its status line and headers."""
    dialed[1].write(request)
    async with asyncio.timeout(20):
        head = await dialed[0].readuntil(b"\r\n\r\n")
        await dialed[0].readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
    return head


async def read_to_end(dialed: Dialed) -> bytes:
    """Return all bytes up to the end of the connection, which the server must close."""
    async with asyncio.timeout(20):
        try:
            return await dialed[0].read()
        except ConnectionError:
            return b""
        finally:
            dialed[1].close()


def client_context(authority: HttpsCa) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authority.ca_pem)


async def test_requests_of_a_connection_are_answered_without_server_and_date(tmp_path: Path):
    authority = HttpsCa(tmp_path, (), time.time)
    for server_tls, client_tls in ((None, None), (authority.context, client_context(authority))):
        async with serving(server_tls) as port:
            dialed = await dial(port, client_tls)
            heads = [await ask(dialed) for _ in range(2)]
            assert [head.split(b"\r\n")[0] for head in heads] == [b"HTTP/1.1 200 OK"] * 2
            assert not [line for line in heads[0].lower().split(b"\r\n") if line.startswith((b"server:", b"date:"))]
        assert await read_to_end(dialed) == b"", "an idle connection ends with the server"


async def test_a_header_of_a_proxy_changes_neither_the_address_nor_the_scheme_of_a_client():
    seen = list[tuple[str, str]]()

    async def control(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["client"][0], scope["scheme"]))
        await serve_not_found(scope, receive, send)

    async with serving(control=control) as port:
        head = b"GET /api/v1/status HTTP/1.1\r\nhost: 127.0.0.1\r\nx-forwarded-for: 9.9.9.9\r\nx-forwarded-proto: https"
        dialed = await dial(port)
        await ask(dialed, head + b"\r\n\r\n")
        dialed[1].close()
    assert seen == [("127.0.0.1", "http")]


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_a_plain_request_gets_the_https_address(tmp_path: Path, method: str):
    slots = ConnectionSlots(100)
    async with serving(HttpsCa(tmp_path, (), time.time).context, slots) as port:
        dialed = await dial(port)
        dialed[1].write(REQUEST.replace(b"GET", method.encode()))
        answer = await read_to_end(dialed)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"code":"https_required"' in answer
        assert f"use https://127.0.0.1:{port}, and run `cluster trust-ca https://127.0.0.1:{port}`".encode() in answer
        assert len(slots) == 0


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x00\xc8", b"SSH-2.0-x\r\n"])
async def test_a_connection_without_a_handshake_is_closed_and_frees_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
):
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_SECONDS", 0.05)
    slots = ConnectionSlots(100)
    async with serving(HttpsCa(tmp_path, (), time.time).context, slots) as port:
        dialed = await dial(port)
        dialed[1].write(sent)
        assert b"HTTP" not in await read_to_end(dialed)
        assert len(slots) == 0


async def test_a_connection_without_a_free_slot_is_closed_until_another_one_ends():
    slots, connected = ConnectionSlots(2), asyncio.Queue[tuple[socket.socket, ConnectionSlot]]()

    async def connect(accepted: socket.socket, slot: ConnectionSlot) -> None:
        slot.record_handshake_end()
        slot.mark_busy()
        connected.put_nowait((accepted, slot))

    with closing(open_listener("127.0.0.1", 0)) as listening:
        listener, port = Listener(listening, slots, connect), listening.getsockname()[1]
        first = await dial(port)
        accepted, slot = await asyncio.wait_for(connected.get(), 20)
        assert await read_to_end(await dial(port)) == b""
        assert (len(slots), slots.refused, slots.shed) == (1, 1, 0)
        slot.release()
        third = await dial(port)
        others, _ = await asyncio.wait_for(connected.get(), 20)
        listener.close()
        for one in (accepted, others, first[1], third[1]):
            one.close()


@pytest.mark.parametrize("error", [ConnectionError("reset"), TimeoutError(), asyncio.CancelledError()])
async def test_a_failed_handshake_closes_its_connection_and_frees_its_slot(error: BaseException):
    slots = ConnectionSlots(10)

    async def connect(accepted: socket.socket, slot: ConnectionSlot) -> None:
        raise error

    with closing(open_listener("127.0.0.1", 0)) as listening:
        listener = Listener(listening, slots, connect)
        assert await read_to_end(await dial(listening.getsockname()[1])) == b""
        assert len(slots) == 0
        listener.close()


async def test_the_oldest_handshake_ends_for_a_new_connection_above_the_limit_of_handshakes():
    slots, never = ConnectionSlots(10, max_handshakes=1), asyncio.Event()

    async def connect(accepted: socket.socket, slot: ConnectionSlot) -> None:
        await never.wait()

    with closing(open_listener("127.0.0.1", 0)) as listening:
        listener = Listener(listening, slots, connect)
        first, second = [await dial(listening.getsockname()[1]) for _ in range(2)]
        assert await read_to_end(first) == b""
        assert (len(slots), slots.shed) == (1, 1)
        second[1].close()
        listener.close()


async def test_accepting_continues_after_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "ACCEPT_PAUSE_SECONDS", 0.01)
    loop, served, failures = asyncio.get_running_loop(), asyncio.Queue[str](), [OSError(24, "Too many open files")]
    accept = loop.sock_accept

    async def fail_first(listening: socket.socket) -> tuple[socket.socket, Any]:
        if failures:
            raise failures.pop()
        return await accept(listening)

    async def connect(accepted: socket.socket, slot: ConnectionSlot) -> None:
        accepted.close()
        served.put_nowait(slot.origin)

    monkeypatch.setattr(loop, "sock_accept", fail_first)
    with closing(open_listener("127.0.0.1", 0)) as listening:
        before = loop.time()
        with capture_logs() as logs:
            listener = Listener(listening, ConnectionSlots(10), connect)
            _, writer = await dial(listening.getsockname()[1])
            assert await asyncio.wait_for(served.get(), 20) == "127.0.0.1"
        assert loop.time() - before >= 0.009
        listener.close()
        await listener.wait_closed()
        writer.close()
    assert [(entry["event"], entry["reason"]) for entry in logs] == [("accept failed", "Too many open files")]


async def test_a_stopped_server_accepts_no_connection_and_cancels_what_still_runs():
    running, cancelled = asyncio.Event(), list[bool]()

    async def hang(scope: Any, receive: Any, send: Any) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async with serving(control=hang) as port:
        dialed = await dial(port)
        dialed[1].write(REQUEST.replace(b"/livez", b"/api/v1/status"))
        await asyncio.wait_for(running.wait(), 20)
        began = time.monotonic()
    assert 0.9 < time.monotonic() - began < 20
    assert cancelled == [True]
    await read_to_end(dialed)
    with pytest.raises(OSError):
        await dial(port)

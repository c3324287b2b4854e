"""The HTTP server: uvicorn under our own start and end, with a protocol of ours for the routes that generate."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import structlog
import uvicorn

from coordinator.http.chat_fast_path import Door, protocol
from coordinator.http.connection_slots import Place, Places
from coordinator.http.limits import HEAD_BYTES, DeadlineProtocol, turned_away
from coordinator.http.origin_check import Guard
from router.errors import Problem

log = structlog.get_logger("coordinator.http.server")

BACKLOG = 2048
"""Connections that wait in the kernel to be accepted."""
ACCEPT_PAUSE_SECONDS = 0.1
"""Wait after a connection could not be accepted: descriptors come back when others end."""
METHODS = (b"GET /", b"POST /", b"HEAD /", b"PUT /", b"DELETE /", b"OPTIONS", b"PATCH /")
"""With what a request without TLS begins."""
HANDSHAKE_SECONDS = 10.0
"""For a TLS handshake, from the connection on."""


class Server(uvicorn.Server):
    """uvicorn without its own signal handling: the composition root decides when to stop. With a deadline for
    handshakes and a place for each connection, because until a handshake is done no protocol of ours sees it. And
    without its ticks, ten a second also while nobody asks for anything: what they look for does not exist here, but
    for the end."""

    def __init__(self, config: uvicorn.Config, places: Places) -> None:
        super().__init__(config)
        self._places = places
        self.ending = asyncio.Event()

    async def main_loop(self) -> None:
        """Serve until the end."""
        await self.on_tick(0)
        await self.ending.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        config = self.config
        protocol_class = partial(
            config.http_protocol_class, config=config, server_state=self.server_state, app_state=self.lifespan.state
        )
        patience = None if config.ssl is None else HANDSHAKE_SECONDS
        loop = asyncio.get_running_loop()
        self.servers = [
            cast("asyncio.Server", Listener(one, self._places, partial(self._connect, loop, protocol_class, patience)))
            for one in sockets or ()
        ]
        self.started = True

    async def _connect(
        self,
        loop: asyncio.AbstractEventLoop,
        make: Callable[[], asyncio.Protocol],
        patience: float | None,
        accepted: socket.socket,
        place: Place,
    ) -> None:
        """Begin one connection, its handshake first."""

        def made() -> DeadlineProtocol:
            protocol = cast("DeadlineProtocol", make())
            protocol.place = place
            return protocol

        if patience is not None:
            began = loop.time()
            if await _speaks_http(loop, accepted, patience):
                await _send_to_https(loop, accepted)
                raise ConnectionError("plain HTTP on a port for HTTPS")
            patience = max(0.1, patience - (loop.time() - began))
        await loop.connect_accepted_socket(made, accepted, ssl=self.config.ssl, ssl_handshake_timeout=patience)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals alone."""
        yield


async def _speaks_http(loop: asyncio.AbstractEventLoop, accepted: socket.socket, patience: float) -> bool:
    """Return whether a client begins with a request instead of a handshake; its bytes stay where they are."""
    there = asyncio.Event()
    loop.add_reader(accepted, there.set)
    try:
        async with asyncio.timeout(patience):
            await there.wait()
        first = accepted.recv(8, socket.MSG_PEEK)
    finally:
        loop.remove_reader(accepted)
    return first.startswith(METHODS)


async def _send_to_https(loop: asyncio.AbstractEventLoop, accepted: socket.socket) -> None:
    """Answer a request without TLS with the URL of the same server. What came of it is read first: a connection that
    is closed with unread bytes is reset, and its client sees no answer."""
    host, port = accepted.getsockname()[:2]
    where = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    accepted.recv(HEAD_BYTES)
    text = f"this port speaks HTTPS: use {where}, and run `cluster trust-ca {where}` once on this machine"
    await loop.sock_sendall(accepted, turned_away(Problem(400, "https_required", text)))
    accepted.shutdown(socket.SHUT_WR)


class Listener:
    """Accepts connections on one socket: each takes its place before its handshake begins, or is closed at once."""

    def __init__(
        self, listening: socket.socket, places: Places, connect: Callable[[socket.socket, Place], Awaitable[None]]
    ) -> None:
        self._socket = listening
        self._places = places
        self._connect = connect
        self._begun: set[asyncio.Task[None]] = set()
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accept no more."""
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        """Wait until nothing is accepted any more."""
        await asyncio.wait([self._accepting])

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(self._socket)
            except OSError as error:  # no descriptor left, or the client has gone already
                log.warning("accept failed", reason=error.strerror or type(error).__name__)
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            accepted.setblocking(False)
            self._begin(accepted, address[0] if address else "")

    def _begin(self, accepted: socket.socket, address: str) -> None:
        place = self._places.take(address)
        if place is None:
            accepted.close()
            return
        task = asyncio.create_task(self._greet(accepted, place))
        place.end = task.cancel
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)

    async def _greet(self, accepted: socket.socket, place: Place) -> None:
        try:
            await self._connect(accepted, place)
        except (OSError, TimeoutError, asyncio.CancelledError):
            place.leave()
            accepted.close()


@asynccontextmanager
async def http_server(
    app: Guard, door: Door, sockets: list[socket.socket], tls: ssl.SSLContext | None, places: Places
) -> AsyncGenerator[None]:
    """Serve on these sockets until left; requests that run have been let end by then."""
    config = uvicorn.Config(
        app,
        loop="none",
        http=protocol(door),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=None,
    )
    config.load()
    config.ssl = tls
    server = Server(config, places)
    task = asyncio.create_task(server.serve(sockets))
    try:
        yield
    finally:
        server.should_exit = True
        server.ending.set()
        await task

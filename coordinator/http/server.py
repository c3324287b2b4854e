"""HTTP server: uvicorn with its own start and stop, limited TLS handshakes, and a fast path for chat."""

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

from coordinator.http.chat_fast_path import FastPath, create_protocol_class
from coordinator.http.connection_slots import ConnectionSlot, ConnectionSlots
from coordinator.http.http_protocol import MAX_HEAD_BYTES, build_problem_response
from coordinator.http.origin_check import OriginCheck
from router.errors import Problem

log = structlog.get_logger("coordinator.http.server")

BACKLOG = 2048
"""Requested maximum of connections that wait in the kernel to be accepted. The system may allow fewer."""
ACCEPT_PAUSE_SECONDS = 0.1
"""Seconds between a failed accept and the next one, because file descriptors may become free in this time."""
HTTP_STARTS = (b"GET /", b"POST /", b"HEAD /", b"PUT /", b"DELETE /", b"OPTIONS", b"PATCH /")
"""First bytes of a plain HTTP request, by which the server recognizes a client without TLS."""
HANDSHAKE_TIMEOUT_SECONDS = 10.0
"""Maximum seconds from the acceptance of a connection to the end of its TLS handshake.

After that, the connection is closed.
"""


class Server(uvicorn.Server):
    """Uvicorn server without signal handling, because `coordinator.run` decides when to stop.

    The server adds a deadline for handshakes and a slot for each connection, because no protocol class sees a
    connection before its handshake. It omits uvicorn's ten ticks per second, of which only the check for the end would
    apply here.
    """

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None, slots: ConnectionSlots) -> None:
        super().__init__(config)
        self._tls = tls
        self._slots = slots
        self._ending = asyncio.Event()

    def stop(self) -> None:
        """Make `serve` stop accepting connections, close the open ones, and return."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Serve until `stop` is called."""
        await self.on_tick(0)
        await self._ending.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections on each of the listening sockets."""
        config = self.config
        protocol_class = partial(
            config.http_protocol_class, config=config, server_state=self.server_state, app_state=self.lifespan.state
        )
        timeout = None if self._tls is None else HANDSHAKE_TIMEOUT_SECONDS
        loop = asyncio.get_running_loop()
        self.servers = [
            cast(
                "asyncio.Server", Listener(listener, self._slots, partial(self._connect, loop, protocol_class, timeout))
            )
            for listener in sockets or ()
        ]
        self.started = True

    async def _connect(
        self,
        loop: asyncio.AbstractEventLoop,
        make: Callable[..., asyncio.Protocol],
        timeout: float | None,
        accepted: socket.socket,
        place: ConnectionSlot,
    ) -> None:
        """Set up one connection, beginning with its handshake.

        `timeout` limits the handshake, in seconds; None without TLS. Plain HTTP on a port for HTTPS is answered with
        400, and raises `ConnectionError`.
        """
        if timeout is not None:
            began = loop.time()
            if await _is_plain_http(loop, accepted, timeout):
                await _answer_https_required(loop, accepted)
                raise ConnectionError("plain HTTP on a port for HTTPS")
            timeout = max(0.1, timeout - (loop.time() - began))
        await loop.connect_accepted_socket(
            partial(make, slot=place), accepted, ssl=self._tls, ssl_handshake_timeout=timeout
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Do nothing. Uvicorn installs signal handlers in this context."""
        yield


async def _is_plain_http(loop: asyncio.AbstractEventLoop, accepted: socket.socket, timeout: float) -> bool:
    """Return whether a client begins with a plain request instead of a handshake. Its bytes stay in the socket."""
    readable = asyncio.Event()
    loop.add_reader(accepted, readable.set)
    try:
        async with asyncio.timeout(timeout):
            await readable.wait()
        first = accepted.recv(8, socket.MSG_PEEK)
    finally:
        loop.remove_reader(accepted)
    return first.startswith(HTTP_STARTS)


async def _answer_https_required(loop: asyncio.AbstractEventLoop, accepted: socket.socket) -> None:
    """Answer a request without TLS with the HTTPS URL of this server.

    The request's bytes are read first. A close with pending bytes resets the connection, and the client would see no
    answer.
    """
    host, port = accepted.getsockname()[:2]
    where = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    accepted.recv(MAX_HEAD_BYTES)
    text = f"this port speaks HTTPS: use {where}, and run `cluster trust-ca {where}` once on this machine"
    await loop.sock_sendall(accepted, build_problem_response(Problem(400, "https_required", text)))
    accepted.shutdown(socket.SHUT_WR)


class Listener:
    """Accept loop of one listening socket, with the interface of `asyncio.Server` that uvicorn needs.

    The constructor starts the loop as a task of the running event loop. Each accepted connection takes a slot and is
    passed to `connect`. Without a free slot, the connection is closed at once.
    """

    def __init__(
        self,
        listening: socket.socket,
        slots: ConnectionSlots,
        connect: Callable[[socket.socket, ConnectionSlot], Awaitable[None]],
    ) -> None:
        self._socket = listening
        self._slots = slots
        self._connect = connect
        self._begun: set[asyncio.Task[None]] = set()
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._accepting = asyncio.create_task(self._accept_connections())

    def close(self) -> None:
        """Stop accepting connections. Open connections stay open."""
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        """Wait until the accept loop has ended. A cancellation ends only the wait."""
        await asyncio.wait([self._accepting])

    async def _accept_connections(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(self._socket)
            except OSError as error:  # no descriptor is free, or the client has left
                log.warning("accept failed", reason=error.strerror or type(error).__name__)
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            self._start_connection(accepted, address[0] if address else "")

    def _start_connection(self, accepted: socket.socket, address: str) -> None:
        place = self._slots.reserve_slot(address)
        if place is None:
            accepted.close()
            return
        task = asyncio.create_task(self._run_handshake(accepted, place))
        place.bind(task.cancel)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)

    async def _run_handshake(self, accepted: socket.socket, place: ConnectionSlot) -> None:
        try:
            await self._connect(accepted, place)
        except (OSError, TimeoutError, asyncio.CancelledError):
            place.release()
            accepted.close()


@asynccontextmanager
async def run_http_server(
    app: OriginCheck,
    fast_path: FastPath,
    sockets: list[socket.socket],
    tls: ssl.SSLContext | None,
    slots: ConnectionSlots,
) -> AsyncGenerator[None]:
    """Serve `app` and `fast_path` on listening sockets while the context is open.

    `tls` is None for HTTP without TLS. `slots` limits the connections. The caller should end running requests before it
    closes the context. Requests that still run then have 1 s before they are cancelled.
    """
    config = uvicorn.Config(
        app,
        loop="none",
        http=create_protocol_class(fast_path),
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
    server = Server(config, tls, slots)
    task = asyncio.create_task(server.serve(sockets))
    try:
        yield
    finally:
        server.stop()
        await task

"""The HTTP server: uvicorn under our own start and end, with a protocol of ours for the routes that generate."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from functools import partial

import uvicorn

from coordinator.guard import Guard
from coordinator.http import Door, protocol

HANDSHAKE_SECONDS = 10.0
"""For a TLS handshake, from the connection on."""


class Server(uvicorn.Server):
    """uvicorn without its own signal handling: the composition root decides when to stop. With a deadline for
    handshakes, for until one is done no protocol of ours sees the connection. And without its ticks, ten a second also
    while nobody asks for anything: what they look for does not exist here, but for the end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
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
            await loop.create_server(protocol_class, sock=one, ssl=config.ssl, ssl_handshake_timeout=patience,
                                     backlog=config.backlog)
            for one in sockets or ()
        ]  # fmt: skip
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals alone."""
        yield


@asynccontextmanager
async def http_server(
    app: Guard, door: Door, sockets: list[socket.socket], tls: ssl.SSLContext | None
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
    server = Server(config)
    task = asyncio.create_task(server.serve(sockets))
    try:
        yield
    finally:
        server.should_exit = True
        server.ending.set()
        await task

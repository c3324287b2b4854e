"""Child process that serves the files of a manifest to other nodes: `python -m node.hub.serving.mirror`.

The process reads its order (`MirrorOrder`) from the standard input. The mirror listens on one port of each address,
with TLS. Both ends present the certificate of a node of the cluster, and the client sends the token of the transfer.
The mirror ends after `idle_seconds` without a request. With `relay`, the mirror also serves nodes that cannot connect
to this machine, through the coordinator (`relay_listener`).
"""

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import uvicorn

from node.hub.child_messages import ChildChannel, ChildEnd, ChildProgress, MirrorOrder, build_end, perform_order
from node.hub.serving.node_tls import NodeServerContext
from node.hub.serving.relay_listener import RelayListener
from node.hub.serving.served_repository import CacheRepository
from node.hub.serving.server import HubServer
from wire.frames.model_files import ModelOrderCode, ModelOrderPhase

REPORT_SECONDS = 0.5
MAX_CONNECTIONS = 64
MAX_HEADER_BYTES = 16 * 1024
KEEP_ALIVE_SECONDS = 30
BACKLOG = 64


def open_ports(hosts: Sequence[str]) -> list[socket.socket]:
    """Listen on a free port of each address, on the same port number where possible. Return the listening sockets.

    Addresses that cannot be used are skipped. Raise `OSError` if none can be used.
    """
    opened, error = list[socket.socket](), OSError("the order names no address")
    for host in hosts:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        wanted = opened[0].getsockname()[1] if opened else 0
        for port in dict.fromkeys((wanted, 0)):
            try:
                opened.append(socket.create_server((host, port), family=family, backlog=BACKLOG))
                break
            except OSError as refused:
                error = refused
    if not opened:
        raise error
    return opened


def format_url(listener: socket.socket) -> str:
    """Return the `https` URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


class MirrorServer:
    """HTTP server from which other nodes get the files of one manifest in this node's Hugging Face cache."""

    def __init__(self, order: MirrorOrder, channel: ChildChannel) -> None:
        self._order = order
        self._channel = channel
        repository = CacheRepository(Path(os.path.realpath(order.hub)), order.manifest)
        self._app = HubServer(repository.find, token=order.token)

    def run(self) -> ChildEnd:
        """Serve until `idle_seconds` have passed without a request, a stop, or a failure. Return the end of the order.

        The call blocks, and reports the URLs and the progress every `REPORT_SECONDS`. Raise `OSError`, `ValueError` or
        `ssl.SSLError` if the server cannot start.
        """
        context = NodeServerContext.create(self._order.cluster)
        listeners = open_ports(self._order.hosts)
        server = uvicorn.Server(_build_config(self._app, lambda: context))
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(server, listeners)), daemon=True)
        thread.start()
        self._report(tuple(map(format_url, listeners)))
        while not self._channel.stop.wait(REPORT_SECONDS):
            if self._app.measure_idle() > self._order.idle_seconds:
                return build_end(ModelOrderCode.COMPLETED)
            if not thread.is_alive():
                return build_end(ModelOrderCode.FAILED, "the server of the mirror has ended")
            self._report(tuple(map(format_url, listeners)))
        return build_end(ModelOrderCode.CANCELLED)

    async def _serve(self, server: uvicorn.Server, listeners: list[socket.socket]) -> None:
        """Serve on the listening sockets, and through the coordinator if the order has `relay`."""
        relay = asyncio.create_task(self._serve_by_relay(server)) if self._order.relay else None
        try:
            await server.serve(listeners)
        finally:
            if relay is not None:
                relay.cancel()

    async def _serve_by_relay(self, server: uvicorn.Server) -> None:
        config = server.config
        if not config.loaded:
            config.load()

        build = cast("Callable[..., asyncio.Protocol]", config.http_protocol_class)

        def create_protocol() -> asyncio.Protocol:
            return build(config=config, server_state=server.server_state, app_state={})

        with suppress(OSError, ValueError):  # the mirror serves without the relay
            await RelayListener(self._order.cluster, self._order.token, create_protocol).run()

    def _report(self, addresses: tuple[str, ...]) -> None:
        self._channel.send(
            ChildProgress(
                phase=ModelOrderPhase.SERVING,
                done=self._app.sent_bytes,
                total=self._order.manifest.size,
                addresses=addresses,
            )
        )


def _build_config(app: HubServer, create_context: Callable[[], ssl.SSLContext]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        ssl_context_factory=lambda config, default: create_context(),
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )


def run_mirror(order: MirrorOrder, channel: ChildChannel) -> ChildEnd:
    """Perform an order to serve files to other nodes. Return its end.

    The end is `COMPLETED` after `idle_seconds` without a request, `CANCELLED` after a stop, and `FAILED` if the server
    cannot start or has ended.
    """
    try:
        return MirrorServer(order, channel).run()
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return build_end(ModelOrderCode.FAILED, f"the mirror cannot begin: {text}")


def main() -> None:
    """Read an order from standard input, run the mirror, send the end of the order, and end the process.

    The exit code is 0, also after a failure, or 2 if the order cannot be read.
    """
    perform_order(MirrorOrder, run_mirror)


if __name__ == "__main__":
    main()

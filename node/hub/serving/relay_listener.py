"""Keep connections to the coordinator open, through which nodes that cannot connect to this machine reach its mirror.

A fixed number of connections waits at a time. A connection that the coordinator joins with another node becomes a
connection of the mirror's server, and a new waiting connection replaces it.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from node.agent.host_dialer import dial_host
from node.agent.identity import proves_coordinator
from node.hub.child_messages import ClusterFiles
from node.hub.relay_join import RelayAnswer, RelayRefusedError, build_join, split_address
from node.hub.serving.node_tls import NodeClientContext

WAITING_CONNECTIONS = 4
"""Number of waiting connections: as many as the parallel ranges of one download."""
DIAL_TIMEOUT_SECONDS = 5.0
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0


class RelayListener:
    """Listener for relayed connections of the transfer with this `token`.

    `create_server_protocol()` returns the protocol that serves a joined connection.
    """

    def __init__(
        self, cluster: ClusterFiles, token: str, create_server_protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        self._cluster = cluster
        self._token = token
        self._create_server_protocol = create_server_protocol

    async def run(self) -> None:
        """Keep `WAITING_CONNECTIONS` connections waiting until the coordinator refuses the transfer permanently.

        Lost connections are dialed again. Raise `OSError`, `ValueError` or `ssl.SSLError` if the certificates or the
        address of the coordinator cannot be used.
        """
        host, port = split_address(self._cluster.coordinator)
        context = NodeClientContext.create_for_coordinator(self._cluster)
        await asyncio.gather(*(self._keep_waiting(host, port, context) for _ in range(WAITING_CONNECTIONS)))

    async def _keep_waiting(self, host: str, port: int, context: ssl.SSLContext) -> None:
        retry = FIRST_RETRY_SECONDS
        while True:
            try:
                await self._wait_joined(host, port, context)
                retry = FIRST_RETRY_SECONDS
            except RelayRefusedError as error:
                if error.is_final:
                    return
                retry = FIRST_RETRY_SECONDS  # the coordinator has answered
                await asyncio.sleep(retry)
            except (OSError, TimeoutError):
                await asyncio.sleep(retry)
                retry = min(2 * retry, MAX_RETRY_SECONDS)

    async def _wait_joined(self, host: str, port: int, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(2 * DIAL_TIMEOUT_SECONDS):
            transport, waiting = await loop.create_connection(
                lambda: _WaitingConnection(self._create_server_protocol),
                sock=await dial_host(host, port),
                ssl=context,
                server_hostname="",
                ssl_handshake_timeout=DIAL_TIMEOUT_SECONDS,
            )
        try:
            self._send_join(transport)
            await waiting.joined
        except BaseException:
            waiting.joined.cancel()  # asyncio logs an exception that is never retrieved
            transport.abort()
            raise

    def _send_join(self, transport: asyncio.Transport) -> None:
        if not proves_coordinator(transport.get_extra_info("ssl_object"), self._cluster.cluster):
            raise RelayRefusedError("the server is not the coordinator of this cluster")
        transport.write(build_join(self._cluster, self._token, serves=True))


class _WaitingConnection(asyncio.Protocol):
    """Connection until it is joined. Then the server's protocol takes its place."""

    def __init__(self, create_server_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._create_server_protocol = create_server_protocol
        self._answer = RelayAnswer()
        self._transport: asyncio.Transport | None = None
        self.joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is joined. Its exception is an `OSError`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Wait for RelayJoined, and pass the connection to the server with the bytes after it."""
        if self.joined.done() or self._transport is None:
            return
        try:
            request = self._answer.feed(data)
        except RelayRefusedError as error:
            self.joined.set_exception(error)
            return
        if request is None:
            return
        protocol = self._create_server_protocol()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if request:
            protocol.data_received(request)
        self.joined.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail `joined`."""
        if not self.joined.done():
            self.joined.set_exception(RelayRefusedError("the coordinator closed the connection"))

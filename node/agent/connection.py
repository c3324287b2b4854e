"""Node's end of the link: one TLS connection that the node dialed."""

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from node.agent.identity import proves_coordinator
from wire.link.endpoint import LinkEndpoint

DIAL_TIMEOUT_SECONDS = 5.0
"""Timeout in seconds of the TCP connection, and again of the TLS handshake."""


class NotTheCoordinator(ConnectionError):
    """The remote end has no certificate of our cluster's coordinator."""


class CoordinatorLink(LinkEndpoint):
    """One connection to the coordinator. `take(link, tag, body)` and `gone(link, reason)` are called on the loop."""

    def __init__(
        self,
        cluster: str,
        take: Callable[["CoordinatorLink", int, bytes], None],
        gone: Callable[["CoordinatorLink", str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(self._loop)
        self._cluster = cluster
        self._take = take
        self._gone = gone
        self.verified = False
        self.address = ""
        self.received_at = self._loop.time()
        self.requests: set[int] = set()
        """Open requests that came over this link. They are cancelled when the link ends."""

    def received(self, tag: int, body: bytes) -> None:
        """Pass a frame to `take`."""
        self._take(self, tag, body)

    def data_received(self, data: bytes) -> None:
        """Record the time of the coordinator's last bytes and parse them once the link is verified."""
        self.received_at = self._loop.time()
        if self.verified:
            super().data_received(data)

    def lost(self, reason: str) -> None:
        """Pass the end of the connection to `gone`."""
        self._gone(self, reason)

    def verify(self) -> None:
        """Check that the remote certificate is our coordinator's. Raises NotTheCoordinator otherwise."""
        tls: ssl.SSLObject | None = self.transport.get_extra_info("ssl_object") if self.transport else None
        if tls is None or not proves_coordinator(tls, self._cluster):
            self.abort("the server is not the coordinator of this cluster")
            raise NotTheCoordinator("the certificate of the server is not that of this cluster's coordinator")
        self.verified = True


async def dial(address: str, context: ssl.SSLContext, make: Callable[[], CoordinatorLink]) -> CoordinatorLink:
    """Connect to `host:port` and verify the coordinator.

    Raises OSError, ssl.SSLError, TimeoutError or NotTheCoordinator.
    """
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(2 * DIAL_TIMEOUT_SECONDS):
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: cast("asyncio.Protocol", make()),
            host.strip("[]"),
            int(port),
            ssl=context,
            server_hostname="",
            ssl_handshake_timeout=DIAL_TIMEOUT_SECONDS,
        )
    link = cast("CoordinatorLink", protocol)
    link.verify()
    return link

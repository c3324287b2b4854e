"""The node's end of the link: one TLS connection that the node dialled."""

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from node.agent.identity import proves_coordinator
from wire.link.endpoint import Endpoint

DIAL_SECONDS = 5.0
"""Longest wait for TCP, and again for TLS, before the next address is tried."""


class NotTheCoordinator(ConnectionError):
    """The other end has no certificate of our cluster's coordinator."""


class Link(Endpoint):
    """One connection. `take(link, tag, body)` and `gone(link, reason)` are called on the loop."""

    def __init__(
        self, cluster: str, take: Callable[["Link", int, bytes], None], gone: Callable[["Link", str], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(self._loop)
        self._cluster = cluster
        self._take = take
        self._gone = gone
        self.verified = False
        self.address = ""
        self.heard_at = self._loop.time()
        self.requests: set[int] = set()
        """Requests that came over this link and are not finished; they are cancelled with it."""

    def received(self, tag: int, body: bytes) -> None:
        """Hand on."""
        self._take(self, tag, body)

    def data_received(self, data: bytes) -> None:
        """Note when the coordinator was heard."""
        self.heard_at = self._loop.time()
        if self.verified:
            super().data_received(data)

    def lost(self, reason: str) -> None:
        """Tell the owner."""
        self._gone(self, reason)

    def verify(self) -> None:
        """Check that the certificate at the other end is our coordinator's; NotTheCoordinator otherwise."""
        tls: ssl.SSLObject | None = self.transport.get_extra_info("ssl_object") if self.transport else None
        if tls is None or not proves_coordinator(tls, self._cluster):
            self.abort("the other end is not our coordinator")
            raise NotTheCoordinator("the certificate at the other end is not our coordinator's")
        self.verified = True


async def dial(address: str, context: ssl.SSLContext, make: Callable[[], Link]) -> Link:
    """Connect to `host:port` and verify who answers. OSError, ssl.SSLError, TimeoutError or NotTheCoordinator."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(2 * DIAL_SECONDS):
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: cast("asyncio.Protocol", make()),
            host.strip("[]"),
            int(port),
            ssl=context,
            server_hostname="",
            ssl_handshake_timeout=DIAL_SECONDS,
        )
    link = cast("Link", protocol)
    link.verify()
    return link

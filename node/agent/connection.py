"""Node's end of the link: one TLS connection that the node dialed.

Counterpart: `coordinator.cluster.links.link_server`.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

import structlog

from node.agent.enrollment import explain_unreachable
from node.agent.host_dialer import dial_host
from node.agent.identity import proves_coordinator
from wire.codec import MAX_JOINED_FROM_NODE_BYTES
from wire.link.endpoint import LinkEndpoint

DIAL_TIMEOUT_SECONDS = 5.0
"""Timeout of the TLS handshake in seconds. The TCP connection and the handshake together may take twice as long."""

UNREACHED_ROUNDS = 3
"""Failed rounds of dialing, about 10 s, after which a warning names the cause."""

log = structlog.get_logger("node.agent.agent")


class NotTheCoordinator(ConnectionError):
    """Raised if the certificate of the remote end is not that of this cluster's coordinator."""


class CoordinatorLink(LinkEndpoint):
    """Connection of this node to the coordinator, created by `dial`.

    `take(link, tag, body)` is called for each frame, `on_lost(link, reason)` once at the end, both on the loop.
    `cluster` is the id of the cluster, `address` the dialed `host:port`.
    """

    def __init__(
        self,
        address: str,
        cluster: str,
        take: Callable[["CoordinatorLink", int, bytes], None],
        on_lost: Callable[["CoordinatorLink", str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(self._loop, longest_sent=MAX_JOINED_FROM_NODE_BYTES)
        self._cluster = cluster
        self._take = take
        self._on_lost = on_lost
        self.verified = False
        """Whether `verify` has passed. Bytes that arrive before are discarded."""
        self.address = address
        """Address (`host:port`) that was dialed."""
        self.received_at = self._loop.time()
        """Time of the last received bytes, or of the creation before the first, in seconds of the loop's clock."""
        self.requests: set[int] = set()
        """Open requests that came over this link. They are cancelled when the link ends."""

    @property
    def local_address(self) -> str:
        """IP address of this machine on the connection, without a port; empty before the connection, and after it."""
        name = self.transport.get_extra_info("sockname") if self.transport is not None else None
        return str(name[0]) if name else ""

    def on_frame(self, tag: int, body: bytes) -> None:
        """Pass a frame to `take`."""
        self._take(self, tag, body)

    def data_received(self, data: bytes) -> None:
        """Record the time of received bytes, and parse them if the link is verified; discard them otherwise."""
        self.received_at = self._loop.time()
        if self.verified:
            super().data_received(data)

    def on_lost(self, reason: str) -> None:
        """Pass the end of the connection to the constructor's `on_lost`."""
        self._on_lost(self, reason)

    def verify(self) -> None:
        """Check that the remote end has the certificate of this cluster's coordinator.

        Otherwise abort the connection and raise `NotTheCoordinator`.
        """
        tls: ssl.SSLObject | None = self.transport.get_extra_info("ssl_object") if self.transport else None
        if tls is None or not proves_coordinator(tls, self._cluster):
            self.abort("the server is not the coordinator of this cluster")
            raise NotTheCoordinator("the certificate of the server is not that of this cluster's coordinator")
        self.verified = True


async def dial(address: str, context: ssl.SSLContext, make: Callable[[str], CoordinatorLink]) -> CoordinatorLink:
    """Connect to `host:port`, verify the coordinator, and return the link. `make` creates the link for an address.

    Raise `OSError` if the connection fails (also `ssl.SSLError`, and `TimeoutError` after twice
    `DIAL_TIMEOUT_SECONDS`), `NotTheCoordinator` if the certificate is wrong. Raise `ValueError` or `OverflowError` if
    `address` has no possible host or port.
    """
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(2 * DIAL_TIMEOUT_SECONDS):
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: cast("asyncio.Protocol", make(address)),
            sock=await dial_host(host.strip("[]"), int(port)),
            ssl=context,
            server_hostname="",
            ssl_handshake_timeout=DIAL_TIMEOUT_SECONDS,
        )
    link = cast("CoordinatorLink", protocol)
    link.verify()
    return link


class DialFailures:
    """Count of failed rounds of dialing since the last link; logs one warning with the cause of the last failure."""

    def __init__(self) -> None:
        self._rounds = 0
        self._last: dict[str, str] = {"error": "no address of the coordinator is known, and Bonjour found none"}

    def record(self, address: str, error: Exception) -> None:
        """Log that an address (`host:port`) was not reached, and store the cause for the warning of `end_round`.

        The log line has a hint with the next step if there is one (`explain_unreachable`).
        """
        reason = getattr(error, "verify_message", "") or str(error) or type(error).__name__
        self._last = {"address": address, "error": f"{reason}{explain_unreachable(error)}"}
        log.info("dial failed", **self._last)

    def end_round(self) -> None:
        """Count a round in which no address was reached. Log a warning after `UNREACHED_ROUNDS` rounds."""
        self._rounds += 1
        if self._rounds == UNREACHED_ROUNDS:
            log.warning("coordinator not reached, dialing continues", **self._last)

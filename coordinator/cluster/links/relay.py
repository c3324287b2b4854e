"""Relay of model files between two nodes that cannot connect to each other, over connections that both have opened.

Rules
- Only transfers that the coordinator has ordered are relayed. The token of a connection names its transfer. One node
  serves, and only the nodes of its pull get files.
- The node that serves holds a few open connections in reserve. Each connection of another node is joined with one of
  them. If there is none, the connection waits for at most JOIN_TIMEOUT_SECONDS.
- All relays together copy at most MAX_BYTES_PER_SECOND, because they share the loop with requests. A block that
  exceeds the rate delays the next read of its connection.
"""

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.cluster.member_authentication import MemberAuthentication
from wire.codec import encode
from wire.frames import Denied, JoinRelay, RelayJoined
from wire.identity import NodeId, PeerIdentity
from wire.units import MIB

MAX_BYTES_PER_SECOND = 64.0 * MIB
JOIN_TIMEOUT_SECONDS = 5.0
"""Maximum seconds for which a connection of a receiving node waits for a connection of the serving node."""
MAX_WAITING = 8
"""Maximum waiting connections of a transfer, counted separately for the serving node and the receiving nodes."""
MAX_STREAMS = 64
"""Maximum number of relay connections of all transfers together."""
RETRY_SECONDS = 2.0
"""Seconds until a refused connection may retry, as `retry_after` of the denial."""


class RelayPace:
    """Rate limit that all relays share, in bytes per second. Times are monotonic seconds."""

    def __init__(self, rate: float = MAX_BYTES_PER_SECOND) -> None:
        self._rate = rate
        self._due = 0.0

    def charge(self, size: int, now: float) -> float:
        """Count `size` bytes that a connection received at `now`. Return for how many seconds it must not be read."""
        self._due = max(self._due, now) + size / self._rate
        return self._due - now


class RelayStream(asyncio.Protocol):
    """One of the two connections of a relay. After `join`, received bytes are copied to its peer.

    `pace` is the common rate limit. `on_end` is called once, with this stream, when the connection has ended.
    """

    def __init__(
        self, transport: asyncio.Transport, pace: RelayPace, on_end: Callable[["RelayStream"], object]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._pace = pace
        self._on_end = on_end
        self._peer: RelayStream | None = None
        self._delay: asyncio.TimerHandle | None = None
        self._peer_is_full = False
        self._timeout: asyncio.TimerHandle | None = None

    def start_timeout(self, denied: Denied) -> None:
        """Send `denied` and close the connection after JOIN_TIMEOUT_SECONDS, unless it is joined before."""
        self._timeout = self._loop.call_later(JOIN_TIMEOUT_SECONDS, self.refuse, denied)

    def refuse(self, denied: Denied) -> None:
        """Send a denial and close the connection."""
        self._transport.write(encode(denied))
        self._transport.close()

    def join(self, peer: "RelayStream") -> None:
        """Send RelayJoined on this connection and on `peer`, and copy bytes between both from then on."""
        for stream, other in ((self, peer), (peer, self)):
            stream.set_peer(other)

    def set_peer(self, peer: "RelayStream") -> None:
        """Send RelayJoined on this connection, and copy its received bytes to `peer`."""
        self._peer = peer
        if self._timeout is not None:
            self._timeout.cancel()
        self._transport.write(encode(RelayJoined()))

    def data_received(self, data: bytes) -> None:
        """Copy bytes to the peer, and delay the next read as the common rate requires. Abort if there is no peer."""
        if self._peer is None:
            self._transport.abort()
            return
        self._peer.write(data)
        delay = self._pace.charge(len(data), self._loop.time())
        if self._delay is not None:
            self._delay.cancel()
        self._delay = self._loop.call_later(delay, self._end_delay)
        self._update_reading()

    def write(self, data: bytes) -> None:
        """Send bytes to the node of this connection, unless the connection is closing."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def _end_delay(self) -> None:
        self._delay = None
        self._update_reading()

    def pause_writing(self) -> None:
        """Stop reading from the peer, because the node of this connection receives more slowly."""
        if self._peer is not None:
            self._peer.hold_reading(full=True)

    def resume_writing(self) -> None:
        """Resume reading from the peer, because the node of this connection has received enough bytes."""
        if self._peer is not None:
            self._peer.hold_reading(full=False)

    def hold_reading(self, *, full: bool) -> None:
        """Stop reading from the node of this connection if the peer's write buffer is `full`, else resume.

        Reading resumes as soon as the common rate permits.
        """
        self._peer_is_full = full
        self._update_reading()

    def _update_reading(self) -> None:
        if self._transport.is_closing():
            return
        if self._peer_is_full or self._delay is not None:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def close(self) -> None:
        """Close the connection after its buffered bytes are sent."""
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the peer's connection, and call `on_end`."""
        for timer in (self._timeout, self._delay):
            if timer is not None:
                timer.cancel()
        if self._peer is not None:
            self._peer.close()
        self._on_end(self)


@dataclass(slots=True, eq=False)
class RelayTransfer:
    """Transfer of model files that may be relayed, with its waiting connections."""

    token: bytes
    server: NodeId
    """Node that serves the files."""
    clients: frozenset[NodeId]
    """Nodes that may get the files."""
    serving: list[RelayStream] = field(default_factory=list)
    """Waiting connections from the node `server`, not yet paired with a connection of a client."""
    getting: list[RelayStream] = field(default_factory=list)
    """Waiting connections from nodes in `clients`, not yet paired with a connection of `server`."""


class RelayTransfers:
    """Transfers that the coordinator relays, found by their tokens."""

    def __init__(self) -> None:
        self._transfers: list[RelayTransfer] = []

    def open(self, token: str, server: NodeId, clients: frozenset[NodeId]) -> None:
        """Permit the relay of files from `server` to `clients` over connections with this token."""
        self._transfers.append(RelayTransfer(token.encode(), server, clients))

    def close(self, token: str) -> None:
        """End a transfer and close its waiting connections. Ignore an unknown token.

        Connections that are joined continue until one of the nodes ends them.
        """
        transfer = self._find(token)
        if transfer is not None:
            self._transfers.remove(transfer)
            for stream in (*transfer.serving, *transfer.getting):
                stream.close()

    def find(self, node: NodeId, join: JoinRelay) -> RelayTransfer | None:
        """Return the transfer for a connection of `node`; None if there is none, or if the node has no part in it."""
        transfer = self._find(join.token)
        if transfer is None:
            return None
        is_allowed = node == transfer.server if join.serves else node in transfer.clients
        return transfer if is_allowed else None

    def _find(self, token: str) -> RelayTransfer | None:
        sent = token.encode("utf-8", "replace")
        same = [transfer for transfer in self._transfers if hmac.compare_digest(transfer.token, sent)]
        return same[0] if same else None


class RelayServer:
    """Server that pairs the connections of transfers, on one event loop, and copies their bytes.

    `authentication` decides which nodes are members. `rate` is the maximum of all relays together, in bytes per second.
    """

    def __init__(
        self, transfers: RelayTransfers, authentication: MemberAuthentication, rate: float = MAX_BYTES_PER_SECOND
    ) -> None:
        self._transfers = transfers
        self._authentication = authentication
        self._pace = RelayPace(rate)
        self._streams: set[RelayStream] = set()

    def admit(self, peer: PeerIdentity, serial: str, join: JoinRelay) -> RelayTransfer | Denied:
        """Return the transfer for a connection, or `Denied` with the reason.

        `peer` is the identity in its certificate, and `serial` the serial number of the certificate in hex.
        """
        row = self._authentication.authenticate(peer, serial, join.node, join.machine)
        if isinstance(row, Denied):
            return row
        transfer = self._transfers.find(row.node, join)
        if transfer is None:
            return Denied("no_transfer", "the coordinator relays no such transfer for this node", final=True)
        waiting = transfer.serving if join.serves else transfer.getting
        if len(waiting) >= MAX_WAITING or len(self._streams) >= MAX_STREAMS:
            text = f"the relay has {len(self._streams)} connections, {len(waiting)} of them wait for this transfer"
            return Denied("too_many", text, retry_after=RETRY_SECONDS)
        return transfer

    def add(self, transfer: RelayTransfer, transport: asyncio.Transport, *, serves: bool) -> None:
        """Handle an admitted connection: pair it with a waiting connection, or let it wait for one.

        `serves` is whether it comes from the serving node. A connection of a receiving node waits at most
        JOIN_TIMEOUT_SECONDS, and is then refused.
        """
        stream = RelayStream(transport, self._pace, lambda ended: self._remove(transfer, ended))
        self._streams.add(stream)
        transport.set_protocol(stream)
        mine, others = (transfer.serving, transfer.getting) if serves else (transfer.getting, transfer.serving)
        if others:
            stream.join(others.pop(0))
            return
        mine.append(stream)
        if not serves:
            text = f"the node that serves has no connection within {JOIN_TIMEOUT_SECONDS:.0f} s"
            stream.start_timeout(Denied("no_server", text, retry_after=RETRY_SECONDS))

    def close(self) -> None:
        """Close all connections."""
        for stream in tuple(self._streams):
            stream.close()

    def _remove(self, transfer: RelayTransfer, stream: RelayStream) -> None:
        self._streams.discard(stream)
        for waiting in (transfer.serving, transfer.getting):
            if stream in waiting:
                waiting.remove(stream)

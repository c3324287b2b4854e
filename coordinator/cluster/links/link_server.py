"""TLS server for the links of nodes: the one port to which nodes connect.

Covers: admission of connections, answers to Hello and to queries, delivery of frames, and pings. Its parts: connections
of peers (`link_connection`), the table of links (`link_table`), fetches from nodes (`node_fetches`), and the relay of
model files (`relay`).

Does not cover: permission to link (`link_admission`), the states of a node (`membership`), the effects of its frames
(`registry`, `router.dispatch.dispatcher`), enrollment itself (`coordinator.joining.enrollment`).
"""

import asyncio
import itertools
import ssl
from collections.abc import Callable
from typing import Protocol, cast

import structlog

from coordinator.cluster.links.link_admission import LinkAdmission
from coordinator.cluster.links.link_budgets import BUDGET_RETRY_SECONDS, NodeBudgets
from coordinator.cluster.links.link_connection import HANDSHAKE_TIMEOUT_SECONDS, Connection
from coordinator.cluster.links.link_table import LinkTable
from coordinator.cluster.links.member_queries import MemberQueries
from coordinator.cluster.links.node_fetches import NodeFetches
from coordinator.cluster.links.relay import RelayServer
from coordinator.cluster.store_barrier import StoreBarrier
from coordinator.http.listen import open_listener
from coordinator.joining.enrollment import EnrollmentConnection, EnrollmentServer
from wire.frames import Denied, FetchChunk, Frame, Hello, JoinRelay, MemberQuery, Ping
from wire.identity import NodeId, PeerIdentity

MAX_UNLINKED = 64
"""Maximum connections without a certificate; a quarter of them from one address.

Connections with a certificate of the cluster do not count. Peers without one therefore cannot keep a node out, even a
node behind the same address.
"""
PING_INTERVAL_SECONDS = 1.0
"""Seconds between two pings on the links of all nodes."""

log = structlog.get_logger("coordinator.cluster.links.link_server")


class LinkEvents(Protocol):
    """Handler of the events of links, implemented by the registry."""

    def on_link_up(self, node: NodeId, hello: Hello) -> int:
        """Record a new link of a node and return its sequence number.

        Raise `IllegalEventError` if the node has left.
        """
        ...

    def on_link_down(self, node: NodeId, number: int, reason: str) -> None:
        """Record the end of the link `number` of a node. `reason` is a text for the log."""
        ...

    def handle_frame(self, node: NodeId, number: int, frame: Frame) -> None:
        """Handle a frame of the link `number` of a node."""
        ...


class LinkServer:
    """Server for all links of nodes, on one event loop.

    `admission` decides which nodes may link, `enrollments` which peers may join. `events` handles the links' frames.
    """

    def __init__(
        self,
        links: LinkTable,
        fetches: NodeFetches,
        events: LinkEvents,
        admission: LinkAdmission,
        queries: MemberQueries,
        relay: RelayServer,
        enrollments: EnrollmentServer,
        barrier: StoreBarrier,
    ) -> None:
        self._links = links
        self._fetches = fetches
        self._events = events
        self._admission = admission
        self._queries = queries
        self._relay = relay
        self._enrollments = enrollments
        self._barrier = barrier
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._unlinked: set[Connection] = set()
        self._budgets: dict[NodeId, NodeBudgets] = {}
        self._nonces = itertools.count(1)
        self._ping_timer: asyncio.TimerHandle | None = None
        self.established = self.denied = 0
        """Number of links established since the start; `denied`: number of Hellos denied."""

    async def start(self, host: str, port: int, context: ssl.SSLContext) -> int:
        """Start to listen for nodes with TLS and to ping them. Return the port; if `port` is 0, the system chooses one.

        Raise `OSError` if the address cannot be used.
        """
        server = self._server = await self._loop.create_server(
            lambda: cast("asyncio.Protocol", Connection(self)),
            sock=open_listener(host, port, "--cluster-listen"),
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_SECONDS,
            ssl_shutdown_timeout=1.0,
        )
        self._ping_timer = self._loop.call_later(PING_INTERVAL_SECONDS, self._send_pings)
        return server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        if self._server is not None:
            self._server.close()
        for connection in list(self._unlinked):
            connection.close("the coordinator stops")
        self._links.close("the coordinator stops")
        self._relay.close()

    def count_unlinked(self) -> int:
        """Return the number of open connections that are not links (yet), and not relays."""
        return len(self._unlinked)

    def _send_pings(self) -> None:
        self._links.send_to_all(Ping(next(self._nonces)))
        self._ping_timer = self._loop.call_later(PING_INTERVAL_SECONDS, self._send_pings)

    # -- for connections ----------------------------------------------------------

    def admit_connection(self, connection: Connection) -> bool:
        """Count a new connection. Return False and abort the connection if there are too many without a certificate.

        A peer with a certificate is never limited here.
        """
        self._unlinked.add(connection)
        if connection.peer is not None:
            return True
        addresses = [unlinked.address for unlinked in self._unlinked if unlinked.peer is None]
        here = addresses.count(connection.address)
        if len(addresses) > MAX_UNLINKED or here > MAX_UNLINKED // 4:
            connection.abort(f"{len(addresses)} strangers are connected, {here} from this address")
            return False
        return True

    def start_enrollment(self, address: str, wake: Callable[[], object]) -> EnrollmentConnection | Denied:
        """Begin the enrollment of a peer at the IP address `address`, or return `Denied` if it is over its rate limit.

        `wake` is called when `EnrollmentConnection.poll` has frames to send before the deadline.
        """
        return self._enrollments.start_enrollment(address, self._loop.time(), wake)

    def call_when_stored(self, callback: Callable[[], None], on_failure: Callable[[BaseException], None]) -> None:
        """Call `callback` once all earlier changes are on disk. If a write failed, call `on_failure` instead."""
        self._barrier.call_when_stored(callback, on_failure)

    def answer_hello(self, connection: Connection, peer: PeerIdentity, hello: Hello) -> None:
        """Answer a Hello with Welcome or Denied. After Welcome, the connection is the newest link of its node.

        Raise `IllegalEventError` if the node has left the cluster.
        """
        assert peer.node is not None  # noqa: S101  checked by the connection
        budgets = self._budgets.setdefault(peer.node, NodeBudgets())
        why = budgets.charge_link(self._loop.time())
        if why:
            self.denied += 1
            connection.refuse(Denied("too_many", why, retry_after=BUDGET_RETRY_SECONDS))
            return
        answer = self._admission.authorize(peer, connection.serial, hello)
        if isinstance(answer, Denied):
            self.denied += 1
            connection.refuse(answer)
            return
        self.established += 1
        node = NodeId(hello.node)
        self._unlinked.discard(connection)
        self._links.add(node, connection, hello)
        connection.send(answer)
        connection.bind_link(node, hello, self._events.on_link_up(node, hello), budgets, self._events.handle_frame)

    def answer_query(self, connection: Connection, peer: PeerIdentity, query: MemberQuery) -> None:
        """Answer the query of a command on a node's machine, and close the connection.

        The command uses the certificate of the node, whose identity is `peer`. A query above the node's budget, or one
        that `MemberQueries` refuses, is denied. The node's link is unaffected.
        """
        assert peer.node is not None  # noqa: S101  checked by the connection
        why = self._budgets.setdefault(peer.node, NodeBudgets()).charge_query(self._loop.time())
        if why:
            connection.refuse(Denied("too_many", why, retry_after=BUDGET_RETRY_SECONDS))
            return
        answer = self._queries.answer(peer, connection.serial, query)
        if isinstance(answer, Denied):
            connection.refuse(answer)
        else:
            connection.send_answer(answer)

    def answer_relay(self, connection: Connection, peer: PeerIdentity, join: JoinRelay) -> None:
        """Use a connection for the transfer of model files that `join` names, or refuse the connection."""
        assert peer.node is not None  # noqa: S101  checked by the connection
        why = self._budgets.setdefault(peer.node, NodeBudgets()).charge_query(self._loop.time())
        answer = Denied("too_many", why, retry_after=BUDGET_RETRY_SECONDS) if why else None
        answer = answer or self._relay.admit(peer, connection.serial, join)
        if isinstance(answer, Denied):
            connection.refuse(answer)
            return
        self._unlinked.discard(connection)
        self._relay.add(answer, connection.release(), serves=join.serves)

    def deliver_chunk(self, node: NodeId, chunk: FetchChunk) -> None:
        """Pass a piece of a node's answer to the fetch that waits for it. Ignore a piece for which no fetch waits.

        Raise `WireError` if the answer has more bytes than its fetch requested, or too many pieces.
        """
        self._fetches.deliver(node, chunk)

    def on_connection_lost(self, connection: Connection, reason: str) -> None:
        """Remove a closed connection. If it was a link, report its end to the handler of events."""
        self._unlinked.discard(connection)
        if connection.node is None:
            log.info("connection without link closed", peer=connection.address, reason=reason)
            return
        self._links.remove(connection.node, connection)
        self._events.on_link_down(connection.node, connection.number, reason)

"""TLS server for the links of nodes: the one port to which nodes connect.

Covers: TLS, enrolment and greeting of peers, framing in both directions, newest link wins, second links that take over,
pings, and fetches from nodes. Also covers limits for peers without a certificate.
Does not cover: the states of a node (`cluster.membership`), the effects of its frames (`router.dispatch.dispatcher`),
enrolment itself (`coordinator.joining.enrollment`).

Rules
- The URI in the verified certificate is the identity. The frames of a connection are valid for that node only.
- A peer without a certificate must enrol within 5 s and 16 KiB. Only enrolment frames are decoded for such a peer. Only
  the wait for a person's approval may take longer.
- A node has budgets (`link_budgets`) for its frames, reports, renewals and links. A link that exceeds them ends with
  the reason.
- The newest connection of a node wins. A second link of the same agent instance with `takeover` leaves the first open,
  until the node closes the first or opens a third.
"""

import asyncio
import itertools
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Protocol, cast

import structlog

from coordinator.cluster.link_budgets import NodeBudgets
from coordinator.joining.enrollment import EnrollmentConnection
from wire.certificate import read_certificate
from wire.codec import MAX_JOINED_FROM_NODE_BYTES, WireError, decode
from wire.frames import (
    Admitted,
    Deltas,
    Denied,
    Enrolled,
    Failed,
    FetchChunk,
    FetchRequest,
    Finished,
    Frame,
    Goodbye,
    Hello,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    MemberQuery,
    Ping,
    Refusal,
    RenewCertificate,
    Report,
    Welcome,
)
from wire.identity import NodeId, PeerIdentity, parse_uri
from wire.link.endpoint import LinkEndpoint

HANDSHAKE_TIMEOUT_SECONDS = 5.0
MAX_LINK_TURN_SECONDS = 0.005
"""Maximum seconds in one turn of the loop for frames of one link. The last frame may exceed them."""
UNLINKED_TIMEOUT_SECONDS = 5.0
MAX_UNLINKED_BYTES = 16 * 1024
CLOSE_DELAY_SECONDS = 0.5
"""Seconds for which a flooding link stays open without reads, to let its node receive the reason."""
BUDGET_RETRY_SECONDS = 5.0
"""Seconds of `retry_after` for a node that exceeded a budget."""
MAX_UNLINKED = 64
"""Maximum connections without a certificate; a quarter of them from one address.

A peer with a certificate of the cluster does not count. Peers without one therefore cannot exclude a node, even a node
behind the same address.
"""
FROM_NODES = frozenset(
    {
        Report,
        Goodbye,
        RenewCertificate,
        FetchChunk,
        Admitted,
        Deltas,
        Finished,
        Refusal,
        Failed,
        LeaseGranted,
        LeaseRefused,
        LeaseEnded,
    }
)
"""Frames that a linked node may send."""
PING_TIMEOUT_SECONDS = 1.0
FETCH_WINDOW_BYTES = 1024 * 1024
"""Maximum bytes that one `FetchRequest` asks for. A longer answer needs several."""
MIN_CHUNK_BYTES = 4096
"""Minimum bytes of an answer's pieces, except the last piece of a window. Limits the number of pieces."""
QUERY_CHUNK_BYTES = 32 * 1024
"""Bytes of one piece of the answer to a query."""
FETCH_TIMEOUT_SECONDS = 10.0
"""Maximum seconds between two pieces of an answer."""

log = structlog.get_logger("coordinator.cluster.link_server")


class LinkHandler(Protocol):
    """Callbacks of the link server, implemented by the registry."""

    def authorize(self, peer: PeerIdentity, serial: str, hello: Hello) -> Welcome | Denied:
        """Return `Welcome` if a node with this certificate may link, else `Denied` with the reason."""
        ...

    def answer_query(self, peer: PeerIdentity, serial: str, query: MemberQuery) -> bytes | Denied:
        """Return the answer to a member's query as JSON, or `Denied` with the reason."""
        ...

    def on_link_up(self, node: NodeId, hello: Hello) -> int:
        """Record a new link of a node and return its sequence number."""
        ...

    def on_link_down(self, node: NodeId, number: int, reason: str) -> None:
        """Record the end of the link `number` of a node."""
        ...

    def handle_frame(self, node: NodeId, number: int, frame: Frame) -> None:
        """Handle a frame of the link `number` of a node."""
        ...

    def start_enrollment(self, address: str) -> EnrollmentConnection | Denied:
        """Begin an enrolment of a peer without a certificate. Return `Denied` with the reason if that is refused."""
        ...

    async def wait_stored(self) -> None:
        """Wait until all changes so far are on disk. Raise `StoreError` if a write failed."""
        ...


class Connection(LinkEndpoint):
    """Accepted connection of a peer. It becomes the link of a node when its Hello is answered with Welcome."""

    def __init__(self, server: "LinkServer") -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(self._loop, MAX_JOINED_FROM_NODE_BYTES)
        self._server = server
        self._enrollment: EnrollmentConnection | None = None
        self._unlinked_bytes = 0
        self._deadline: asyncio.TimerHandle | None = self._loop.call_later(
            HANDSHAKE_TIMEOUT_SECONDS + 1, _log_no_handshake
        )
        self.address = ""
        self.peer: PeerIdentity | None = None
        self.serial = ""
        self.certificate_validity = (0.0, 0.0)
        """Validity of the peer's certificate: issued and expires, in Unix seconds."""
        self.node: NodeId | None = None
        self.number = 0
        self.hello: Hello | None = None
        self.budgets: NodeBudgets | None = None
        self._refused = False
        self._frames: Iterator[tuple[int, bytes]] = iter(())
        self._frames_paused = False
        self._turn_deadline = 0.0

    def opened(self) -> None:
        """Read the peer's identity from its certificate and start the deadline for Hello."""
        assert self.transport is not None  # noqa: S101  set by connection_made
        if self._deadline is not None:
            self._deadline.cancel()
        self.address = (self.transport.get_extra_info("peername") or ("?",))[0]
        tls: ssl.SSLObject | None = self.transport.get_extra_info("ssl_object")
        certificate = tls.getpeercert(True) if tls else None
        if certificate:
            known = read_certificate(certificate)
            self.peer, self.serial, self.certificate_validity = (
                parse_uri(known.uri),
                known.serial,
                (known.issued, known.expires),
            )
        self._deadline = self._loop.call_later(UNLINKED_TIMEOUT_SECONDS, self._abort_too_slow)
        if self._server.admit_connection(self) and not certificate:
            self._start_enrollment()

    def _abort_too_slow(self) -> None:
        self.abort(f"no Hello within {UNLINKED_TIMEOUT_SECONDS:.0f} s")

    def data_received(self, data: bytes) -> None:
        """Split bytes into frames and process them. Bytes of a peer without a certificate go to its enrolment only.

        Abort the connection after too many bytes before Hello, and after an invalid frame.
        """
        if self._enrollment is not None:
            self._send_enrollment_frames(self._enrollment.feed(data, self._loop.time()))
            return
        if self.node is None:
            self._unlinked_bytes += len(data)
            if self._unlinked_bytes > MAX_UNLINKED_BYTES:
                self.abort(f"more than {MAX_UNLINKED_BYTES} bytes before a Hello")
                return
        frames = self._splitter.feed(data)
        if self._frames_paused:
            self._frames = itertools.chain(self._frames, frames)
        else:
            self._frames = frames
            self._process_frames()

    def _process_frames(self, *, all_of_them: bool = False) -> None:
        """Process frames for `MAX_LINK_TURN_SECONDS`, and the rest in the next turn of the loop.

        A peer that sends without pause can delay the loop by one frame at most. Its further bytes wait in the kernel.
        """
        if not self._turn_deadline:  # a turn of the loop may read one connection 32 times
            self._turn_deadline = time.perf_counter() + MAX_LINK_TURN_SECONDS
            self._loop.call_soon(self._end_turn)
        self._frames_paused = False
        try:
            for tag, body in self._frames:
                self.received(tag, body)
                if time.perf_counter() > self._turn_deadline and not self._refused and self.open and not all_of_them:
                    self._pause_frames()
                    return
        except WireError as error:
            self.abort(f"the peer sent a {error}")

    def _pause_frames(self) -> None:
        assert self.transport is not None  # noqa: S101  it has just received
        self._frames_paused = True
        self.transport.pause_reading()

    def _end_turn(self) -> None:
        self._turn_deadline = 0.0
        if not self._frames_paused or not self.open:
            return
        self._process_frames()
        if not self._frames_paused and not self._refused and self.open and self.transport is not None:
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Process the frames that arrived before the peer closed the connection, then handle its end."""
        if self._frames_paused and not self._reason:
            self._process_frames(all_of_them=True)
        super().connection_lost(exc)

    def received(self, tag: int, body: bytes) -> None:
        """Process one frame: Hello or MemberQuery on a new connection, a frame of `FROM_NODES` on a link.

        Raise `WireError` for an invalid frame and for any other frame. A link over its budget is closed.
        """
        if self._refused:
            return
        if self.node is not None and self.budgets is not None:
            why = self.budgets.charge_frame(tag, len(body), self._loop.time())
            if why:
                self._end_flood(why)
                return
            frame = decode(tag, body)
            if type(frame) not in FROM_NODES:
                raise WireError(f"{type(frame).__name__}, which no node sends here")
            self._server.deliver_frame(self, frame)
            return
        first = decode(tag, body)
        if isinstance(first, MemberQuery) and self.peer is not None and self.peer.node is not None:
            self._server.answer_query(self, self.peer, first)
            return
        if not isinstance(first, Hello):
            raise WireError(f"{type(first).__name__} before Hello")
        if self.peer is None or self.peer.node is None:
            raise WireError("certificate that names no node")
        self._server.answer_hello(self, self.peer, first)

    def _start_enrollment(self) -> None:
        enrollment = self._server.handler.start_enrollment(self.address)
        if isinstance(enrollment, Denied):
            self.refuse(enrollment)
            return
        self._enrollment = enrollment
        enrollment.wake = lambda: self._loop.call_soon(self._poll_enrollment) and None
        self._send_enrollment_frames([])

    def _poll_enrollment(self) -> None:
        if self._enrollment is not None and self.open:
            self._send_enrollment_frames(self._enrollment.poll(self._loop.time()))

    def _send_enrollment_frames(self, frames: list[Frame]) -> None:
        """Send frames of the enrolment. A certificate is sent only after its record is on disk."""
        if any(isinstance(frame, Enrolled) for frame in frames):
            self._server.call_when_stored(lambda: self._send_frames_now(frames))
        else:
            self._send_frames_now(frames)

    def _send_frames_now(self, frames: list[Frame]) -> None:
        assert self._enrollment is not None  # noqa: S101  the callers have one
        for frame in frames:
            self.send(frame)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._enrollment.closed:
            self.close("the enrolment ended")
        else:
            self._deadline = self._loop.call_at(self._enrollment.deadline, self._poll_enrollment)

    def send_answer(self, payload: bytes) -> None:
        """Send the answer to a query in pieces, and close the connection."""
        self._refused = True
        for begin in range(0, max(1, len(payload)), QUERY_CHUNK_BYTES):
            end = begin + QUERY_CHUNK_BYTES
            self.send(FetchChunk(0, payload[begin:end], last=end >= len(payload)))
        self.close("the query was answered")

    def refuse(self, denied: Denied) -> None:
        """Send the denial and close the connection."""
        log.warning("denied", peer=self.address, node=self.peer.node if self.peer else None, reason=denied.reason)
        self._refused = True
        self.send(denied)
        self.close(denied.message)

    def _end_flood(self, why: str) -> None:
        """End a flooding link: stop reading, and leave its node time to receive the reason."""
        log.warning("denied", peer=self.address, node=self.node, reason="too_many")
        self._refused = True
        if self.transport is not None:
            self.transport.pause_reading()
        self.send(Denied("too_many", why, retry_after=BUDGET_RETRY_SECONDS))
        self._loop.call_later(CLOSE_DELAY_SECONDS, self.close, why)

    def bind_link(self, node: NodeId, hello: Hello, number: int) -> None:
        """Make this connection the link `number` of a node."""
        self.node, self.hello, self.number = node, hello, number
        if self._deadline is not None:
            self._deadline.cancel()

    def lost(self, reason: str) -> None:
        """Cancel the deadline and the enrolment, and report the end of the connection to the server with its reason."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._enrollment is not None:
            self._enrollment.withdraw()
        self._server.on_connection_lost(self, reason)


class _FetchWindow:
    """Limits for one node's answer to one question: the requested bytes, and the pieces that they need."""

    def __init__(self, limit: int) -> None:
        self.queue: asyncio.Queue[FetchChunk] = asyncio.Queue()
        self._limit = limit
        self._bytes = limit
        self._pieces = limit // MIN_CHUNK_BYTES + 2

    def put(self, answer: FetchChunk) -> None:
        """Queue a piece. Raise `WireError`, which ends the link, if the answer exceeds the requested size."""
        self._bytes -= len(answer.payload)
        self._pieces -= 1
        if self._bytes < 0 or self._pieces < 0:
            raise WireError(f"longer answer than the {self._limit} bytes that it was asked for")
        self.queue.put_nowait(answer)


def _log_no_handshake() -> None:
    log.info("connection without link closed", reason="no TLS handshake")


class LinkServer:
    """Server for all links of nodes, on one event loop.

    `handler` decides which nodes may link, and handles their frames.
    """

    def __init__(self, handler: LinkHandler) -> None:
        self.handler = handler
        self._server: asyncio.Server | None = None
        self._unlinked: set[Connection] = set()
        self._links: dict[NodeId, Connection] = {}
        self._retired: set[Connection] = set()
        self._budgets: dict[NodeId, NodeBudgets] = {}
        self._nonces = itertools.count(1)
        self._fetches: dict[tuple[NodeId, int], _FetchWindow] = {}
        self._fetch_numbers = itertools.count(1)
        self._ping_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.made = self.denied = 0
        """Number of links established since the start; `denied`: number of Hellos denied."""

    async def start(self, host: str, port: int, context: ssl.SSLContext) -> int:
        """Listen for nodes with TLS and return the port. Raise `OSError` if the address cannot be used."""
        loop = asyncio.get_running_loop()
        server = self._server = await loop.create_server(
            lambda: cast("asyncio.Protocol", Connection(self)),
            host,
            port,
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_SECONDS,
            ssl_shutdown_timeout=1.0,
        )
        self._ping_timer = loop.call_later(PING_TIMEOUT_SECONDS, self._send_pings)
        return server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        if self._server is not None:
            self._server.close()
        for connection in [*self._unlinked, *self._links.values(), *self._retired]:
            connection.close("the coordinator stops")

    # -- connections --------------------------------------------------------------

    def call_when_stored(self, callback: Callable[[], None]) -> None:
        """Call `callback` once all changes so far are on disk. Do not call it if a write failed."""
        task = asyncio.get_running_loop().create_task(self.handler.wait_stored())
        self._tasks.add(task)

        def done(ended: asyncio.Task[None]) -> None:
            self._tasks.discard(ended)
            if not ended.cancelled() and ended.exception() is None:
                callback()
            elif not ended.cancelled():
                log.error("not stored", error=str(ended.exception()))

        task.add_done_callback(done)

    def admit_connection(self, connection: Connection) -> bool:
        """Count a new connection. Return False and abort the connection if there are too many without a certificate.

        A peer with a certificate is never limited here.
        """
        self._unlinked.add(connection)
        if connection.peer is not None:
            return True
        addresses = [one.address for one in self._unlinked if one.peer is None]
        here = addresses.count(connection.address)
        if len(addresses) > MAX_UNLINKED or here > MAX_UNLINKED // 4:
            connection.abort(f"{len(addresses)} strangers are connected, {here} from this address")
            return False
        return True

    def answer_hello(self, connection: Connection, peer: PeerIdentity, hello: Hello) -> None:
        """Answer a Hello with Welcome or Denied. After Welcome, the connection is the newest link of its node."""
        assert peer.node is not None  # noqa: S101  checked by the connection
        connection.budgets = self._budgets.setdefault(peer.node, NodeBudgets())
        why = connection.budgets.charge_link(asyncio.get_running_loop().time())
        if why:
            self.denied += 1
            connection.refuse(Denied("too_many", why, retry_after=BUDGET_RETRY_SECONDS))
            return
        answer = self.handler.authorize(peer, connection.serial, hello)
        if isinstance(answer, Denied):
            self.denied += 1
            connection.refuse(answer)
            return
        self.made += 1
        node = NodeId(hello.node)
        self._unlinked.discard(connection)
        older = self._links.get(node)
        if older is not None:
            self._replace_link(older, hello)
        self._links[node] = connection
        connection.send(answer)
        connection.bind_link(node, hello, self.handler.on_link_up(node, hello))

    def answer_query(self, connection: Connection, peer: PeerIdentity, query: MemberQuery) -> None:
        """Answer the query of a command that uses its node's certificate `peer`. The node's link is unaffected."""
        assert peer.node is not None  # noqa: S101  checked by the connection
        why = self._budgets.setdefault(peer.node, NodeBudgets()).charge_query(asyncio.get_running_loop().time())
        if why:
            connection.refuse(Denied("too_many", why, retry_after=BUDGET_RETRY_SECONDS))
            return
        answer = self.handler.answer_query(peer, connection.serial, query)
        if isinstance(answer, Denied):
            connection.refuse(answer)
        else:
            connection.send_answer(answer)

    def _replace_link(self, older: Connection, hello: Hello) -> None:
        same = older.hello is not None and older.hello.instance == hello.instance
        if same and hello.takeover:
            for retired in [one for one in self._retired if one.node == older.node]:
                retired.close("a third connection of the same node replaced this one")
            self._retired.add(older)
        else:
            del self._links[NodeId(hello.node)]
            older.close("a newer connection of the same node replaced this one")

    def on_connection_lost(self, connection: Connection, reason: str) -> None:
        """Remove a closed connection. If it was a link, report its end to the handler."""
        self._unlinked.discard(connection)
        self._retired.discard(connection)
        if connection.node is None:
            log.info("connection without link closed", peer=connection.address, reason=reason)
            return
        if self._links.get(connection.node) is connection:
            del self._links[connection.node]
        self.handler.on_link_down(connection.node, connection.number, reason)

    def deliver_frame(self, connection: Connection, frame: Frame) -> None:
        """Pass a `FetchChunk` to the fetch that waits for it, and any other frame to the handler."""
        assert connection.node is not None  # noqa: S101  only linked connections get here
        if type(frame) is FetchChunk:
            window = self._fetches.get((connection.node, frame.number))
            if window is not None:
                window.put(frame)
            return
        self.handler.handle_frame(connection.node, connection.number, frame)

    # -- for people -----------------------------------------------------------------

    def count_links(self) -> int:
        """Return the number of linked nodes."""
        return len(self._links)

    def count_unlinked(self) -> int:
        """Return the number of open connections that are not links (yet)."""
        return len(self._unlinked)

    @property
    def retired(self) -> int:
        """Number of open links that a newer link of the same node has replaced."""
        return len(self._retired)

    def get_certificate_validity(self) -> dict[NodeId, tuple[float, float]]:
        """Return the certificate validity of each linked node: issued and expires, in Unix seconds."""
        return {node: link.certificate_validity for node, link in self._links.items()}

    # -- towards the nodes -----------------------------------------------------------

    def send(self, node: NodeId, frame: Frame) -> bool:
        """Send a frame on the node's newest link. Return False if there is none or the link is closed."""
        link = self._links.get(node)
        return link is not None and link.send(frame)

    def get_address(self, node: NodeId) -> str:
        """Return the IP address of the peer of a node's newest link; empty if there is none."""
        link = self._links.get(node)
        return "" if link is None else link.address

    def get_hello(self, node: NodeId) -> Hello | None:
        """Return the Hello of a node's newest link; None if there is none."""
        link = self._links.get(node)
        return None if link is None else link.hello

    def disconnect_node(self, node: NodeId, reason: str, denied: Denied | None = None) -> None:
        """End every link of a node at once. Send `denied` first if given."""
        for link in [*self._links.values(), *self._retired]:
            if link.node == node:
                if denied is not None:
                    link.send(denied)
                    link.close(reason)
                else:
                    link.abort(reason)

    def close_link(self, node: NodeId, number: int, reason: str) -> None:
        """End the link `number` of a node at once, if it is open."""
        for link in [*self._links.values(), *self._retired]:
            if link.node == node and link.number == number:
                link.abort(reason)

    def _send_pings(self) -> None:
        loop = asyncio.get_running_loop()
        ping = Ping(next(self._nonces))
        for link in self._links.values():
            link.send(ping)
        self._ping_timer = loop.call_later(PING_TIMEOUT_SECONDS, self._send_pings)

    async def fetch_source(self, node: NodeId, source: str, max_bytes: int) -> AsyncGenerator[bytes]:
        """Yield the newest `max_bytes` bytes of a node's `source`, such as `logs`, as fast as the consumer reads.

        Raise `LookupError` if the node is not linked or cannot answer, `TimeoutError` if it stops answering.
        """
        offset, left = -max_bytes, max_bytes
        while left > 0:
            before = left
            async for answer in self._fetch_window(node, source, offset, min(left, FETCH_WINDOW_BYTES)):
                left -= len(answer.payload)
                offset = answer.next
                if answer.payload:
                    yield answer.payload
            if offset == 0 or left == before:  # an empty window is the end, whichever next offset the node sends
                return

    async def follow_source(
        self, node: NodeId, source: str, max_bytes: int, interval_seconds: float
    ) -> AsyncGenerator[bytes]:
        """Yield the newest `max_bytes` bytes of a node's `source`, then its additions, polled every `interval_seconds`.

        The iterator does not end. Raise `LookupError` and `TimeoutError` as `fetch_source`.
        """
        offset = -max_bytes
        while True:
            async for answer in self._fetch_window(node, source, offset, FETCH_WINDOW_BYTES):
                if answer.payload:
                    yield answer.payload
                if answer.last:
                    offset = answer.end
            await asyncio.sleep(interval_seconds)

    async def _fetch_window(self, node: NodeId, source: str, offset: int, max_bytes: int) -> AsyncIterator[FetchChunk]:
        number = next(self._fetch_numbers)
        window = self._fetches[node, number] = _FetchWindow(max_bytes)
        try:
            if not self.send(node, FetchRequest(number, source, offset, max_bytes)):
                raise LookupError("the node is not linked")
            last = False
            while not last:
                async with asyncio.timeout(FETCH_TIMEOUT_SECONDS):
                    answer = await window.queue.get()
                if answer.error:
                    raise LookupError(answer.error)
                last = answer.last
                yield answer
        finally:
            del self._fetches[node, number]

"""Connection of a peer to the cluster port: TLS identity, framing, enrollment, greeting, and the frames of a link.

Rules
- The URI in the verified certificate is the identity. The frames of a connection are valid for that node only.
- A peer without a certificate must enroll within 5 s and 16 KiB. Only enrollment frames are decoded for such a peer.
  Only the wait for a person's approval may take longer.
- A link that exceeds a budget of its node (`link_budgets`) ends with the reason.
"""

import asyncio
import itertools
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Protocol, cast

import structlog

from coordinator.cluster.links.link_budgets import BUDGET_RETRY_SECONDS, BUDGETED, NodeBudgets
from coordinator.joining.enrollment import EnrollmentConnection
from coordinator.state.store_errors import StoreError
from wire.certificate import read_certificate
from wire.codec import MAX_JOINED_FROM_NODE_BYTES, WireError, decode
from wire.frames import (
    Admitted,
    Deltas,
    Denied,
    Enrolled,
    Failed,
    FetchChunk,
    Finished,
    Frame,
    Goodbye,
    Hello,
    JoinRelay,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    MemberQuery,
    ModelOrderEnded,
    ModelOrderProgress,
    Refusal,
    RenewCertificate,
    Report,
    Vectors,
)
from wire.identity import NodeId, PeerIdentity, parse_uri
from wire.link.endpoint import LinkEndpoint

HANDSHAKE_TIMEOUT_SECONDS = 5.0
MAX_LINK_TURN_SECONDS = 0.005
"""Maximum seconds in one turn of the loop for frames of one link. The last frame may exceed this time."""
UNLINKED_TIMEOUT_SECONDS = 5.0
"""Maximum seconds from the TLS handshake to the first frame: a Hello, a query, or a request for a relay. An enrollment
has its own deadlines."""
MAX_UNLINKED_BYTES = 16 * 1024
"""Maximum bytes from a peer with a certificate before its Hello."""
CLOSE_DELAY_SECONDS = 0.5
"""Seconds for which a flooding link stays open without reads, so that its node can receive the reason."""
QUERY_CHUNK_BYTES = 32 * 1024
"""Maximum bytes of one piece of the answer to a query."""
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
        Vectors,
        LeaseGranted,
        LeaseRefused,
        LeaseEnded,
        ModelOrderProgress,
        ModelOrderEnded,
    }
)
"""Frames that a linked node may send. Any other frame ends the link."""

log = structlog.get_logger("coordinator.cluster.links.link_connection")


class ConnectionHandler(Protocol):
    """Functions of the link server that a connection uses."""

    def admit_connection(self, connection: "Connection") -> bool:
        """Count a new connection. Return False and abort the connection if there are too many without a certificate."""
        ...

    def start_enrollment(self, address: str, wake: Callable[[], object]) -> EnrollmentConnection | Denied:
        """Begin the enrollment of a peer without a certificate, at the IP address `address`, or return `Denied`.

        `wake` is called when `EnrollmentConnection.poll` has frames to send before the deadline.
        """
        ...

    def call_when_stored(self, callback: Callable[[], None], on_failure: Callable[[BaseException], None]) -> None:
        """Call `callback` once all earlier changes are on disk. If a write failed, call `on_failure` instead."""
        ...

    def answer_hello(self, connection: "Connection", peer: PeerIdentity, hello: Hello) -> None:
        """Answer a Hello with Welcome or Denied. After Welcome, the connection is the newest link of its node.

        Raise `IllegalEventError` if the node has left.
        """
        ...

    def answer_query(self, connection: "Connection", peer: PeerIdentity, query: MemberQuery) -> None:
        """Answer or refuse the query of a command on a node's machine. `peer` is the node's certified identity."""
        ...

    def deliver_chunk(self, node: NodeId, chunk: FetchChunk) -> None:
        """Process a piece of a node's answer to a fetch.

        Raise `WireError` if the answer has too many bytes or pieces.
        """
        ...

    def answer_relay(self, connection: "Connection", peer: PeerIdentity, join: JoinRelay) -> None:
        """Use a connection of `peer` for the transfer of model files that `join` names, or refuse the connection."""
        ...

    def on_connection_lost(self, connection: "Connection", reason: str) -> None:
        """Remove a connection that has ended for `reason`, a text for the log."""
        ...


class Connection(LinkEndpoint):
    """Accepted connection of a peer. It becomes the link of a node when its Hello is answered with Welcome."""

    def __init__(self, handler: ConnectionHandler) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(self._loop, MAX_JOINED_FROM_NODE_BYTES)
        self._handler = handler
        self._enrollment: EnrollmentConnection | None = None
        self._unlinked_bytes = 0
        self._deadline: asyncio.TimerHandle | None = self._loop.call_later(
            HANDSHAKE_TIMEOUT_SECONDS + 1, _log_no_handshake
        )
        self.address = ""
        """IP address of the peer; empty before `on_opened`, `?` if unknown."""
        self.peer: PeerIdentity | None = None
        """Identity in the peer's certificate; None without a certificate."""
        self.serial = ""
        """Serial number (hex) of the peer's certificate; empty without a certificate."""
        self.certificate_validity = (0.0, 0.0)
        """Validity of the peer's certificate: issued and expires, in Unix seconds; zeros without a certificate."""
        self.node: NodeId | None = None
        """Node whose link this is; None before its Welcome."""
        self.number = 0
        """Sequence number of the link among all links since the coordinator started; 0 before the Welcome."""
        self.hello: Hello | None = None
        """Hello that was answered with the Welcome; None before."""
        self.budgets: NodeBudgets | None = None
        """Limits for the frames of the node whose link this is; None before its Welcome."""
        self._deliver = _discard_frame
        self._refused = False
        self._frames: Iterator[tuple[int, bytes]] = iter(())
        self._frames_paused = False
        self._turn_deadline = 0.0

    def on_opened(self) -> None:
        """Read the peer's identity from its certificate and start the deadline for Hello.

        Begin the enrollment if the peer has no certificate and the server admits the connection.
        """
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
        if self._handler.admit_connection(self) and not certificate:
            self._start_enrollment()

    def _abort_too_slow(self) -> None:
        self.abort(f"no Hello within {UNLINKED_TIMEOUT_SECONDS:.0f} s")

    def data_received(self, data: bytes) -> None:
        """Split bytes into frames and process them. Bytes of a peer without a certificate go only to its enrollment.

        Abort the connection after too many bytes before the Hello, or after an invalid frame. Raise `IllegalEventError`
        for the Hello of a node that has left.
        """
        enrollment = self._enrollment
        if enrollment is not None:
            if not enrollment.closed:  # else its last frames wait for the disk
                self._advance_enrollment(lambda: enrollment.feed(data, self._loop.time()))
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

        A peer that sends without pause can delay the loop by that time and one frame at most. Its further bytes wait in
        the kernel. With `all_of_them`, process all frames now.
        """
        if not self._turn_deadline:  # a turn of the loop may read one connection 32 times
            self._turn_deadline = time.perf_counter() + MAX_LINK_TURN_SECONDS
            self._loop.call_soon(self._end_turn)
        self._frames_paused = False
        try:
            for tag, body in self._frames:
                self.on_frame(tag, body)
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

    def on_frame(self, tag: int, body: bytes) -> None:
        """Process one frame: Hello, MemberQuery or JoinRelay on a new connection, a frame of `FROM_NODES` on a link.

        Raise `WireError` for an invalid or any other frame, and for a Hello if the certificate names no node. Raise
        `IllegalEventError` for the Hello of a node that has left. Close a link that is over its budget. Ignore frames
        after the connection was refused or answered.
        """
        if self._refused:
            return
        node, budgets = self.node, self.budgets
        if node is None or budgets is None:
            self._process_first_frame(tag, body)
            return
        now = self._loop.time()
        why = budgets.charge_frame(tag, len(body), now) if tag in BUDGETED else budgets.frames.charge(now)
        if why:
            self._end_flood(why)
            return
        frame = decode(tag, body)
        kind = type(frame)
        if kind not in FROM_NODES:
            raise WireError(f"{kind.__name__}, which no node sends here")
        if isinstance(frame, FetchChunk):
            self._handler.deliver_chunk(node, frame)
        else:
            self._deliver(node, self.number, frame)

    def _process_first_frame(self, tag: int, body: bytes) -> None:
        first = decode(tag, body)
        if isinstance(first, MemberQuery) and self.peer is not None and self.peer.node is not None:
            self._handler.answer_query(self, self.peer, first)
            return
        if isinstance(first, JoinRelay) and self.peer is not None and self.peer.node is not None:
            self._handler.answer_relay(self, self.peer, first)
            return
        if not isinstance(first, Hello):
            raise WireError(f"{type(first).__name__} before Hello")
        if self.peer is None or self.peer.node is None:
            raise WireError("certificate that names no node")
        self._handler.answer_hello(self, self.peer, first)

    def _start_enrollment(self) -> None:
        enrollment = self._handler.start_enrollment(self.address, self._wake_enrollment)
        if isinstance(enrollment, Denied):
            self.refuse(enrollment)
            return
        self._enrollment = enrollment
        self._send_enrollment_frames([])

    def _wake_enrollment(self) -> None:
        self._loop.call_soon(self._poll_enrollment)

    def _poll_enrollment(self) -> None:
        enrollment = self._enrollment
        if enrollment is not None and not enrollment.closed and self.open:
            self._advance_enrollment(lambda: enrollment.poll(self._loop.time()))

    def _advance_enrollment(self, step: Callable[[], list[Frame]]) -> None:
        """Send the frames that a step of the enrollment returns. Refuse the peer if the step cannot be stored."""
        try:
            frames = step()
        except StoreError as error:
            self._refuse_unstored(error)
        else:
            self._send_enrollment_frames(frames)

    def _send_enrollment_frames(self, frames: list[Frame]) -> None:
        """Send frames of the enrollment. A certificate is sent only after its record is on disk."""
        if any(isinstance(frame, Enrolled) for frame in frames):
            self._handler.call_when_stored(lambda: self._send_frames_now(frames), self._refuse_unstored)
        else:
            self._send_frames_now(frames)

    def _refuse_unstored(self, error: BaseException) -> None:
        self.refuse(Denied("storage_failed", f"the coordinator cannot store a new member: {error}"))

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

    def release(self) -> asyncio.Transport:
        """Return the transport, for use by another protocol. This connection then ignores all events."""
        self._refused = True
        if self._deadline is not None:
            self._deadline.cancel()
        return cast("asyncio.Transport", self.transport)

    def refuse(self, denied: Denied) -> None:
        """Log and send the denial, and close the connection. Ignore further frames."""
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

    def bind_link(
        self,
        node: NodeId,
        hello: Hello,
        number: int,
        budgets: NodeBudgets,
        deliver: Callable[[NodeId, int, Frame], None],
    ) -> None:
        """Make this connection the link `number` of a node, within the budgets of that node.

        `deliver` is called with node, number and each frame, except the chunks of fetches.
        """
        self.node, self.hello, self.number, self.budgets, self._deliver = node, hello, number, budgets, deliver
        if self._deadline is not None:
            self._deadline.cancel()

    def on_lost(self, reason: str) -> None:
        """Cancel the deadline and the enrollment, and report the end of the connection and its reason to the server."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._enrollment is not None:
            self._enrollment.withdraw()
        self._handler.on_connection_lost(self, reason)


def _discard_frame(_: NodeId, __: int, ___: Frame) -> None:
    """Discard a frame, before the connection is a link."""


def _log_no_handshake() -> None:
    log.info("connection without link closed", reason="no TLS handshake")

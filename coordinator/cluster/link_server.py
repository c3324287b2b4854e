"""The link server: the one port that nodes dial.

Covers: TLS, enrolment of peers without a certificate, the greeting of peers with one, framing both ways, newest wins,
second links that take over, pings, questions to nodes, limits on strangers.
Does not cover: the states of a node (`membership`), the effects of its frames (`router.dispatch.dispatcher`) and
enrollment (`coordinator.joining.enrollment`).

Rules
- Identity is the URI in the verified certificate, and the frames of a connection speak for that node only.
- A peer without a certificate gets STRANGER_SECONDS and STRANGER_BYTES to enrol; nothing but enrolment frames is
  decoded for it. Waiting for a person's approval is the only thing that may take longer.
- A node has budgets (`budgets`) for its frames, reports, renewals and links; beyond them its link ends with the reason.
- The newest connection of a node wins. Only a second link of the same agent instance that says so leaves the first
  open, until the node closes it or makes a third.
"""

import asyncio
import itertools
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Protocol, cast

import structlog

from coordinator.cluster.link_budgets import NodeBudgets
from coordinator.joining.enrollment import Conversation
from wire.certificate import read_certificate
from wire.codec import MAX_JOINED_FROM_NODE_BYTES, WireError, decode
from wire.frames import (
    Admitted,
    Answer,
    Ask,
    Deltas,
    Denied,
    Enrolled,
    Failed,
    Finished,
    Frame,
    Goodbye,
    Hello,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    Ping,
    Query,
    Refusal,
    Renew,
    Report,
    Welcome,
)
from wire.identity import NodeId, Peer, parse_uri
from wire.link.endpoint import Endpoint

HANDSHAKE_SECONDS = 5.0
TURN_SECONDS = 0.005
"""Longest time in one turn of the loop for which frames of a link are taken, apart from the last one."""
STRANGER_SECONDS = 5.0
STRANGER_BYTES = 16 * 1024
LAST_WORD_SECONDS = 0.5
"""Seconds for which a link that floods stays open, unread, so that its node reads why it ends."""
TOO_MANY_SECONDS = 5.0
"""Seconds that a node is asked to wait that sent too much."""
STRANGERS = 64
"""Connections without a certificate; a quarter of it from one address. Who shows one of ours is never turned away here,
so a crowd of strangers cannot keep a node out, not even one behind the same address."""
FROM_NODES = frozenset({Report, Goodbye, Renew, Answer, Admitted, Deltas, Finished, Refusal, Failed, LeaseGranted,
                        LeaseRefused, LeaseEnded})  # fmt: skip
"""What a linked node may send."""
PING_SECONDS = 1.0
ASK_WINDOW = 1024 * 1024
"""Bytes of a long answer that are under way at one time."""
MIN_PIECE_BYTES = 4096
"""Usual size of an answer's pieces, at least; the last of a window may be shorter."""
ANSWER_PIECE_BYTES = 32 * 1024
"""Bytes of one piece of the answer to a query."""
ASK_SECONDS = 10.0
"""Longest silence between two pieces of an answer."""

log = structlog.get_logger("coordinator.cluster.link_server")


class Owner(Protocol):
    """What the registry decides for the link server."""

    def greet(self, peer: Peer, serial: str, hello: Hello) -> Welcome | Denied:
        """Say whether this node may link."""
        ...

    def answer(self, peer: Peer, serial: str, query: Query) -> bytes | Denied:
        """Return what a member may read (JSON), or why not."""
        ...

    def linked(self, node: NodeId, hello: Hello) -> int:
        """The node's newest link is up; give it a number."""
        ...

    def unlinked(self, node: NodeId, number: int, reason: str) -> None:
        """A link ended."""
        ...

    def received(self, node: NodeId, number: int, frame: Frame) -> None:
        """Take a frame of a linked node."""
        ...

    def converse(self, address: str) -> Conversation | Denied:
        """Begin an enrolment, or say why not now."""
        ...

    async def stored(self) -> None:
        """Wait until every change so far is on the disk."""
        ...


class Connection(Endpoint):
    """One accepted connection: a stranger until its Hello was answered with Welcome."""

    def __init__(self, server: "LinkServer") -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(self._loop, MAX_JOINED_FROM_NODE_BYTES)
        self._server = server
        self._conversation: Conversation | None = None
        self._bytes = 0
        self._deadline: asyncio.TimerHandle | None = self._loop.call_later(HANDSHAKE_SECONDS + 1, _no_handshake)
        self.address = ""
        self.peer: Peer | None = None
        self.serial = ""
        self.life = (0.0, 0.0)
        """Of its certificate: issued and expires, in Unix seconds."""
        self.node: NodeId | None = None
        self.number = 0
        self.hello: Hello | None = None
        self.budgets: NodeBudgets | None = None
        self._refused = False
        self._frames: Iterator[tuple[int, bytes]] = iter(())
        self._resting = False
        self._until = 0.0

    def opened(self) -> None:
        """Read who it is from the certificate and start the stranger's clock."""
        assert self.transport is not None  # noqa: S101  set by connection_made
        if self._deadline is not None:
            self._deadline.cancel()
        self.address = (self.transport.get_extra_info("peername") or ("?",))[0]
        tls: ssl.SSLObject | None = self.transport.get_extra_info("ssl_object")
        certificate = tls.getpeercert(True) if tls else None
        if certificate:
            known = read_certificate(certificate)
            self.peer, self.serial, self.life = parse_uri(known.uri), known.serial, (known.issued, known.expires)
        self._deadline = self._loop.call_later(STRANGER_SECONDS, self._too_slow)
        if self._server.arrived(self) and not certificate:
            self._begin_enrolment()

    def _too_slow(self) -> None:
        self.abort(f"no Hello within {STRANGER_SECONDS:.0f} s")

    def data_received(self, data: bytes) -> None:
        """Count a stranger's bytes before they are read; what has no certificate can only enrol."""
        if self._conversation is not None:
            self._converse(self._conversation.feed(data, self._loop.time()))
            return
        if self.node is None:
            self._bytes += len(data)
            if self._bytes > STRANGER_BYTES:
                self.abort(f"more than {STRANGER_BYTES} bytes before a Hello")
                return
        frames = self._splitter.feed(data)
        if self._resting:
            self._frames = itertools.chain(self._frames, frames)
        else:
            self._frames = frames
            self._take_frames()

    def _take_frames(self, *, all_of_them: bool = False) -> None:
        """Take frames for TURN_SECONDS of this turn of the loop, and the rest in the next turn: a peer that sends
        without end holds the loop for one frame more at most, and its bytes wait in the kernel."""
        if not self._until:  # a turn of the loop may read one connection 32 times
            self._until = time.perf_counter() + TURN_SECONDS
            self._loop.call_soon(self._end_turn)
        self._resting = False
        try:
            for tag, body in self._frames:
                self.received(tag, body)
                if time.perf_counter() > self._until and not self._refused and self.open and not all_of_them:
                    self._rest()
                    return
        except WireError as error:
            self.abort(f"the peer sent a {error}")

    def _rest(self) -> None:
        assert self.transport is not None  # noqa: S101  it has just received
        self._resting = True
        self.transport.pause_reading()

    def _end_turn(self) -> None:
        self._until = 0.0
        if not self._resting or not self.open:
            return
        self._take_frames()
        if not self._resting and not self._refused and self.open and self.transport is not None:
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take the frames that had arrived before the peer closed the connection."""
        if self._resting and not self._reason:
            self._take_frames(all_of_them=True)
        super().connection_lost(exc)

    def received(self, tag: int, body: bytes) -> None:
        """Greet, or hand on."""
        if self._refused:
            return
        if self.node is not None and self.budgets is not None:
            why = self.budgets.frame(tag, len(body), self._loop.time())
            if why:
                self._stem(why)
                return
            frame = decode(tag, body)
            if type(frame) not in FROM_NODES:
                raise WireError(f"{type(frame).__name__}, which no node sends here")
            self._server.take(self, frame)
            return
        hello = decode(tag, body)
        if isinstance(hello, Query) and self.peer is not None and self.peer.node is not None:
            self._server.query(self, self.peer, hello)
            return
        if not isinstance(hello, Hello):
            raise WireError(f"{type(hello).__name__} before Hello")
        if self.peer is None or self.peer.node is None:
            raise WireError("certificate that names no node")
        self._server.greet(self, self.peer, hello)

    def _begin_enrolment(self) -> None:
        begun = self._server.owner.converse(self.address)
        if isinstance(begun, Denied):
            self.refuse(begun)
            return
        self._conversation = begun
        begun.wake = lambda: self._loop.call_soon(self._poll) and None
        self._converse([])

    def _poll(self) -> None:
        if self._conversation is not None and self.open:
            self._converse(self._conversation.poll(self._loop.time()))

    def _converse(self, frames: list[Frame]) -> None:
        """Send what the conversation says. A certificate leaves only when what made it is on the disk."""
        if any(isinstance(frame, Enrolled) for frame in frames):
            self._server.when_stored(lambda: self._say(frames))
        else:
            self._say(frames)

    def _say(self, frames: list[Frame]) -> None:
        assert self._conversation is not None  # noqa: S101  the callers have one
        for frame in frames:
            self.send(frame)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._conversation.closed:
            self.close("the enrolment ended")
        else:
            self._deadline = self._loop.call_at(self._conversation.deadline, self._poll)

    def answer(self, payload: bytes) -> None:
        """Send the answer to a query, and close."""
        self._refused = True
        for begin in range(0, max(1, len(payload)), ANSWER_PIECE_BYTES):
            end = begin + ANSWER_PIECE_BYTES
            self.send(Answer(0, payload[begin:end], last=end >= len(payload)))
        self.close("the query was answered")

    def refuse(self, denied: Denied) -> None:
        """Say no and hang up."""
        log.warning("denied", peer=self.address, node=self.peer.node if self.peer else None, reason=denied.reason)
        self._refused = True
        self.send(denied)
        self.close(denied.message)

    def _stem(self, why: str) -> None:
        """End a link that floods: read no more of it, and leave its node the time to read why."""
        log.warning("denied", peer=self.address, node=self.node, reason="too_many")
        self._refused = True
        if self.transport is not None:
            self.transport.pause_reading()
        self.send(Denied("too_many", why, retry_after=TOO_MANY_SECONDS))
        self._loop.call_later(LAST_WORD_SECONDS, self.close, why)

    def welcomed(self, node: NodeId, hello: Hello, number: int) -> None:
        """Become a node's link."""
        self.node, self.hello, self.number = node, hello, number
        if self._deadline is not None:
            self._deadline.cancel()

    def lost(self, reason: str) -> None:
        """Tell the server."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._conversation is not None:
            self._conversation.gone()
        self._server.gone(self, reason)


class _Window:
    """What one node may answer to one question: no more bytes than were asked for, in no more pieces than they take."""

    def __init__(self, limit: int) -> None:
        self.queue: asyncio.Queue[Answer] = asyncio.Queue()
        self._limit = limit
        self._bytes = limit
        self._pieces = limit // MIN_PIECE_BYTES + 2

    def take(self, answer: Answer) -> None:
        """Queue a piece. WireError, which ends the link, when it is more than was asked for."""
        self._bytes -= len(answer.payload)
        self._pieces -= 1
        if self._bytes < 0 or self._pieces < 0:
            raise WireError(f"longer answer than the {self._limit} bytes that it was asked for")
        self.queue.put_nowait(answer)


def _no_handshake() -> None:
    log.info("stranger gone", reason="no TLS handshake")


class LinkServer:
    """All links. Everything happens on one loop; `owner` decides, this class connects."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self._server: asyncio.Server | None = None
        self._strangers: set[Connection] = set()
        self._links: dict[NodeId, Connection] = {}
        self._retired: set[Connection] = set()
        self._budgets: dict[NodeId, NodeBudgets] = {}
        self._nonces = itertools.count(1)
        self._asks: dict[tuple[NodeId, int], _Window] = {}
        self._ask_numbers = itertools.count(1)
        self._ping_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.made = self.denied = 0
        """Links that were made, and nodes that were turned away."""

    async def start(self, host: str, port: int, context: ssl.SSLContext) -> int:
        """Listen; give the port. OSError when the address is taken."""
        loop = asyncio.get_running_loop()
        server = self._server = await loop.create_server(
            lambda: cast("asyncio.Protocol", Connection(self)),
            host,
            port,
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=1.0,
        )
        self._ping_timer = loop.call_later(PING_SECONDS, self._ping)
        return server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and hang up on everybody."""
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        if self._server is not None:
            self._server.close()
        for connection in [*self._strangers, *self._links.values(), *self._retired]:
            connection.close("the coordinator stops")

    # -- connections --------------------------------------------------------------

    def when_stored(self, then: Callable[[], None]) -> None:
        """Call `then` when every change so far is on the disk; never when it could not be written."""
        task = asyncio.get_running_loop().create_task(self.owner.stored())
        self._tasks.add(task)

        def done(ended: asyncio.Task[None]) -> None:
            self._tasks.discard(ended)
            if not ended.cancelled() and ended.exception() is None:
                then()
            elif not ended.cancelled():
                log.error("not stored", error=str(ended.exception()))

        task.add_done_callback(done)

    def arrived(self, connection: Connection) -> bool:
        """Count who has no certificate; too many, or too many from one address, are turned away (False)."""
        self._strangers.add(connection)
        addresses = [stranger.address for stranger in self._strangers if stranger.peer is None]
        here = addresses.count(connection.address)
        if len(addresses) > STRANGERS or here > STRANGERS // 4:
            connection.abort(f"{len(addresses)} strangers are connected, {here} from this address")
            return False
        return True

    def greet(self, connection: Connection, peer: Peer, hello: Hello) -> None:
        """Answer a Hello."""
        assert peer.node is not None  # noqa: S101  checked by the connection
        connection.budgets = self._budgets.setdefault(peer.node, NodeBudgets())
        why = connection.budgets.link(asyncio.get_running_loop().time())
        if why:
            self.denied += 1
            connection.refuse(Denied("too_many", why, retry_after=TOO_MANY_SECONDS))
            return
        answer = self.owner.greet(peer, connection.serial, hello)
        if isinstance(answer, Denied):
            self.denied += 1
            connection.refuse(answer)
            return
        self.made += 1
        node = NodeId(hello.node)
        self._strangers.discard(connection)
        older = self._links.get(node)
        if older is not None:
            self._replace(older, hello)
        self._links[node] = connection
        connection.send(answer)
        connection.welcomed(node, hello, self.owner.linked(node, hello))

    def query(self, connection: Connection, peer: Peer, query: Query) -> None:
        """Answer a query of a member's command, which reads and changes nothing; its node's link stays as it is."""
        assert peer.node is not None  # noqa: S101  checked by the connection
        why = self._budgets.setdefault(peer.node, NodeBudgets()).query(asyncio.get_running_loop().time())
        if why:
            connection.refuse(Denied("too_many", why, retry_after=TOO_MANY_SECONDS))
            return
        answer = self.owner.answer(peer, connection.serial, query)
        if isinstance(answer, Denied):
            connection.refuse(answer)
        else:
            connection.answer(answer)

    def _replace(self, older: Connection, hello: Hello) -> None:
        same = older.hello is not None and older.hello.instance == hello.instance
        if same and hello.takeover:
            for retired in [one for one in self._retired if one.node == older.node]:
                retired.close("a third connection of the same node replaced this one")
            self._retired.add(older)
        else:
            del self._links[NodeId(hello.node)]
            older.close("a newer connection of the same node replaced this one")

    def gone(self, connection: Connection, reason: str) -> None:
        """A connection ended."""
        self._strangers.discard(connection)
        self._retired.discard(connection)
        if connection.node is None:
            log.info("stranger gone", peer=connection.address, reason=reason)
            return
        if self._links.get(connection.node) is connection:
            del self._links[connection.node]
        self.owner.unlinked(connection.node, connection.number, reason)

    def take(self, connection: Connection, frame: Frame) -> None:
        """Take a node's frame: answers are delivered here, the rest is the owner's."""
        assert connection.node is not None  # noqa: S101  only linked connections get here
        if type(frame) is Answer:
            window = self._asks.get((connection.node, frame.ask))
            if window is not None:
                window.take(frame)
            return
        self.owner.received(connection.node, connection.number, frame)

    # -- for people -----------------------------------------------------------------

    def open(self) -> int:
        """Give how many nodes are linked."""
        return len(self._links)

    def strangers(self) -> int:
        """Give how many connections are no links (yet)."""
        return len(self._strangers)

    @property
    def retired(self) -> int:
        """Number of links that a newer one of the same node has replaced and that have not ended."""
        return len(self._retired)

    def lives(self) -> dict[NodeId, tuple[float, float]]:
        """Give begin and end of the certificate that each linked node showed, in Unix seconds."""
        return {node: link.life for node, link in self._links.items()}

    # -- towards the nodes -----------------------------------------------------------

    def send(self, node: NodeId, frame: Frame) -> bool:
        """Send on the node's newest link; False when there is none."""
        link = self._links.get(node)
        return link is not None and link.send(frame)

    def address(self, node: NodeId) -> str:
        """Give the address from which a node dialed its newest link; empty when there is none."""
        link = self._links.get(node)
        return "" if link is None else link.address

    def hello(self, node: NodeId) -> Hello | None:
        """Return what a node said on its newest link; None when there is none."""
        link = self._links.get(node)
        return None if link is None else link.hello

    def hang_up(self, node: NodeId, reason: str, denied: Denied | None = None) -> None:
        """End every link of a node at once, telling it why when there is a reason that it should know."""
        for link in [*self._links.values(), *self._retired]:
            if link.node == node:
                if denied is not None:
                    link.send(denied)
                    link.close(reason)
                else:
                    link.abort(reason)

    def close_link(self, node: NodeId, number: int, reason: str) -> None:
        """End one link at once."""
        for link in [*self._links.values(), *self._retired]:
            if link.node == node and link.number == number:
                link.abort(reason)

    def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        ping = Ping(next(self._nonces))
        for link in self._links.values():
            link.send(ping)
        self._ping_timer = loop.call_later(PING_SECONDS, self._ping)

    async def ask(self, node: NodeId, what: str, limit: int) -> AsyncGenerator[bytes]:
        """Yield the newest `limit` bytes of what a node is asked for, window by window, as fast as they are taken.

        LookupError when the node is not linked or cannot answer; TimeoutError when it stops answering.
        """
        offset, left = -limit, limit
        while left > 0:
            before = left
            async for answer in self._window(node, what, offset, min(left, ASK_WINDOW)):
                left -= len(answer.payload)
                offset = answer.next
                if answer.payload:
                    yield answer.payload
            if offset == 0 or left == before:  # a window without a byte is the end, whatever the node says of the next
                return

    async def follow(self, node: NodeId, what: str, limit: int, every: float) -> AsyncGenerator[bytes]:
        """Yield the newest `limit` bytes of what a node is asked for, and for ever what is added, asking again `every`
        so many seconds. LookupError and TimeoutError as from `ask`."""
        offset = -limit
        while True:
            async for answer in self._window(node, what, offset, ASK_WINDOW):
                if answer.payload:
                    yield answer.payload
                if answer.last:
                    offset = answer.end
            await asyncio.sleep(every)

    async def _window(self, node: NodeId, what: str, offset: int, limit: int) -> AsyncIterator[Answer]:
        number = next(self._ask_numbers)
        window = self._asks[node, number] = _Window(limit)
        try:
            if not self.send(node, Ask(number, what, offset, limit)):
                raise LookupError("the node is not linked")
            last = False
            while not last:
                async with asyncio.timeout(ASK_SECONDS):
                    answer = await window.queue.get()
                if answer.error:
                    raise LookupError(answer.error)
                last = answer.last
                yield answer
        finally:
            del self._asks[node, number]

"""What one end of a link sends, without its socket: urgent frames at once, long ones in turns.

Urgent frames (tokens, reports, refusals) are written as they come. A long frame and a long answer wait here as pieces
and are written one at a time, only while the transport is not paused; so a token never waits behind more than one piece
and what the transport holds (64 KiB, about 5 ms of a 100 Mbit/s line).

The peer joins at most LONGEST_JOINED bytes and MOST_OPEN messages at once and ends the link beyond that. So the long
frames under way never exceed this together; the next one waits until enough of them have been written. A smaller one
may pass a larger one that waits, up to LONGEST_JOINED bytes of them, so that the larger one has its turn.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

from wire.codec import LONGEST_JOINED, LONGEST_PLAIN, MOST_OPEN, Splitter, WireError, encode, fragments
from wire.frames import Frame

MOST_BUFFERED = 64 * 1024
"""Bytes that the transport may hold before pieces wait; also what the kernel may hold unsent."""
AF_UNIX = 1
IPPROTO_TCP = 6
TCP_NODELAY = 1
NOTSENT_LOWAT_MACOS = 0x201
TCP_NOTSENT_LOWAT = NOTSENT_LOWAT_MACOS if sys.platform == "darwin" else 25
"""Python's socket module does not name the last (netinet/tcp.h on macOS, linux/tcp.h)."""
GATHER, AT_ONCE = 0.002, 4
"""Seconds between two writes on one link in a rush, and so many that need not wait for that after a pause: a write and
the wake-up at the other end cost as much as the rest of a request together, but one that is alone, with its few frames,
must not wait."""
PATIENCE = 0.02
"""Seconds that a frame waits at most for another one to leave with."""
TCP_RTO_MAX_MS = 44
LONGEST_RETRY = 1000
"""Milliseconds from one retransmission to the next, where the kernel lets us say (Linux 6.15 and later). Left alone it
doubles them, and a cable that was out for 2 s is a silence of more than 3."""
MOST_UNSENT = 32 * 1024 * 1024
"""Urgent bytes that may pile up for a peer that does not read."""
TURN = 8
"""Pieces written in one go, so that a fast socket does not keep the loop to itself."""


class Outbox:
    """Writes frames through `write`; goes on with pieces through `defer`, the loop's call_soon. `wait` calls what it is
    given after PATIENCE.

    Frames that are sent within one turn of the loop leave together: one TLS record and one system call for all.
    """

    def __init__(
        self,
        write: Callable[[bytes], object],
        defer: Callable[[Callable[[], None]], object],
        wait: Callable[[Callable[[], None]], object],
    ) -> None:
        self._write = write
        self._defer = defer
        self._wait = wait
        self._turn: list[bytes] = []
        self._leaving = False
        self._bulk: deque[Iterator[bytes]] = deque()
        self._waiting: deque[bytes] = deque()
        """Long frames that do not fit yet beside those under way."""
        self._open = self._open_bytes = self._passed = 0
        self._message = 0
        self._paused = False
        self._pumping = False

    def send(self, frame: Frame) -> None:
        """Write a frame now, or queue it in pieces when it is long. Raises what `encode` raises."""
        self.forward(encode(frame))

    def forward(self, encoded: bytes) -> None:
        """Write an encoded frame now, or queue it in pieces when it is long."""
        if len(encoded) <= LONGEST_PLAIN:
            self._turn.append(encoded)
            if not self._leaving:
                self._leaving = True
                self._defer(self.flush)
            return
        self._waiting.append(encoded)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Begin the long frames that the peer may join beside those under way, the oldest first."""
        waiting, self._waiting = self._waiting, deque()
        for encoded in waiting:
            size, passes = len(encoded), bool(self._waiting)
            fits = self._open < MOST_OPEN and self._open_bytes + size <= LONGEST_JOINED
            if not fits or (passes and self._passed >= LONGEST_JOINED):
                self._waiting.append(encoded)
                continue
            self._passed = self._passed + size if passes else 0
            self._message += 1
            self._open += 1
            self._open_bytes += size
            self._queue(self._pieces(encoded, self._message))

    def _pieces(self, encoded: bytes, message: int) -> Iterator[bytes]:
        """Cut a long frame; after its last piece has been written, begin those that waited for it."""
        yield from fragments(encoded, message)
        self._open -= 1
        self._open_bytes -= len(encoded)
        self._begin_waiting()

    def accompany(self, encoded: bytes) -> None:
        """Write a short encoded frame before the next one that is sent, after PATIENCE at the latest: alone it would
        wake up the other end, which costs more than all that it says."""
        self._turn.append(encoded)
        if len(self._turn) == 1:
            self._wait(self.flush)

    def flush(self) -> None:
        """Write what this turn has gathered."""
        self._leaving = False
        if self._turn:
            gathered, self._turn = self._turn, []
            self._write(gathered[0] if len(gathered) == 1 else b"".join(gathered))

    def later(self, frames: Iterator[Frame]) -> None:
        """Queue frames that may wait; each is made only when it is its turn, so they never fill the memory."""
        self._queue(encode(frame) for frame in frames)

    def pause(self) -> None:
        """Hold the pieces back: the transport has enough to send."""
        self._paused = True

    def resume(self) -> None:
        """Go on with the pieces."""
        self._paused = False
        self._start()

    def close(self) -> None:
        """Forget what waits; the connection is gone."""
        self._bulk.clear()
        self._waiting.clear()
        self._turn.clear()
        self._leaving = False

    def _queue(self, pieces: Iterator[bytes]) -> None:
        self._bulk.append(pieces)
        self._start()

    def _start(self) -> None:
        if not self._pumping and self._bulk and not self._paused:
            self._pumping = True
            self._defer(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        for _ in range(TURN):
            self.flush()
            if self._paused or not self._bulk:
                return
            source = self._bulk.popleft()
            piece = next(source, None)
            if piece is not None:
                self._bulk.append(source)
                self._write(piece)
        self._start()


class Transport(Protocol):
    """What an endpoint needs of asyncio's transports (this module imports no asyncio: it can be driven by a test)."""

    def write(self, data: bytes) -> None:
        """Queue bytes."""

    def close(self) -> None:
        """Close after what was written."""

    def abort(self) -> None:
        """Close at once."""

    def pause_reading(self) -> None:
        """Take no more bytes from the kernel."""

    def resume_reading(self) -> None:
        """Take bytes from the kernel again."""

    def is_closing(self) -> bool:
        """Whether it closes or is closed."""
        ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Call pause_writing above `high` bytes."""

    def get_extra_info(self, name: str, default: object = None) -> Any:
        """Socket, peer name, certificate."""


class Loop(Protocol):
    """What an endpoint needs of the event loop."""

    def time(self) -> float:
        """Monotonic seconds."""
        ...

    def call_soon(self, callback: Callable[[], None], /) -> object:
        """Call at the end of this turn."""
        ...

    def call_at(self, when: float, callback: Callable[[], None], /) -> object:
        """Call then."""
        ...


class Endpoint:
    """One end of a link as an asyncio protocol: splits what comes, sends through an Outbox, ends on a breach.

    Subclasses override `opened`, `received` and `lost`.
    """

    def __init__(self, loop: Loop, longest_joined: int = LONGEST_JOINED) -> None:
        self._clock = loop
        self._due = -math.inf
        self._splitter = Splitter(longest_joined=longest_joined)
        self._reason = ""
        """Why this end closed the connection; empty while it did not."""
        self._paused = False
        self._unsent = 0
        self.transport: Transport | None = None
        self.outbox: Outbox | None = None

    def _soon(self, then: Callable[[], None]) -> None:
        """Write at the end of this turn of the loop, but in a rush only once in GATHER seconds."""
        now = self._clock.time()
        self._due = max(self._due, now - AT_ONCE * GATHER) + GATHER
        if self._due <= now:
            self._clock.call_soon(then)
        else:
            self._clock.call_at(self._due, then)

    def _patiently(self, then: Callable[[], None]) -> None:
        self._clock.call_at(self._clock.time() + PATIENCE, then)

    def opened(self) -> None:
        """The connection is up."""

    def received(self, tag: int, body: bytes) -> None:
        """One frame came. A WireError raised here ends the connection with its text."""
        raise NotImplementedError

    def lost(self, reason: str) -> None:
        """The connection is gone; called once."""
        raise NotImplementedError

    def connection_made(self, transport: Transport) -> None:
        """Keep the buffers small, so that urgent frames find the line free."""
        self.transport = transport
        transport.set_write_buffer_limits(high=MOST_BUFFERED)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family != AF_UNIX:
            connection.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            connection.setsockopt(IPPROTO_TCP, TCP_NOTSENT_LOWAT, MOST_BUFFERED)
            if sys.platform == "linux":
                with suppress(OSError):
                    connection.setsockopt(IPPROTO_TCP, TCP_RTO_MAX_MS, LONGEST_RETRY)
        self.outbox = Outbox(self._write, self._soon, self._patiently)
        self.opened()

    def _write(self, data: bytes) -> None:
        """Write; a peer that has not read for MOST_UNSENT bytes is given up, so that it cannot fill our memory."""
        if self.transport is None or self.transport.is_closing():
            return
        if self._paused:
            self._unsent += len(data)
            if self._unsent > MOST_UNSENT:
                self.abort(f"the peer does not read: {self._unsent} bytes wait for it")
                return
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Split and hand on."""
        try:
            for tag, body in self._splitter.feed(data):
                self.received(tag, body)
        except WireError as error:
            self.abort(f"the peer sent a {error}")

    def eof_received(self) -> None:
        """Let the transport close."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget what waits and tell the subclass why."""
        if self.outbox is not None:
            self.outbox.close()
        ended = "the peer closed the connection" if exc is None else str(exc) or type(exc).__name__
        self.lost(self._reason or ended)

    def pause_writing(self) -> None:
        """Hold long frames back, and count what is urgent."""
        self._paused, self._unsent = True, 0
        if self.outbox is not None:
            self.outbox.pause()

    def resume_writing(self) -> None:
        """Go on with long frames."""
        self._paused = False
        if self.outbox is not None:
            self.outbox.resume()

    @property
    def open(self) -> bool:
        """Whether frames can still be sent."""
        return self.transport is not None and not self.transport.is_closing()

    def send(self, frame: Frame) -> bool:
        """Send a frame; False once the connection is closing. Raises what `encode` raises."""
        if self.outbox is None or not self.open:
            return False
        self.outbox.send(frame)
        return True

    def forward(self, encoded: bytes) -> None:
        """Send an encoded frame as it is."""
        if self.outbox is not None and self.open:
            self.outbox.forward(encoded)

    def accompany(self, encoded: bytes) -> None:
        """Send a short encoded frame with the next one, or in a moment."""
        if self.outbox is not None and self.open:
            self.outbox.accompany(encoded)

    def later(self, frames: Iterator[Frame]) -> None:
        """Send frames that give way to all others."""
        if self.outbox is not None and self.open:
            self.outbox.later(frames)

    def close(self, reason: str = "") -> None:
        """Send what was written, then close."""
        self._reason = reason or self._reason
        if self.outbox is not None and self.open:
            self.outbox.flush()
        if self.transport is not None:
            self.transport.close()

    def abort(self, reason: str) -> None:
        """Close at once, keeping the reason for `lost`."""
        self._reason = reason
        if self.outbox is not None:
            self.outbox.close()
        if self.transport is not None:
            self.transport.abort()

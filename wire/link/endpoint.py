"""Both ends of a link: send queue, asyncio protocol and socket options.

Short frames (tokens, reports, refusals) are written in the next turn of the event loop, on a busy link within
COALESCE_SECONDS.
Long frames and long answers are queued as pieces. Pieces are written one at a time, and only while the transport is not
paused. A token therefore waits for at most one piece and the transport's buffer (64 KiB, about 5 ms at 100 Mbit/s).

The peer joins at most MAX_JOINED_BYTES and MAX_OPEN_MESSAGES messages at a time, and closes the link above that. The
sender keeps its long frames in progress within these limits and queues the next frame. A smaller frame may overtake a
queued larger one, up to MAX_JOINED_BYTES in total.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

from wire.codec import (
    MAX_JOINED_BYTES,
    MAX_OPEN_MESSAGES,
    MAX_PLAIN_BYTES,
    Splitter,
    WireError,
    encode,
    split_into_fragments,
)
from wire.frames import Frame

MAX_BUFFERED_BYTES = 64 * 1024
"""Bytes in the buffer of the transport above which pieces wait; also the limit of unsent bytes in the kernel."""
AF_UNIX = 1
"""Address family of Unix sockets, as in the module `socket`, which this module does not import."""
IPPROTO_TCP = 6
"""Protocol number of TCP, as in `socket`."""
TCP_NODELAY = 1
"""Socket option, as in `socket`."""
NOTSENT_LOWAT_MACOS = 0x201
"""TCP_NOTSENT_LOWAT of macOS."""
TCP_NOTSENT_LOWAT = NOTSENT_LOWAT_MACOS if sys.platform == "darwin" else 25
"""Socket option that Python's socket module does not name (netinet/tcp.h on macOS, linux/tcp.h)."""
COALESCE_SECONDS, IMMEDIATE_WRITES = 0.002, 4
"""Seconds between two writes of a busy link, and the number of writes after a pause without that delay.

A write and the wake-up of the peer cost as much CPU as the rest of a request; a single request must not be delayed.
"""
ACCOMPANY_SECONDS = 0.02
"""Maximum seconds for which a short frame waits for another frame (`Outbox.send_with_next`)."""
TCP_RTO_MAX_MS = 44
"""Socket option of Linux for `MAX_RETRANSMIT_MS`."""
MAX_RETRANSMIT_MS = 1000
"""Maximum milliseconds between two TCP retransmissions, on Linux 6.15 and later.

By default the kernel doubles the interval, and an interruption of 2 s becomes a silence of more than 3 s.
"""
MAX_UNSENT_BYTES = 32 * 1024 * 1024
"""Maximum bytes of short frames queued for a peer that does not read."""
MAX_PIECES_PER_TURN = 8
"""Maximum pieces in one turn of the loop, because a fast socket could otherwise occupy the loop."""


class Outbox:
    """Send queue of a link.

    `write` writes bytes to the transport. `defer` calls a function soon, in a later turn of the loop. `wait` calls a
    function after ACCOMPANY_SECONDS. Frames of one turn of the loop are written together, as one TLS record with one
    system call.
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
        """Long frames that do not fit within the limits of the frames in progress."""
        self._open = self._open_bytes = self._passed = 0
        self._message = 0
        self._paused = False
        self._pumping = False

    def send(self, frame: Frame) -> None:
        """Encode a frame, and write it at the next `flush` or queue it as pieces (`send_encoded`).

        Raise UnicodeEncodeError for a text with a lone surrogate, WireError for a frame above MAX_JOINED_BYTES.
        """
        self.send_encoded(encode(frame))

    def send_encoded(self, encoded: bytes) -> None:
        """Send an encoded frame. A short frame is written at the next `flush`, a long one is queued as pieces.

        A frame is long above MAX_PLAIN_BYTES.
        """
        if len(encoded) <= MAX_PLAIN_BYTES:
            self._turn.append(encoded)
            if not self._leaving:
                self._leaving = True
                self._defer(self.flush)
            return
        self._waiting.append(encoded)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Start the queued long frames that fit within the limits, oldest first."""
        waiting, self._waiting = self._waiting, deque()
        for encoded in waiting:
            size, passes = len(encoded), bool(self._waiting)
            fits = self._open < MAX_OPEN_MESSAGES and self._open_bytes + size <= MAX_JOINED_BYTES
            if not fits or (passes and self._passed >= MAX_JOINED_BYTES):
                self._waiting.append(encoded)
                continue
            self._passed = self._passed + size if passes else 0
            self._message += 1
            self._open += 1
            self._open_bytes += size
            self._queue(self._split_frame(encoded, self._message))

    def _split_frame(self, encoded: bytes, message: int) -> Iterator[bytes]:
        """Yield the pieces of a long frame; after the last one, start queued frames."""
        yield from split_into_fragments(encoded, message)
        self._open -= 1
        self._open_bytes -= len(encoded)
        self._begin_waiting()

    def send_with_next(self, encoded: bytes) -> None:
        """Write a short encoded frame together with the next frame, after ACCOMPANY_SECONDS at the latest.

        A separate write would wake up the peer, which costs more than the content of the frame.
        """
        self._turn.append(encoded)
        if len(self._turn) == 1:
            self._wait(self.flush)

    def flush(self) -> None:
        """Write all short frames sent since the last call, in one piece."""
        self._leaving = False
        if self._turn:
            gathered, self._turn = self._turn, []
            self._write(gathered[0] if len(gathered) == 1 else b"".join(gathered))

    def send_background(self, frames: Iterator[Frame]) -> None:
        """Queue frames of low priority. Each frame is taken from `frames` only when it is written, to bound memory."""
        self._queue(encode(frame) for frame in frames)

    def pause(self) -> None:
        """Stop writing pieces because the buffer of the transport is full."""
        self._paused = True

    def resume(self) -> None:
        """Continue to write pieces after `pause`."""
        self._paused = False
        self._start()

    def close(self) -> None:
        """Drop all queued frames of a closed connection."""
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
        for _ in range(MAX_PIECES_PER_TURN):
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
    """The part of asyncio's transports that an endpoint uses. This module does not import asyncio."""

    def write(self, data: bytes) -> None:
        """Queue bytes to be sent."""

    def close(self) -> None:
        """Close after all written bytes were sent."""

    def abort(self) -> None:
        """Close immediately and discard unsent bytes."""

    def pause_reading(self) -> None:
        """Stop receiving bytes."""

    def resume_reading(self) -> None:
        """Continue to receive bytes."""

    def is_closing(self) -> bool:
        """Return whether the transport is closing or closed."""
        ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the sizes of the buffer in bytes: `pause_writing` is called above `high`, `resume_writing` at `low`."""

    def get_extra_info(self, name: str, default: object = None) -> Any:
        """Return a property of the connection by its name, such as `socket`; `default` if it is unknown."""


class EventLoop(Protocol):
    """The part of an event loop that an endpoint uses."""

    def time(self) -> float:
        """Return monotonic seconds."""
        ...

    def call_soon(self, callback: Callable[[], None], /) -> object:
        """Call a function in the next turn of the loop."""
        ...

    def call_at(self, when: float, callback: Callable[[], None], /) -> object:
        """Call a function at `when`, in seconds of the clock of `time`."""
        ...


class LinkEndpoint:
    """One end of a link as an asyncio protocol.

    An endpoint splits received bytes into frames, sends frames through an `Outbox`, and closes the connection on a
    violation of the protocol. Subclasses override `on_opened`, `on_frame` and `on_lost`. `longest_joined` is the
    maximum of received fragments in progress, in bytes.
    """

    def __init__(self, loop: EventLoop, longest_joined: int = MAX_JOINED_BYTES) -> None:
        self._clock = loop
        self._due = -math.inf
        self._splitter = Splitter(longest_joined=longest_joined)
        self._reason = ""
        """Reason for which this end closed the connection; empty before."""
        self._paused = False
        self._unsent = 0
        self.transport: Transport | None = None
        """Transport of the connection; None before the connection is made."""
        self.outbox: Outbox | None = None
        """Send queue of the connection; None before the connection is made."""

    def _call_soon(self, then: Callable[[], None]) -> None:
        """Call a function in the next turn of the loop; on a busy link at most once in COALESCE_SECONDS."""
        now = self._clock.time()
        self._due = max(self._due, now - IMMEDIATE_WRITES * COALESCE_SECONDS) + COALESCE_SECONDS
        if self._due <= now:
            self._clock.call_soon(then)
        else:
            self._clock.call_at(self._due, then)

    def _call_later(self, then: Callable[[], None]) -> None:
        self._clock.call_at(self._clock.time() + ACCOMPANY_SECONDS, then)

    def on_opened(self) -> None:
        """Handle an opened connection. Subclasses override this; by default, do nothing."""

    def on_frame(self, tag: int, body: bytes) -> None:
        """Handle a received frame.

        A WireError raised here closes the connection, with the text of the error as the reason.
        """
        raise NotImplementedError

    def on_lost(self, reason: str) -> None:
        """Handle the end of the connection; called once. `reason` is a text for the log.

        If this end closed the connection, `reason` is the reason given to `close` or `abort`, else the error of the
        transport.
        """
        raise NotImplementedError

    def connection_made(self, transport: Transport) -> None:
        """Set socket options and small buffers for low latency, create the outbox, and call `on_opened`."""
        self.transport = transport
        transport.set_write_buffer_limits(high=MAX_BUFFERED_BYTES)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family != AF_UNIX:
            connection.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            connection.setsockopt(IPPROTO_TCP, TCP_NOTSENT_LOWAT, MAX_BUFFERED_BYTES)
            if sys.platform == "linux":
                with suppress(OSError):
                    connection.setsockopt(IPPROTO_TCP, TCP_RTO_MAX_MS, MAX_RETRANSMIT_MS)
        self.outbox = Outbox(self._write, self._call_soon, self._call_later)
        self.on_opened()

    def _write(self, data: bytes) -> None:
        """Write bytes; close the connection if more than MAX_UNSENT_BYTES wait for the peer."""
        if self.transport is None or self.transport.is_closing():
            return
        if self._paused:
            self._unsent += len(data)
            if self._unsent > MAX_UNSENT_BYTES:
                self.abort(f"the peer does not read: {self._unsent} bytes are unsent")
                return
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Pass each frame in the received bytes to `on_frame`. Abort the connection after a violation of the
        protocol."""
        try:
            for tag, body in self._splitter.feed(data):
                self.on_frame(tag, body)
        except WireError as error:
            self.abort(f"the peer sent a {error}")

    def eof_received(self) -> None:
        """Return None, after which asyncio closes the transport."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop queued frames and call `on_lost` with the reason."""
        if self.outbox is not None:
            self.outbox.close()
        ended = "the peer closed the connection" if exc is None else str(exc) or type(exc).__name__
        self.on_lost(self._reason or ended)

    def pause_writing(self) -> None:
        """Pause long frames, and count unsent bytes of short frames: above MAX_UNSENT_BYTES the connection is
        aborted."""
        self._paused, self._unsent = True, 0
        if self.outbox is not None:
            self.outbox.pause()

    def resume_writing(self) -> None:
        """Continue to send long frames after `pause_writing`."""
        self._paused = False
        if self.outbox is not None:
            self.outbox.resume()

    @property
    def open(self) -> bool:
        """Whether the connection can send frames."""
        return self.transport is not None and not self.transport.is_closing()

    def send(self, frame: Frame) -> bool:
        """Send a frame. Return False if the connection is not open. Raise the exceptions of `encode`."""
        if self.outbox is None or self.transport is None or self.transport.is_closing():
            return False
        self.outbox.send(frame)
        return True

    def send_encoded(self, encoded: bytes) -> None:
        """Send an encoded frame; discard it if the connection is not open."""
        if self.outbox is not None:
            self.outbox.send_encoded(encoded)

    def send_with_next(self, encoded: bytes) -> None:
        """Send a short encoded frame together with the next frame, after ACCOMPANY_SECONDS at the latest. Discard the
        frame if the connection is not open."""
        if self.outbox is not None:
            self.outbox.send_with_next(encoded)

    def send_background(self, frames: Iterator[Frame]) -> None:
        """Queue frames of low priority, each taken from `frames` only when it is written. Discard them if the
        connection is not open."""
        if self.outbox is not None and self.open:
            self.outbox.send_background(frames)

    def close(self, reason: str = "") -> None:
        """Close the connection once all short frames are sent; discard all other queued frames. `on_lost` gets
        `reason`."""
        self._reason = reason or self._reason
        if self.outbox is not None and self.open:
            self.outbox.flush()
        if self.transport is not None:
            self.transport.close()

    def abort(self, reason: str) -> None:
        """Close the connection immediately and discard unsent bytes. `on_lost` gets the reason."""
        self._reason = reason
        if self.outbox is not None:
            self.outbox.close()
        if self.transport is not None:
            self.transport.abort()

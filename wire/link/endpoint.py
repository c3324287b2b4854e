"""Both ends of a link: asyncio protocol and socket options."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

from wire.codec import MAX_JOINED_BYTES, Splitter, WireError
from wire.frames import Frame
from wire.link.outbox import ACCOMPANY_SECONDS, Outbox

MAX_BUFFERED_BYTES = 64 * 1024
"""Bytes in the buffer of the transport above which pieces of long frames wait.

It is also the limit of unsent bytes in the kernel.
"""
AF_UNIX = 1
"""Address family of Unix sockets, as in the module `socket`, which this module does not import."""
IPPROTO_TCP = 6
"""Protocol number of TCP, as in `socket`."""
TCP_NODELAY = 1
"""Number of the socket option, as in `socket`."""
NOTSENT_LOWAT_MACOS = 0x201
"""Number of the socket option TCP_NOTSENT_LOWAT on macOS."""
TCP_NOTSENT_LOWAT = NOTSENT_LOWAT_MACOS if sys.platform == "darwin" else 25
"""Number of the socket option, which Python's `socket` does not have (netinet/tcp.h on macOS, linux/tcp.h)."""
COALESCE_SECONDS, IMMEDIATE_WRITES = 0.002, 4
"""Seconds between two writes of a busy link, and the number of writes after a pause without that delay.

A write and the wake-up of the peer cost as much CPU as the rest of a request; a single request must not be delayed.
"""
TCP_RTO_MAX_MS = 44
"""Number of the socket option of Linux that sets `MAX_RETRANSMIT_MS`."""
MAX_RETRANSMIT_MS = 1000
"""Maximum milliseconds between two TCP retransmissions, on Linux 6.15 and later.

By default the kernel doubles the interval, and an interruption of 2 s becomes a silence of more than 3 s.
"""
MAX_UNSENT_BYTES = 32 * 1024 * 1024
"""Maximum bytes of short frames, and maximum bytes of answers behind a long one, that wait for a peer.

Above either maximum the connection is aborted, because the peer does not read.
"""


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
    maximum bytes of received fragments in progress. `longest_sent` is the same maximum of the peer, for sent fragments.
    """

    def __init__(
        self, loop: EventLoop, longest_joined: int = MAX_JOINED_BYTES, longest_sent: int = MAX_JOINED_BYTES
    ) -> None:
        self._clock = loop
        self._due = -math.inf
        self._longest_sent = longest_sent
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
        self.outbox = Outbox(self._write, self._call_soon, self._call_later, self._longest_sent)
        self.on_opened()

    def _write(self, data: bytes) -> None:
        """Write bytes. Abort the connection if more than MAX_UNSENT_BYTES were written since `pause_writing`."""
        if self.transport is None or self.transport.is_closing():
            return
        if self._paused:
            self._unsent += len(data)
            if self._unsent > MAX_UNSENT_BYTES:
                self.abort(f"the peer does not read: {self._unsent} bytes are unsent")
                return
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Pass each frame in the received bytes to `on_frame`.

        Abort the connection after a violation of the protocol.
        """
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
        """Pause long frames, and begin to count the unsent bytes of short frames.

        The connection is aborted if there are more than MAX_UNSENT_BYTES.
        """
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
        """Send a frame. Return False if the connection is not open.

        Raise UnicodeEncodeError for a text with a lone surrogate, WireError for a frame above MAX_JOINED_BYTES.
        """
        if self.outbox is None or self.transport is None or self.transport.is_closing():
            return False
        self.outbox.send(frame)
        return True

    def send_in_order(self, encoded: bytes) -> None:
        """Send an encoded frame of an answer behind all earlier ones. Discard it if the connection is not open.

        Abort the connection if more than MAX_UNSENT_BYTES wait behind a long frame, because the peer does not read.
        """
        if self.outbox is None:
            return
        self.outbox.send_in_order(encoded)
        if self.outbox.held_bytes > MAX_UNSENT_BYTES:
            self.abort(f"the peer does not read: {self.outbox.held_bytes} bytes are unsent")

    def send_with_next(self, encoded: bytes) -> None:
        """Send a short encoded frame together with the next frame, after ACCOMPANY_SECONDS at the latest.

        Discard the frame if the connection is not open.
        """
        if self.outbox is not None:
            self.outbox.send_with_next(encoded)

    def send_background(self, frames: Iterator[Frame]) -> None:
        """Queue frames of low priority, each taken from `frames` only when it is written.

        Discard them if the connection is not open.
        """
        if self.outbox is not None and self.open:
            self.outbox.send_background(frames)

    def close(self, reason: str = "") -> None:
        """Send all short frames, discard all other queued frames, and close the connection.

        `on_lost` gets `reason`. Later calls only replace `reason`, because a second `close` of asyncio's TLS transport
        makes `abort` fail.
        """
        self._reason = reason or self._reason
        if self.outbox is not None and self.open:
            self.outbox.flush()
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()

    def close_after_answers(self) -> None:
        """Close the connection once all frames of answers are sent."""
        if self.outbox is not None:
            self.outbox.call_after_answers(self.close)

    def abort(self, reason: str) -> None:
        """Close the connection immediately and discard unsent bytes. `on_lost` gets the reason."""
        self._reason = reason
        if self.outbox is not None:
            self.outbox.close()
        if self.transport is not None:
            self.transport.abort()

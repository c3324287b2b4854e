"""What one end of a link sends, without its socket: urgent frames at once, long ones in turns.

Urgent frames (tokens, reports, refusals) are written as they come. A long frame and a long answer wait here as pieces
and are written one at a time, only while the transport is not paused; so a token never waits behind more than one piece
and what the transport holds (64 KiB, about 5 ms of a 100 Mbit/s line).
"""

from collections import deque
from collections.abc import Callable, Iterator

from wire.codec import LONGEST_PLAIN, encode, fragments
from wire.frames import Frame

MOST_BUFFERED = 64 * 1024
"""Bytes that the transport may hold before pieces wait; also what the kernel may hold unsent."""
TURN = 8
"""Pieces written in one go, so that a fast socket does not keep the loop to itself."""


class Outbox:
    """Writes frames through `write`; goes on with pieces through `defer`, the loop's call_soon."""

    def __init__(self, write: Callable[[bytes], object], defer: Callable[[Callable[[], None]], object]) -> None:
        self._write = write
        self._defer = defer
        self._bulk: deque[Iterator[bytes]] = deque()
        self._message = 0
        self._paused = False
        self._pumping = False

    def send(self, frame: Frame) -> None:
        """Write a frame now, or queue it in pieces when it is long. Raises what `encode` raises."""
        self.forward(encode(frame))

    def forward(self, encoded: bytes) -> None:
        """Write an encoded frame now, or queue it in pieces when it is long."""
        if len(encoded) <= LONGEST_PLAIN:
            self._write(encoded)
            return
        self._message += 1
        self._queue(fragments(encoded, self._message))

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
            if self._paused or not self._bulk:
                return
            source = self._bulk.popleft()
            piece = next(source, None)
            if piece is not None:
                self._bulk.append(source)
                self._write(piece)
        self._start()

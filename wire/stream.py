"""One end of a link without its socket: frames in, bytes out, urgent before long.

Urgent frames (tokens, reports, refusals) are written at once. A long frame and a long answer wait here as pieces and
are handed out one at a time, only when the shell says that its transport has little left to send; so a token never
waits behind more than one piece and what the transport holds (64 KiB, about 5 ms of a 100 Mbit/s line).
"""

from collections import deque
from collections.abc import Iterator

from wire.codec import LONGEST_PLAIN, Splitter, encode, fragments
from wire.frames import Frame


class Outbox:
    """What is still to be sent in pieces. Several long messages take turns."""

    def __init__(self) -> None:
        self._bulk: deque[Iterator[bytes]] = deque()
        self._message = 0

    def urgent(self, frame: Frame) -> bytes:
        """Give the bytes to write now; empty when the frame is long and was queued in pieces instead."""
        encoded = encode(frame)
        if len(encoded) <= LONGEST_PLAIN:
            return encoded
        self._message += 1
        self._bulk.append(fragments(encoded, self._message))
        return b""

    def later(self, frames: Iterator[Frame]) -> None:
        """Queue frames that may wait; they are made only when it is their turn, so their memory is one piece."""
        self._bulk.append(encode(frame) for frame in frames)

    def piece(self) -> bytes | None:
        """Give the next piece, None when nothing waits."""
        while self._bulk:
            source = self._bulk.popleft()
            encoded = next(source, None)
            if encoded is not None:
                self._bulk.append(source)
                return encoded
        return None

    @property
    def waiting(self) -> bool:
        """Whether pieces wait."""
        return bool(self._bulk)


__all__ = ["Outbox", "Splitter"]

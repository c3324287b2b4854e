"""Send queue of a link: short frames at once, long frames in pieces, frames of answers in their order.

Short frames (tokens, reports, refusals) are written in the next turn of the event loop, on a busy link within
`wire.link.endpoint.COALESCE_SECONDS`.
Long frames and long answers are queued as pieces. Pieces are written one at a time, and only while the transport is not
paused. A token therefore waits for at most one piece and the transport's buffer (64 KiB, about 5 ms at 100 Mbit/s).

A short frame overtakes a long one. Frames of answers are the exception: they wait behind a long frame of an answer. The
end of an answer therefore never arrives before a long tool call.

The peer joins fragments of at most MAX_OPEN_MESSAGES messages and `longest` bytes at a time, and closes the link above
that. The sender keeps its long frames in progress within these limits, and queues further ones. Smaller frames may
overtake a queued larger one, up to `longest` bytes in total.
"""

from collections import deque
from collections.abc import Callable, Iterator

from wire.codec import MAX_JOINED_BYTES, MAX_OPEN_MESSAGES, MAX_PLAIN_BYTES, encode, split_into_fragments
from wire.frames import Frame

ACCOMPANY_SECONDS = 0.02
"""Maximum seconds for which a short frame waits for another frame (`Outbox.send_with_next`)."""
MAX_PIECES_PER_TURN = 8
"""Maximum pieces in one turn of the loop, because a fast socket could otherwise occupy the loop."""


class Outbox:
    """Send queue of a link.

    `write` writes bytes to the transport. `defer` calls a function soon, in a later turn of the loop. `wait` calls a
    function after ACCOMPANY_SECONDS. Frames of one turn of the loop are written together, as one TLS record with one
    system call. `longest` is the maximum bytes of fragments that the peer joins at a time.
    """

    def __init__(
        self,
        write: Callable[[bytes], object],
        defer: Callable[[Callable[[], None]], object],
        wait: Callable[[Callable[[], None]], object],
        longest: int = MAX_JOINED_BYTES,
    ) -> None:
        self._write = write
        self._defer = defer
        self._wait = wait
        self._longest = longest
        self._turn: list[bytes] = []
        self._leaving = False
        self._bulk: deque[Iterator[bytes]] = deque()
        self._waiting: deque[bytes] = deque()
        """Long frames that do not fit within the limits of the frames in progress."""
        self._long_answer: bytes | None = None
        """Long frame of an answer that is not sent completely; None without one."""
        self._answers: deque[bytes] = deque()
        """Frames of answers behind `_long_answer`."""
        self.held_bytes = 0
        """Bytes of the frames of answers that wait behind a long one."""
        self._after_answers: Callable[[], object] | None = None
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

    def send_in_order(self, encoded: bytes) -> None:
        """Send an encoded frame of an answer as `send_encoded` does, but behind all earlier frames of answers."""
        if self._long_answer is not None:
            self._answers.append(encoded)
            self.held_bytes += len(encoded)
            return
        if len(encoded) > MAX_PLAIN_BYTES:
            self._long_answer = encoded
        self.send_encoded(encoded)

    def call_after_answers(self, then: Callable[[], object]) -> None:
        """Call a function once all frames of answers are sent: at once, or behind the long frame in progress."""
        if self._long_answer is None:
            then()
        else:
            self._after_answers = then

    def _end_long_answer(self) -> None:
        """Send the frames that wait behind a long frame of an answer, up to the next long one."""
        self._long_answer = None
        while self._answers and self._long_answer is None:
            encoded = self._answers.popleft()
            self.held_bytes -= len(encoded)
            self.send_in_order(encoded)
        then = self._after_answers
        if then is not None and self._long_answer is None:
            self._after_answers = None
            then()

    def _begin_waiting(self) -> None:
        """Start the queued long frames that fit within the limits, oldest first."""
        waiting, self._waiting = self._waiting, deque()
        for encoded in waiting:
            size, passes = len(encoded), bool(self._waiting)
            fits = self._open < MAX_OPEN_MESSAGES and self._open_bytes + size <= self._longest
            if (self._open and not fits) or (passes and self._passed >= self._longest):
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
        if encoded is self._long_answer:
            self._end_long_answer()

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
        self._answers.clear()
        self.held_bytes = 0
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

"""Reader's side of a request: its answer, which the dispatcher fills and one reader takes.

The deltas of one frame are added, then every answer with new deltas is flushed once. A flush calls a stream's sink or
wakes a waiting reader through one Future. As long as the reader keeps up, a token costs no clock reading, no task and
no counting. The number `takes` shows the stream watchdog whether the reader keeps up.

The dispatcher's side is `active_request.ActiveRequest`. Either side changes an answer by its methods only.
"""

import asyncio
import io
import math
import struct
from collections.abc import Callable, Iterable

from router.dispatch.request import SLOW, CompleteAnswer, Outcome
from wire.frames import NUMBER_BYTES, Channel, Delta, Logprob, Vectors

DELTA_BYTES = 256
"""Overhead in `Answer.buffered` of one pending delta and of one collected tool call, in addition to the characters."""
LOGPROB_BYTES = 96
"""Overhead in `Answer.buffered` of one token's log probability and of each alternative, in addition to the characters.
"""
MAX_DELTAS_TAKEN = 256
"""Maximum deltas that one call of `take_deltas` returns. A slow reader shows its progress by further calls."""
MAX_ANSWER_CHARS = 32 * 1024 * 1024
"""Maximum of `Answer.buffered`, in characters with overheads, for an answer that is not streamed."""


class Answer:
    """Base of a streamed and a collected answer: the outcome, and the reader that is notified."""

    __slots__ = ("_sink", "_waiter", "begun", "buffered", "opened", "outcome", "upstream", "waits_for")

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        """Outcome of the request; None before its end."""
        self.waits_for = ""
        """Reason why the request waits, as shown to the client; empty for none.

        The reason names no node and no model, because these may be hidden from the key.
        """
        self.upstream = ""
        """Name of the upstream to which the reader must pass the request on; empty for none."""
        self.opened = False
        """Whether the HTTP status has been sent to the client."""
        self.begun = False
        """Whether the reader has taken a part of the answer for the client."""
        self.buffered = 0
        """Size of the stored part in characters, with overheads. Of a stream, only deltas of a slow reader count."""
        self._sink: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    # dispatcher

    def add(self, delta: Delta) -> bool:
        """Store one delta from the node. Return True if `flush` must follow after the last delta of its frame.

        Each subclass overrides this method.
        """
        raise NotImplementedError

    def discard(self) -> None:
        """Discard the stored part of the answer. Each subclass overrides this method."""
        raise NotImplementedError

    def flush(self) -> None:
        """Notify the reader: call the sink, or wake a waiting reader."""
        if self._sink is not None:
            self._sink()
            return
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def end(self, outcome: Outcome) -> None:
        """Set the outcome and notify the reader. Do nothing if the answer already has an outcome."""
        if self.outcome is None:
            self.outcome = outcome
            self.flush()

    def set_upstream(self, upstream: str) -> None:
        """Set the name of the upstream to which the reader must pass the request on, and notify the reader."""
        self.upstream = upstream
        self.flush()

    def announce_wait(self, reason: str) -> None:
        """Set the reason of a wait, which the next keep-alive shows to the client; empty for none."""
        self.waits_for = reason

    # reader

    def attach(self, sink: Callable[[], None]) -> None:
        """Call `sink` at every flush from now on. No Future of `wait` is completed while a sink is attached."""
        self._sink = sink

    def detach(self) -> None:
        """Remove the sink. Later flushes wake a waiting reader again."""
        self._sink = None

    def wait(self) -> asyncio.Future[None]:
        """Return a Future that the next `flush` completes if no sink is attached.

        Only the Future of the newest call is completed; those of earlier calls stay pending.
        """
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


class StreamedAnswer(Answer):
    """Answer that is sent to the client while it is generated.

    `buffered` counts the characters, with overheads, of pending deltas that arrived while the reader was `blocked`. It
    is 0 for a reader that keeps up.
    """

    __slots__ = ("blocked", "keepalive_due", "pending", "takes")

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Delta] = []
        """Deltas that the reader has not taken yet, in order."""
        self.blocked = True
        """Whether the write buffer of the client's transport is full, or no reader has started yet."""
        self.keepalive_due = False
        """Whether a keep-alive was requested after the last call of `take_deltas`."""
        self.takes = 0
        """Number of calls of `take_deltas`."""

    @property
    def ready(self) -> bool:
        """Whether there are deltas, an outcome or a keep-alive to send."""
        return bool(self.pending) or self.outcome is not None or self.keepalive_due

    def add(self, delta: Delta) -> bool:
        """Append one delta to the pending deltas of the reader. Return True if no other delta was pending."""
        pending = self.pending
        pending.append(delta)
        if self.blocked:
            self.buffered += _compute_cost(delta)
        return len(pending) == 1

    def discard(self) -> None:
        """Discard the pending deltas. `ActiveRequest.tokens` is unchanged."""
        self.pending = []
        self.buffered = 0

    def request_keepalive(self) -> None:
        """Set `keepalive_due`, and notify the reader, which then sends a keep-alive."""
        self.keepalive_due = True
        self.flush()

    def mark_opened(self) -> None:
        """Record that the HTTP status was sent to the client. A later refusal can no longer set the status."""
        self.opened = True

    def end_unread(self) -> None:
        """Replace the outcome by `SLOW` and notify the reader.

        Call this method for an ended request whose client does not read the rest of the answer.
        """
        self.outcome = SLOW
        self.flush()

    def set_blocked(self, blocked: bool) -> None:
        """Record whether the write buffer of the client's transport is full (`blocked`)."""
        self.blocked = blocked

    def take_deltas(self) -> list[Delta]:
        """Return the pending deltas in order, at most `MAX_DELTAS_TAKEN`; empty without any.

        Reset `keepalive_due`, count the call in `takes`, and set `begun` if there are deltas.
        """
        self.takes += 1
        self.keepalive_due = False
        taken = self.pending
        if not taken:
            return taken
        self.begun = True
        self.pending = []
        if len(taken) > MAX_DELTAS_TAKEN:
            self.pending = taken[MAX_DELTAS_TAKEN:]
            del taken[MAX_DELTAS_TAKEN:]
        if self.buffered:
            self.buffered = sum(_compute_cost(delta) for delta in self.pending)
        return taken


class CollectedAnswer(Answer):
    """Answer that is read once, at the end. `buffered` is its collected size in characters, with overheads.

    `choices` is the number of choices, `logprobs` whether log probabilities are collected.
    """

    __slots__ = ("_calls", "_choices", "_logprobs", "_texts", "_with_logprobs")

    def __init__(self, choices: int, logprobs: bool) -> None:
        super().__init__()
        self._choices = choices
        self._with_logprobs = logprobs
        self.discard()

    def add(self, delta: Delta) -> bool:
        """Collect the requested parts of a delta. Return False, because the reader waits only for the outcome.

        Ignore a delta of a choice that does not exist.
        """
        choice = delta.choice
        if not 0 <= choice < self._choices:
            return False
        for channel, text in delta.pieces:
            if channel in _TEXTS:
                self.buffered += len(text)
                channel_text = self._texts.get((choice, channel))
                if channel_text is None:
                    channel_text = self._texts[choice, channel] = io.StringIO()
                channel_text.write(text)
            elif channel == Channel.TOOL_CALL:
                self.buffered += len(text) + DELTA_BYTES
                self._calls.setdefault(choice, []).append(text)
        if delta.logprobs and self._with_logprobs:
            self.buffered += _compute_logprobs_cost(delta.logprobs)
            self._logprobs.setdefault(choice, []).extend(delta.logprobs)
        return False

    def discard(self) -> None:
        """Discard the collected answer."""
        self._texts: dict[tuple[int, int], io.StringIO] = {}
        self._calls: dict[int, list[str]] = {}
        self._logprobs: dict[int, list[Logprob]] = {}
        self.buffered = 0

    def build_answer(self, fingerprint: str = "") -> CompleteAnswer:
        """Return the answer from the deltas collected so far. It is complete once the outcome is `Finished`.

        `fingerprint` is that of the model that generated the answer.
        """
        texts = {where: text.getvalue() for where, text in self._texts.items()}
        return CompleteAnswer(texts, self._calls, self._logprobs, fingerprint)

    async def wait_for_outcome(self) -> Outcome:
        """Wait without a time limit for the outcome, and return it. A cancellation does not end the request."""
        while self.outcome is None:
            await self.wait()
        return self.outcome


class VectorsAnswer(CollectedAnswer):
    """Vectors of `count` texts, read once at the end. Invalid vectors of a node are ignored: see `add_vectors`."""

    __slots__ = ("_count", "_vectors")

    def __init__(self, count: int) -> None:
        self._count = count
        super().__init__(0, logprobs=False)

    @property
    def complete(self) -> bool:
        """Whether each text has a vector, and all vectors have the same length."""
        return len(self._vectors) == self._count and len({len(vector) for vector in self._vectors.values()}) == 1

    def add_vectors(self, frame: Vectors) -> None:
        """Store the vectors of a frame by their texts. A later vector of a text replaces an earlier one.

        Ignore a frame whose data cannot be divided into equal vectors, or whose data has numbers that are not finite.
        Ignore vectors of texts that the request does not have.
        """
        count = len(frame.places)
        size, rest = divmod(len(frame.data), count * NUMBER_BYTES) if count else (0, 1)
        if rest or not size or not _is_finite(frame.data):
            return
        for at, place in enumerate(frame.places):
            if place < self._count:
                self._vectors[place] = frame.data[at * size * NUMBER_BYTES : (at + 1) * size * NUMBER_BYTES]

    def discard(self) -> None:
        """Discard all vectors."""
        super().discard()
        self._vectors: dict[int, bytes] = {}

    def build_answer(self, fingerprint: str = "") -> CompleteAnswer:
        """Return the answer, with the vectors in the order of their texts. Vectors are missing unless `complete`.

        `fingerprint` is that of the model that computed the vectors.
        """
        return CompleteAnswer({}, {}, {}, fingerprint, tuple(self._vectors[place] for place in sorted(self._vectors)))


_TEXTS = frozenset({int(Channel.CONTENT), int(Channel.REASONING)})


def _compute_cost(delta: Delta) -> int:
    cost = DELTA_BYTES + sum(len(text) for _, text in delta.pieces)
    return cost + _compute_logprobs_cost(delta.logprobs) if delta.logprobs else cost


def _compute_logprobs_cost(logprobs: Iterable[Logprob]) -> int:
    return sum(
        LOGPROB_BYTES + len(logprob.token) + sum(LOGPROB_BYTES + len(token) for token, _ in logprob.top)
        for logprob in logprobs
    )


def _is_finite(data: bytes) -> bool:
    return math.isfinite(sum(struct.unpack(f"<{len(data) // NUMBER_BYTES}f", data)))

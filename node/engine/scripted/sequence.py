"""Requests and rows of the scripted engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from node.engine.kv.commitments import Commitment, CommitmentLedger
from node.engine.process.interface import FLUSH_INTERVAL_SECONDS
from node.engine.requests.preflight import RequestShape
from node.engine.scripted.answers import TokenSource
from node.engine.text.stop_strings import StopStrings
from wire.capacity.fairness import WeightedKey
from wire.frames import Channel, Delta, Finished, Generate, Timings


@dataclass(slots=True, eq=False, kw_only=True)
class ScriptedRow:
    """One choice of an admitted request. Its tokens are only counted; their text is a placeholder (`gather`).

    `now` is in monotonic seconds in all methods.
    """

    choice: int
    """Index of the choice in its request."""
    commitment: Commitment
    """Memory commitment of the row."""
    produced: int = 0
    """Number of tokens of the answer so far, including the tokens of another node."""
    reason: str = ""
    """Finish reason, `stop` or `length`; empty while the row is running."""
    resumed_tokens: int = 0
    """Number of leading tokens of the answer that another node generated and sent."""
    sent: int = 0
    """Number of tokens that this node or another node has sent."""

    @property
    def stop(self) -> str:
        """Stop string that ended the answer: always empty, because a row without text has no stop strings."""
        return ""

    def count_steps_left(self, last: int) -> int:
        """Return the number of decode steps until the row next sends tokens or ends. `last` is the maximum number of
        tokens of the answer (`ScriptedSequence.last`)."""
        return 1 if self.sent == self.resumed_tokens else last - self.produced

    def add_tokens(self, number: int, count: int, now: float, *, ends: int, limit: int) -> None:
        """Generate the next `count` tokens. End the row when its answer is complete.

        `number` is the number of the request. `ends` is the number of tokens of the scripted answer, and `limit` the
        maximum number of tokens. `now` is in monotonic seconds.
        """
        self.produced += count
        self.commitment.record_token(count)
        if self.produced >= min(ends, limit):
            self.reason = "stop" if self.produced == ends else "length"

    def is_due(self, seconds: float, *, stream: bool) -> bool:
        """Return whether the unsent tokens of the row must be sent now, `seconds` after the last output of its request.

        A row without text sends only after its first token and at its end.
        """
        return bool(self.reason) or self.sent == self.resumed_tokens

    def gather(self, number: int) -> Delta:
        """Return the unsent tokens as a delta of the request `number`, and mark them as sent. There must be at least
        one token."""
        new, self.sent = self.produced - self.sent, self.produced
        return Delta(number, self.choice, tuple(range(new)), ((Channel.CONTENT, "x" * new),))

    def end_replay(self, known: int) -> None:
        """Record that another node has sent the first `known` tokens, which are not in a cache of this node."""
        self.produced = self.resumed_tokens = self.sent = known
        self.commitment.reset()

    def prefill(self, tokens: int) -> None:
        """Record that the cache of this row has `tokens` tokens, before the row joins a batch."""
        self.commitment.record_prefill(tokens, tokens)

    def join(self, prompt: int) -> None:
        """Record that the row joins a decode batch, after a prefill of `prompt` prompt tokens and of its generated
        tokens."""
        self.commitment.record_join(prompt + self.produced)

    def commit(self, commitment: Commitment) -> None:
        """Replace the memory commitment of the row: by a commitment of the ledger, or by a commitment of 0 tokens when
        the row is preempted."""
        self.commitment = commitment


@dataclass(slots=True, eq=False, kw_only=True)
class TextRow(ScriptedRow):
    """One choice of an admitted request, whose answer has a text."""

    stops: StopStrings
    """Stop strings of the answer."""
    token_source: TokenSource
    """Source of the answer's tokens."""
    gathered: list[Delta] = field(default_factory=list[Delta])
    """Deltas not sent yet."""

    @property
    def stop(self) -> str:
        """Stop string that ended the answer; empty if no stop string did."""
        return self.stops.found

    def count_steps_left(self, last: int) -> int:
        """Return 1, because a stop string may end the answer at any token."""
        return 1

    def add_tokens(self, number: int, count: int, now: float, *, ends: int, limit: int) -> None:
        """Generate the next `count` tokens of the request `number`, and store their deltas. End the row when its answer
        is complete or has a stop string.

        `ends` is the number of tokens of the scripted answer, and `limit` the maximum number of tokens. `now` is in
        monotonic seconds.
        """
        for _ in range(count):
            self.gathered.append(self._add_token(number, now, ends=ends, limit=limit))

    def _add_token(self, number: int, now: float, *, ends: int, limit: int) -> Delta:
        token, text = self.token_source(self.produced, now)
        self.produced += 1
        self.commitment.record_token()
        shown, stopped = self.stops.feed(text)
        if stopped:
            self.reason = "stop"
        elif self.produced >= min(ends, limit):
            self.reason = "stop" if self.produced == ends else "length"
            shown += self.stops.flush()
        return Delta(number, self.choice, (token,), ((Channel.CONTENT, shown),) if shown else ())

    def is_due(self, seconds: float, *, stream: bool) -> bool:
        """Return whether the unsent tokens of the row must be sent now, `seconds` after the last output of its request.
        A streamed answer is sent at once, any other answer at its end or after `FLUSH_INTERVAL_SECONDS`."""
        return stream or bool(self.reason) or seconds >= FLUSH_INTERVAL_SECONDS

    def gather(self, number: int) -> Delta:
        """Return the unsent deltas as one delta of the request `number`, and mark them as sent. There must be at least
        one delta."""
        gathered, self.gathered, self.sent = self.gathered, [], self.produced
        ids = tuple(token for delta in gathered for token in delta.ids)
        text = "".join(text for delta in gathered for _, text in delta.pieces)
        return Delta(number, self.choice, ids, ((Channel.CONTENT, text),) if text else ())

    def replay(self, number: int, known: Sequence[int], now: float, *, ends: int, limit: int) -> None:
        """Restore a row after the token ids `known`, which another node has sent. Their text is not sent again.

        End the row if the answer is complete or has a stop string within these tokens. `ends`, `limit` and `now`
        are described at `ScriptedRow.add_tokens`.
        """
        for _ in known:
            self._add_token(number, now, ends=ends, limit=limit)
            if self.reason:
                break
        self.end_replay(self.produced)


@dataclass(slots=True, eq=False, kw_only=True)
class ScriptedSequence:
    """Admitted request in the scripted engine. Times are monotonic seconds."""

    request: Generate
    """The request."""
    shape: RequestShape
    """Size of the request in tokens and choices."""
    ledger: CommitmentLedger
    """Ledger of the commitments of the request's model."""
    ends: int
    """Number of tokens of each scripted answer; above the token limit if only the limit ends the answers."""
    arrived: float
    """Time of arrival."""
    crashes: bool = False
    """Whether the first decode step of the request ends the engine process, to simulate a crash."""
    rows: list[ScriptedRow] = field(default_factory=list[ScriptedRow])
    """Choices of the request."""
    cached: int = 0
    """Prompt tokens from a prefix cache. Only the simulation has one; 0 in the scripted engine of a node."""
    warm: int = 0
    """Prompt tokens that the next prefill finds in a prefix cache; 0 after a preemption."""
    prefilled: int = 0
    """Tokens of the prompt and of the longest answer so far that are in memory during the prefill, including cached
    tokens."""
    started: bool = False
    """Whether the request has a cache. Its rows then count as rows of the decode batch."""
    retry_at: float = 0.0
    """Time from which the prefill may continue after the gate refused it; 0.0 if the gate has not refused it since the
    last decode or preemption."""
    yielded: bool = False
    """Whether the request was preempted for another key. It then only precedes new requests of its own key."""
    begun: float = 0.0
    """Start of the decode; 0.0 before."""
    last_token_at: float = 0.0
    """Time at which output was last sent, or of a later `begin`; 0.0 before the first `begin`."""

    @property
    def number(self) -> int:
        """The coordinator's number of the request."""
        return self.request.request

    @property
    def model(self) -> str:
        """Name of the request's model."""
        return self.request.model

    @property
    def weighted_key(self) -> WeightedKey:
        """API key of the request."""
        return self.request.weighted_key

    @property
    def width(self) -> int:
        """Number of rows that have not ended."""
        rows = self.rows
        return sum(not row.reason for row in rows) if len(rows) != 1 else not rows[0].reason

    @property
    def answered(self) -> bool:
        """Whether the request already has generated tokens and was not preempted for another key. The prefill of an
        answered request gets rows before the prefill of a new request (`compute_service_order`)."""
        return any(row.produced for row in self.rows) and not self.yielded

    @property
    def age(self) -> tuple[float, int]:
        """Sort key that orders requests from oldest to newest: monotonic time of arrival, and number of the request."""
        return self.arrived, self.number

    @property
    def holds_memory(self) -> bool:
        """Whether any row that has not ended has tokens in a cache."""
        return any(row.commitment.stored_tokens for row in self.list_active_rows())

    @property
    def delivered(self) -> bool:
        """Whether any token that this node generated was sent."""
        return any(row.sent > row.resumed_tokens for row in self.rows)

    @property
    def length(self) -> int:
        """Number of tokens of the prefill: the prompt, and the generated tokens of the longest running row."""
        rows = self.rows
        known = (
            rows[0].produced if len(rows) == 1 else max((row.produced for row in self.list_active_rows()), default=0)
        )
        return self.shape.prompt + known

    @property
    def left(self) -> int:
        """Number of tokens that are not prefilled yet."""
        return self.length - (self.prefilled if self.started else self.warm)

    @property
    def last(self) -> int:
        """Maximum tokens of an answer: the length of the scripted answer, or the token limit if that is lower."""
        return min(self.ends, self.shape.limit)

    def list_active_rows(self) -> Sequence[ScriptedRow]:
        """Return the rows that have not ended."""
        return [row for row in self.rows if not row.reason]

    def start(self) -> None:
        """Record the start of the prefill, with the cached tokens in memory. Later calls have no effect."""
        if not self.started:
            self.started, self.prefilled = True, self.warm

    def prefill(self, tokens: int) -> None:
        """Record a prefilled chunk of `tokens` tokens."""
        self.prefilled += tokens
        for row in self.list_active_rows():
            row.prefill(self.prefilled)

    def delay(self, until: float) -> None:
        """Record that the gate refused the prefill of the request, which may continue at the monotonic time `until`."""
        self.retry_at = until

    def begin(self, now: float) -> None:
        """Record that the request decodes from the monotonic time `now` on, and clear `retry_at`. `begun` is the time
        of the first call."""
        self.begun, self.last_token_at, self.retry_at = self.begun or now, now, 0.0

    def preempt(self, *, for_key: bool) -> None:
        """Record that the request is preempted: its memory is released, and its prefill must run again. `for_key`: the
        request is preempted for another API key."""
        self.yielded |= for_key
        self.started, self.prefilled, self.warm, self.retry_at = False, 0, 0, 0.0
        for row in self.list_active_rows():
            row.commit(Commitment(0))

    def mark_sent(self, now: float) -> None:
        """Record that output is sent at the monotonic time `now`."""
        self.last_token_at = now

    def add_tokens(self, row: ScriptedRow, count: int, now: float) -> None:
        """Generate the next `count` tokens of one of the request's rows, and end the row if its answer is complete."""
        row.add_tokens(self.number, count, now, ends=self.ends, limit=self.shape.limit)

    def build_finished(self, now: float) -> Finished:
        """Return the `Finished` frame of a request that ends at the monotonic time `now`. It has the finish reasons,
        the token counts, and the seconds before and since the start of the decode."""
        stops = tuple(row.stop for row in self.rows)
        return Finished(
            self.number,
            tuple(row.reason for row in self.rows),
            self.shape.prompt,
            sum(row.produced for row in self.rows),
            self.cached,
            timings=Timings(self.begun - self.arrived, 0.0, now - self.begun),
            stops=stops if any(stops) else (),
        )

"""Requests and rows of the scripted engine."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from node.engine.kv.commitments import Commitment
from node.engine.requests.preflight import RequestShape
from node.engine.scripted.answers import TokenSource
from node.engine.text.stop_strings import StopStrings
from wire.capacity.fairness import WeightedKey
from wire.frames import Channel, Delta, Finished, Generate, Timings


@dataclass(slots=True, eq=False)
class ScriptedRow:
    """One choice of an admitted request."""

    choice: int
    """Index of the choice in its request."""
    commitment: Commitment
    """Memory commitment of the row."""
    stops: StopStrings
    """Stop strings of the answer."""
    token_source: TokenSource
    """Source of its tokens."""
    produced: int = 0
    """Number of generated tokens."""
    reason: str = ""
    """Reason of its end; empty while it is running."""
    gathered: list[Delta] = field(default_factory=list[Delta])
    """Deltas not sent yet."""
    resumed_tokens: int = 0
    """Number of first tokens that another node generated and sent."""

    def add_token(self, number: int, now: float, *, ends: int, limit: int) -> Delta:
        """Generate the next token of a request with this number, and end the row if it is the last one.

        `ends` is the number of tokens of the scripted answer, `limit` the maximum number of tokens.
        """
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

    def end_replay(self) -> None:
        """Record that all tokens so far were sent by another node, and that none of them is in memory."""
        self.resumed_tokens = self.produced
        self.commitment.reset()

    def join(self, prompt: int) -> None:
        """Record that the row decodes, after a prefill of `prompt` tokens and its resumed ones."""
        self.commitment.record_join(prompt + self.resumed_tokens)

    def gather(self) -> Delta:
        """Return the deltas that were not sent yet as one, and mark them as sent. There must be at least one."""
        gathered, self.gathered = self.gathered, []
        ids = tuple(token for delta in gathered for token in delta.ids)
        text = "".join(text for delta in gathered for _, text in delta.pieces)
        return Delta(gathered[0].request, self.choice, ids, ((Channel.CONTENT, text),) if text else ())


@dataclass(slots=True, eq=False)
class ScriptedSequence:
    """Admitted request in the scripted engine. Times are monotonic seconds."""

    request: Generate
    """The request."""
    shape: RequestShape
    """Its size."""
    ends: int
    """Number of tokens of its scripted answers. It is above the limit if only the limit ends them."""
    crashes: bool
    """Whether its first decode step ends the process."""
    arrived: float
    """Time of arrival."""
    rows: list[ScriptedRow] = field(default_factory=list[ScriptedRow])
    """Its choices."""
    begun: float = 0.0
    """Start of its decode; 0.0 before."""
    last_token_at: float = 0.0
    """Time at which output was last sent."""

    @property
    def number(self) -> int:
        """The coordinator's number of the request."""
        return self.request.request

    @property
    def owner(self) -> WeightedKey:
        """API key of the request."""
        return self.request.owner

    @property
    def width(self) -> int:
        """Number of rows that the request needs."""
        return len(self.rows)

    @property
    def started(self) -> bool:
        """Whether the request decodes."""
        return self.begun > 0

    @property
    def answered(self) -> bool:
        """Whether another node has already generated a part of the answer."""
        return bool(self.request.resume)

    @property
    def age(self) -> tuple[float, int]:
        """Sort key of the request's age, the newest last."""
        return self.arrived, self.number

    @property
    def holds_memory(self) -> bool:
        """Whether any row has tokens in a cache."""
        return any(row.commitment.stored_tokens for row in self.active_rows())

    @property
    def delivered(self) -> bool:
        """Whether any token that this node generated was sent."""
        return any(row.produced > len(row.gathered) + row.resumed_tokens for row in self.rows)

    @property
    def yielded(self) -> bool:
        """False, because no request is preempted for another key."""
        return False

    def active_rows(self) -> Iterator[ScriptedRow]:
        """Return an iterator over the rows that have not ended."""
        return (row for row in self.rows if not row.reason)

    def begin(self, now: float) -> None:
        """Record the start of the decode at the monotonic time `now`."""
        self.begun = self.last_token_at = now

    def mark_sent(self, now: float) -> None:
        """Record that output is sent at the monotonic time `now`."""
        self.last_token_at = now

    def add_token(self, row: ScriptedRow, now: float) -> Delta:
        """Generate the next token of a row of this request at the monotonic time `now`. Return it as a delta."""
        return row.add_token(self.number, now, ends=self.ends, limit=self.shape.limit)

    def finished(self, now: float) -> Finished:
        """Return the last frame of the request, which ends at the monotonic time `now`: reasons, token counts and
        durations."""
        stops = tuple(row.stops.found for row in self.rows)
        return Finished(
            self.number,
            tuple(row.reason for row in self.rows),
            self.shape.prompt,
            sum(row.produced for row in self.rows),
            timings=Timings(self.begun - self.arrived, 0.0, now - self.begun),
            stops=stops if any(stops) else (),
        )

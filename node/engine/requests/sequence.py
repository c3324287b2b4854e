"""Admitted requests in the text engine: rows and their token ids.

The whole past of a row is `prompt + ids`. With the request and its seed, these ids determine all other state:
cache, text and random numbers. A row can therefore be rebuilt from them at any time, here or on another node.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from node.engine.kv.commitments import Commitment
from node.engine.requests.preflight import RequestShape
from node.engine.requests.prepared import PreparedRequest
from node.engine.scheduling.rules.row_state import RowEvent, RowState, step
from node.engine.scheduling.sampling import SamplingParameters
from node.engine.text.detokenizer import TextPipeline
from wire.bounds import LONG_CHARACTERS, MAX_DELTAS
from wire.capacity.fairness import WeightedKey
from wire.frames import Delta, Generate, Logprob


@dataclass(slots=True, eq=False)
class Row:
    """One choice of an admitted request, which decodes as one row of a batch.

    Methods that change `state` raise `IllegalEventError` if their event is illegal in this state.
    """

    sequence: "Sequence"
    """Request of the row."""
    choice: int
    """Index of the choice in its request."""
    commitment: Commitment
    """Memory commitment of the row."""
    pipeline: TextPipeline
    """Text pipeline of the answer."""
    ids: list[int] = field(default_factory=list[int])
    """Ids of the generated tokens."""
    reason: str = ""
    """Finish reason, such as `stop`, or `released` if the request ended before the row's last token. Empty while the
    row runs."""
    state: RowState = RowState.WAITING
    """State of the row."""
    rebuilt: int = 0
    """Number of rebuilds after a broken batch."""
    pieces: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Text not sent yet, as pairs of channel (`wire.frames.Channel`) and text."""
    new: list[int] = field(default_factory=list[int])
    """Token ids not sent yet."""
    logprobs: list[Logprob] = field(default_factory=list[Logprob])
    """Log probabilities not sent yet."""
    resumed_tokens: int = 0
    """Number of leading `ids` that another node generated and sent."""

    def apply(self, event: RowEvent) -> None:
        """Change the state by an event. Raise `IllegalEventError` if the event is illegal in this state."""
        self.state = step(self.state, event)

    def commit(self, commitment: Commitment) -> None:
        """Replace the memory commitment of the row: by a commitment of the ledger, or by a commitment of 0 tokens when
        the row is preempted."""
        self.commitment = commitment

    def release(self) -> None:
        """End the row before its last token, because its request has ended."""
        self.apply(RowEvent.RELEASED)
        self.reason = "released"

    def count_rebuild(self) -> int:
        """Increment and return the number of rebuilds of this row after a broken batch."""
        self.rebuilt += 1
        return self.rebuilt

    def add_id(self, token: int) -> None:
        """Add a generated token to `ids`, to the unsent tokens and to the stored tokens of the commitment. Its text is
        added by `add_token_text`."""
        self.commitment.record_token()
        self.ids.append(token)
        self.new.append(token)

    def replay(self, ids: Iterable[int]) -> None:
        """Restore the state after `ids`, which another node has generated and sent. Their text is not sent again.

        Ids after the end of the answer are ignored. The commitment does not change.
        """
        for token in ids:
            self.ids.append(token)
            self.add_token_text(token)
            if self.reason:
                break
        self.pieces, self.resumed_tokens = [], len(self.ids)

    def add_token_text(self, token: int) -> None:
        """Add the text of `token`, which must already be the last of `ids`. End the row at an end token (`eos`), a stop
        string or `RequestShape.limit`. An end token has no text."""
        sequence = self.sequence
        if token in sequence.prepared.eos:
            self.finish("stop")
            return
        text = self.pipeline.feed(token)
        self.pieces += text.pieces
        if text.stopped:
            self.finish("stop")
        elif len(self.ids) >= sequence.shape.limit:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """End the row after its last token. The text pipeline may replace `reason`, for example after a tool call."""
        pieces, ended = self.pipeline.finish(reason)
        self.apply(RowEvent.FINISHED)
        self.reason = ended
        self.pieces += pieces

    def list_token_ids(self) -> list[int]:
        """Return all known token ids: prompt and answer so far."""
        return [*self.sequence.prompt, *self.ids]

    def drain_deltas(self) -> list[Delta]:
        """Return the unsent tokens, text and log probabilities as one or more deltas, and mark them as sent.

        A delta has at most `MAX_DELTAS` pieces and log probabilities; the first delta has all token ids. Adjacent
        pieces of a channel are joined. If the texts have more than `LONG_CHARACTERS` characters in total, because text
        was held back, each piece is sent in its own delta. Pieces above that length are then cut, except tool calls.
        """
        pieces: list[tuple[int, str]] = []
        for channel, text in self.pieces:
            if pieces and pieces[-1][0] == channel and channel in _JOINABLE:
                pieces[-1] = (channel, pieces[-1][1] + text)
            else:
                pieces.append((channel, text))
        most = MAX_DELTAS
        if sum(len(text) for _, text in pieces) > LONG_CHARACTERS:
            most, pieces = 1, [part for piece in pieces for part in _cut_text(*piece)]
        deltas = [
            Delta(
                self.sequence.number,
                self.choice,
                () if at else tuple(self.new),
                tuple(pieces[at : at + most]),
                tuple(self.logprobs[at : at + most]),
            )
            for at in range(0, max(1, len(pieces), len(self.logprobs)), most)
        ]
        self.pieces, self.new, self.logprobs = [], [], []
        return deltas


_JOINABLE = frozenset({0, 1})
"""Channels whose text can be joined (content, reasoning). A tool call always stays one piece."""


def _cut_text(channel: int, text: str) -> list[tuple[int, str]]:
    if channel not in _JOINABLE:
        return [(channel, text)]
    return [(channel, text[at : at + LONG_CHARACTERS]) for at in range(0, len(text), LONG_CHARACTERS)]


@dataclass(slots=True, eq=False)
class Sequence:
    """Admitted request in the text engine. Times are monotonic seconds."""

    request: Generate
    """The request."""
    prepared: PreparedRequest
    """Tokens and grammar of the request."""
    shape: RequestShape
    """Size of the request in tokens and choices."""
    sampling: SamplingParameters
    """Sampling parameters in force."""
    seed: int
    """Seed of the random draws."""
    arrived: float
    """Time of arrival."""
    rows: list[Row] = field(default_factory=list[Row])
    """Choices of the request."""
    begun: float = 0.0
    """Start of the first prefill; 0.0 before."""
    joined: float = 0.0
    """Time of the first join; 0.0 before."""
    last_token_at: float = 0.0
    """Time of the last sent output, of the first join or of the last packed join, whichever is latest; 0.0 before the
    first join."""
    cached: int = 0
    """Tokens found in the prefix cache at the start of the request."""
    prompt_hash: bytes = b""
    """Hash of the prompt (`prefix_store.hash_prompt`). Empty before the lookup, and if the prefix cache is off or
    cannot store the caches of the model."""
    yielded: bool = False
    """Whether the request was preempted for a key that held fewer rows or less memory. Such a request only precedes new
    requests of its own key (`find_first_preempted`)."""

    @property
    def number(self) -> int:
        """The coordinator's number of the request."""
        return self.request.request

    @property
    def weighted_key(self) -> WeightedKey:
        """API key of the request."""
        return self.request.weighted_key

    @property
    def width(self) -> int:
        """Number of rows that have not ended."""
        return sum(1 for _ in self.iterate_active_rows())

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt."""
        return self.prepared.ids

    @property
    def cache_scope(self) -> str:
        """Scope of the cached prefixes that this request reuses and stores."""
        return self.request.cache_scope or self.request.weighted_key.name

    @property
    def prompt_cached(self) -> int:
        """Number of prompt tokens found in the prefix cache. `cached` may be larger, because a resumed answer may be
        cached as well."""
        return min(self.cached, self.shape.prompt)

    def mark_begun(self, now: float) -> None:
        """Record the start of the first prefill at the monotonic time `now`. Later calls have no effect."""
        if not self.begun:
            self.begun = now

    def mark_joined(self, now: float) -> None:
        """Record the first join at the monotonic time `now`, when the request starts to decode. Later calls have no
        effect."""
        if not self.joined:
            self.joined = self.last_token_at = now

    def mark_sent(self, now: float) -> None:
        """Record that output is sent, or that a packed prompt has joined, at the monotonic time `now`."""
        self.last_token_at = now

    def set_prompt_hash(self, prompt_hash: bytes) -> None:
        """Set the hash of the prompt, because the request uses the prefix cache."""
        self.prompt_hash = prompt_hash

    def set_cached(self, tokens: int) -> None:
        """Set the number of tokens found in the prefix cache. Calls after the first join, for returning rows, have no
        effect."""
        if not self.joined:
            self.cached = tokens

    def mark_yielded(self) -> None:
        """Set `yielded`, because the request is preempted for a key that holds fewer rows or less memory."""
        self.yielded = True

    @property
    def holds_memory(self) -> bool:
        """Whether any row that has not ended has tokens in a cache."""
        return any(row.commitment.stored_tokens for row in self.iterate_active_rows())

    @property
    def age(self) -> tuple[float, int]:
        """Sort key that orders requests from oldest to newest: monotonic time of arrival, and number of the request."""
        return self.arrived, self.number

    @property
    def delivered(self) -> bool:
        """Whether any token that this node generated was sent."""
        return any(len(row.ids) > len(row.new) + row.resumed_tokens for row in self.rows)

    def iterate_active_rows(self) -> Iterator[Row]:
        """Return an iterator over the rows that have not ended."""
        return (row for row in self.rows if not row.reason)

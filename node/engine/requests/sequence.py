"""What the text engine knows of a request: its rows, their ids, and the prefills that are under way.

A row's whole past is `prompt + ids`. Everything else about it (cache, text, draws) follows from these, so a row can be
rebuilt from them at any time, here or on another node.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from node.engine.kv.commitments import Commitment
from node.engine.requests.preflight import Shape
from node.engine.requests.prepared import Prepared
from node.engine.scheduling.sampling import Sampling
from node.engine.text.detokenizer import TextPipeline
from wire.bounds import LONG_CHARACTERS, MAX_DELTAS
from wire.frames import Delta, Generate, Logprob


@dataclass(slots=True, eq=False)
class Row:
    """One answer. `reason` once it has ended; `pieces`, `new` and `logprobs` are what has not been sent yet. The first
    `heard` of its `ids` were heard from another node."""

    sequence: "Sequence"
    choice: int
    commitment: Commitment
    pipeline: TextPipeline
    ids: list[int] = field(default_factory=list[int])
    reason: str = ""
    rebuilt: int = 0
    pieces: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    new: list[int] = field(default_factory=list[int])
    logprobs: list[Logprob] = field(default_factory=list[Logprob])
    heard: int = 0

    def replay(self, ids: Iterable[int]) -> None:
        """Stand where the answer stood after these ids, which were heard: their text is not said again."""
        for token in ids:
            self.ids.append(token)
            self.read(token)
            if self.reason:
                break
        self.pieces, self.heard = [], len(self.ids)

    def read(self, token: int) -> None:
        """Take the newest id into the text, and see whether the answer ends by it."""
        sequence = self.sequence
        if token in sequence.prepared.eos:
            self._finish("stop")
            return
        step = self.pipeline.feed(token)
        self.pieces += step.pieces
        if step.stopped:
            self._finish("stop")
        elif len(self.ids) >= sequence.shape.limit:
            self._finish("length")

    def _finish(self, reason: str) -> None:
        pieces, self.reason = self.pipeline.finish(reason)
        self.pieces += pieces

    def known(self) -> list[int]:
        """Give all ids that are known: prompt and answer so far."""
        return [*self.sequence.prompt, *self.ids]

    def gathered(self) -> list[Delta]:
        """Return what has not been sent yet, neighbouring pieces of a channel as one, MAX_DELTAS pieces in a delta.

        A text that was held back until it was long (a call without an end) is cut into deltas of their own.
        """
        pieces: list[tuple[int, str]] = []
        for channel, text in self.pieces:
            if pieces and pieces[-1][0] == channel and channel in _JOINABLE:
                pieces[-1] = (channel, pieces[-1][1] + text)
            else:
                pieces.append((channel, text))
        most = MAX_DELTAS
        if sum(len(text) for _, text in pieces) > LONG_CHARACTERS:
            most, pieces = 1, [part for piece in pieces for part in _cut(*piece)]
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
"""Text of these channels (content, reasoning) can be joined; a tool call is a piece of its own."""


def _cut(channel: int, text: str) -> list[tuple[int, str]]:
    if channel not in _JOINABLE:
        return [(channel, text)]
    return [(channel, text[at : at + LONG_CHARACTERS]) for at in range(0, len(text), LONG_CHARACTERS)]


@dataclass(slots=True, eq=False)
class Sequence:
    """One admitted request. Times are monotonic seconds; `told` is when something was last sent. `cached` tokens of
    what it began with were found in the prefix cache; without a `prompt_hash` nothing of it is kept there."""

    request: Generate
    prepared: Prepared
    shape: Shape
    sampling: Sampling
    seed: int
    arrived: float
    rows: list[Row] = field(default_factory=list[Row])
    begun: float = 0.0
    joined: float = 0.0
    told: float = 0.0
    cached: int = 0
    prompt_hash: bytes = b""
    yielded: bool = False
    """It was preempted for a key that held less, and takes its turn among all others."""

    @property
    def number(self) -> int:
        """The coordinator's number for it."""
        return self.request.request

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return self.prepared.ids

    @property
    def cache_scope(self) -> str:
        """Return whose cached prefixes it reuses, and whose its own become."""
        return self.request.cache_scope or self.request.owner.name

    @property
    def prompt_cached(self) -> int:
        """Tokens of the prompt alone that were found in the prefix cache: of a resumed answer more may have been."""
        return min(self.cached, self.shape.prompt)

    @property
    def delivered(self) -> bool:
        """Whether any token of it has been sent from here."""
        return any(len(row.ids) > len(row.new) + row.heard for row in self.rows)

    def writing(self) -> Iterator[Row]:
        """Give the rows that are not at their end."""
        return (row for row in self.rows if not row.reason)

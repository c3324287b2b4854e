"""Prefill of a prompt: state from admission to the join with its rows' decode batches."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import mlx.core as mx

from node.engine.grammar.logits_mask import LogitsMask
from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_store import PrefixHit
from node.engine.models.loaded_model import LoadedModel
from node.engine.requests.sequence import Row, Sequence
from node.engine.scheduling.decode_batch import RowSampler
from node.engine.scheduling.sampling import processors_of, sampler_of
from wire.capacity.fairness import WeightedKey

NO_PREFIX: PrefixHit[Layers] = PrefixHit()


@dataclass(slots=True, eq=False)
class PrefixState:
    """Data of a prefill for the prefix cache: keys of the lookup and its result."""

    key: bytes
    """Packed ids of the prefill."""
    prompt_hash: bytes
    """Hash of the prompt."""
    eos: frozenset[int]
    """End-of-turn tokens."""
    scope: str = ""
    """Scope of the sequences that it may reuse, besides shared system prompts: the name of an API key."""
    shared: int = 0
    """Number of first tokens that are a system prompt of all keys."""
    found: PrefixHit[Layers] = NO_PREFIX
    """Result of the last lookup."""
    took: int = 0
    """Tokens of the entry that this prefill removed from the prefix cache for its own use."""
    stops: list[int] = field(default_factory=list[int])
    """Positions in the prompt, in tokens, at which a snapshot is wanted."""


@dataclass(slots=True, eq=False)
class Prefill:
    """Prefill of the past that some rows of a request share: the prompt, or prompt and known answer."""

    loaded_model: LoadedModel
    """Model of the rows."""
    sequence: Sequence
    """Request of the rows."""
    rows: list[Row]
    """Rows that share the past and have not joined yet."""
    ids: list[int]
    """Tokens that the cache must hold."""
    cache: Layers | None = None
    """Cache of the rows; None before the first chunk."""
    logits: mx.array | None = None
    """Logits (1, vocabulary) of the last token; None before the last chunk."""
    written: int = 0
    """Tokens in the cache. Before the first chunk: tokens found in the prefix cache, 0 without a `past`."""
    retry_at: float = 0.0
    """Monotonic time from which the gate may be tried again after a refusal; 0.0 without one."""
    past: PrefixState | None = None
    """Prefix cache state; None: the prefix cache is not used."""
    alone: bool = False
    """Whether it must not be packed with other prompts."""

    @property
    def owner(self) -> WeightedKey:
        """API key of the request."""
        return self.sequence.request.owner

    @property
    def answered(self) -> bool:
        """Return whether the answer was started, here or on another node. Such a prefill precedes new requests, unless
        it was preempted for another key."""
        sequence = self.sequence
        return bool(sequence.joined or sequence.request.resume) and not sequence.yielded

    @property
    def left(self) -> int:
        """Tokens still to prefill."""
        return len(self.ids) - self.written

    def reset_alone(self) -> None:
        """Restart this prefill from its first token, without packing, because the result of a packed prefill could not
        be used."""
        self.cache, self.written, self.alone = None, 0, True
        for row in self.rows:
            row.commitment.written = row.commitment.capacity_tokens = 0


def by_past(rows: Iterable[Row]) -> dict[tuple[int, ...], list[Row]]:
    """Group the rows of a request by the known tokens of their answers, which are the keys of the result."""
    parts: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        parts.setdefault(tuple(row.ids), []).append(row)
    return parts


def by_batch(loaded_model: LoadedModel, rows: list[Row]) -> list[list[Row]]:
    """Group rows by the decode batch to which the ledger of the model has assigned them."""
    parts: dict[int, list[Row]] = {}
    for row in rows:
        parts.setdefault(loaded_model.ledger.batch_of(row.commitment), []).append(row)
    return list(parts.values())


def guard_of(sequence: Sequence, row: Row) -> RowSampler:
    """Return the wrapped sampler of a row, with its logits processors and the mask of its grammar."""
    grammar = sequence.prepared.grammar
    return RowSampler(
        sampler_of(sequence.sampling, sequence.seed, row.choice, len(row.ids)),
        processors_of(sequence.sampling, len(sequence.prompt)),
        None if grammar is None else LogitsMask(grammar, row.ids),
    )

"""A prompt on its way into its rows' decode batches."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import mlx.core as mx

from node.engine.grammar.logits_mask import Masker
from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_store import Found
from node.engine.models.loaded_model import Resident
from node.engine.requests.sequence import Row, Sequence
from node.engine.scheduling.decode_batch import Guard
from node.engine.scheduling.sampling import processors_of, sampler_of
from wire.capacity.fairness import Owner

NOTHING: Found[Layers] = Found()


@dataclass(slots=True, eq=False)
class Past:
    """What a prefill needs to begin with something kept and to leave something behind. `scope`: whose sequences it may
    reuse; the first `shared` tokens are a system prompt that all keys share."""

    key: bytes
    prompt_hash: bytes
    eos: frozenset[int]
    scope: str = ""
    shared: int = 0
    found: Found[Layers] = NOTHING
    took: int = 0
    stops: list[int] = field(default_factory=list[int])


@dataclass(slots=True, eq=False)
class Prefill:
    """Rows whose shared past is being written: all of `ids` have to be in the cache, and `logits` are of the last.
    Before its first chunk `written` is what was found of it in the prefix cache, and without a `past` nothing is. What
    is `alone` is not read together with others."""

    resident: Resident
    sequence: Sequence
    rows: list[Row]
    ids: list[int]
    cache: Layers | None = None
    logits: mx.array | None = None
    written: int = 0
    retry_at: float = 0.0
    past: Past | None = None
    alone: bool = False

    @property
    def owner(self) -> Owner:
        """Whose it is."""
        return self.sequence.request.owner

    @property
    def answered(self) -> bool:
        """Return whether its answer was begun, here or on another node, and it goes before new ones: not one that was
        preempted for another key."""
        sequence = self.sequence
        return bool(sequence.joined or sequence.request.resume) and not sequence.yielded

    @property
    def left(self) -> int:
        """Tokens still to write."""
        return len(self.ids) - self.written

    def again(self) -> None:
        """Begin once more, alone: what was read with others could not be used."""
        self.cache, self.written, self.alone = None, 0, True
        for row in self.rows:
            row.commitment.written = row.commitment.room = 0


def by_past(rows: Iterable[Row]) -> dict[tuple[int, ...], list[Row]]:
    """Part rows by what is known of their answers."""
    parts: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        parts.setdefault(tuple(row.ids), []).append(row)
    return parts


def by_batch(resident: Resident, rows: list[Row]) -> list[list[Row]]:
    """Part rows by the batch that they were promised a place in."""
    parts: dict[int, list[Row]] = {}
    for row in rows:
        parts.setdefault(resident.ledger.batch_of(row.commitment), []).append(row)
    return list(parts.values())


def guard_of(sequence: Sequence, row: Row) -> Guard:
    """Give what stands between a row's sampler, processors and grammar, and its batch."""
    grammar = sequence.prepared.grammar
    return Guard(
        sampler_of(sequence.sampling, sequence.seed, row.choice, len(row.ids)),
        processors_of(sequence.sampling, len(sequence.prompt)),
        None if grammar is None else Masker(grammar, row.ids),
    )

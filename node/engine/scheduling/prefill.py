"""State of the prefill of a prompt, from its admission until its rows join their decode batches."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import mlx.core as mx

from node.engine.grammar.logits_mask import LogitsMask
from node.engine.kv.disk.block_reader import DiskRestore, PlannedPart, ReadPlan
from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_store import CachedPrefix, PrefixHit
from node.engine.kv.window_history import WindowHistory
from node.engine.models.loaded_model import LoadedModel
from node.engine.requests.sequence import Row, Sequence
from node.engine.scheduling.decode_batch import RowSampler
from node.engine.scheduling.rules.row_state import RowEvent
from node.engine.scheduling.sampling import create_processors, create_sampler
from wire.capacity.fairness import WeightedKey

NO_PREFIX: PrefixHit[Layers] = PrefixHit()


@dataclass(slots=True, eq=False)
class PrefixState:
    """State of a prefill for the prefix cache: the lookup and its result, snapshots, history, and restoration."""

    key: bytes
    """Token ids of the prefill, packed (`radix_trie.pack`)."""
    prompt_hash: bytes
    """Hash of the prompt (`prefix_store.hash_prompt`)."""
    eos: frozenset[int]
    """Token ids that end a turn."""
    scope: str = ""
    """Scope of the stored sequences that the prefill may reuse in addition to shared system prompts
    (`Sequence.cache_scope`)."""
    shared: int = 0
    """Number of leading tokens that form a system prompt shared by all keys; 0: none."""
    hit: PrefixHit[Layers] = NO_PREFIX
    """Result of the last lookup."""
    removed_tokens: int = 0
    """Number of tokens in the entry that this prefill took out of the prefix cache; 0 without such an entry, and after
    the prompt is stored."""
    stops: list[int] = field(default_factory=list[int])
    """Positions in the prompt, in tokens, at which snapshots are planned."""
    snapshot_at: int = 0
    """Number of tokens in the cache at the last snapshot; before the first snapshot, at the start of the prefill."""
    snapshots: list[CachedPrefix[Layers]] = field(default_factory=list[CachedPrefix[Layers]])
    """Snapshots that were taken because the prompt is long, oldest first."""
    history: WindowHistory | None = None
    """History of the sliding windows so far; None without windows, before the start, and after the prompt is
    stored."""

    plan: ReadPlan | None = None
    """Files of the disk cache from which the prefill will start; None if there are none, and after the restoration."""
    restoring: DiskRestore | None = None
    """Restoration of the files of `plan` in progress; None before its start and after its end."""
    restored: tuple[PlannedPart, ...] = ()
    """Files from which the prompt was restored."""

    def record_lookup(self, hit: PrefixHit[Layers], stops: list[int]) -> None:
        """Set the result of a lookup, and the positions `stops` at which snapshots are planned."""
        self.hit, self.stops = hit, stops

    def discard_lookup(self) -> None:
        """Clear the result and the plan of the lookup, and end a restoration in progress, because the result was used
        or cannot be used. In the second case, the prompt is prefilled from its first token or looked up again."""
        self.hit, self.plan = NO_PREFIX, None
        self.set_restoring(None)

    def record_snapshot(self, tokens: int, entry: CachedPrefix[Layers] | None = None) -> None:
        """Record a snapshot at `tokens` tokens, or the start of the prefill with `tokens` cached tokens. `entry` is the
        snapshot if it was taken because the prompt is long, else None."""
        self.snapshot_at = tokens
        if entry is not None:
            self.snapshots.append(entry)

    def take_snapshots(self, count: int) -> list[CachedPrefix[Layers]]:
        """Remove all but the newest `count` snapshots from `snapshots`, and return the removed ones, oldest first. They
        stay in the prefix cache."""
        taken = self.snapshots[: max(0, len(self.snapshots) - count)]
        self.snapshots = self.snapshots[len(taken) :]
        return taken

    def record_removal(self, tokens: int) -> None:
        """Set the number of tokens in the entry that this prefill took out of the prefix cache; 0 after its prompt is
        stored."""
        self.removed_tokens = tokens

    def set_plan(self, plan: ReadPlan | None) -> None:
        """Set the files of the disk cache from which the prefill will start; None if there are none."""
        self.plan = plan

    def set_restoring(self, restoring: DiskRestore | None) -> None:
        """Set the restoration in progress, or None. Close the earlier restoration, if there is one."""
        if self.restoring is not None:
            self.restoring.close()
        self.restoring = restoring

    def record_restored(self, parts: tuple[PlannedPart, ...]) -> None:
        """Set the files from which the prompt was restored."""
        self.restored = parts

    def set_history(self, history: WindowHistory | None) -> None:
        """Set the history of the sliding windows so far; None after the prompt is stored or the prefill has ended."""
        self.history = history


@dataclass(slots=True, eq=False)
class Prefill:
    """Prefill of the tokens that some rows of a request share: the prompt, and answer tokens that are already known.

    Methods that change the state of rows raise `IllegalEventError` if the event is illegal in that state.
    """

    loaded_model: LoadedModel
    """Model of the rows."""
    sequence: Sequence
    """Request of the rows."""
    rows: list[Row]
    """Rows that share the tokens `ids` and have not joined yet."""
    ids: list[int]
    """Ids of the tokens to prefill, including cached tokens."""
    is_return: bool = False
    """Whether a row of the request had joined a batch before: the rows of this prefill return after a preemption or a
    broken batch."""
    cache: Layers | None = None
    """Cache of the rows; None before the first chunk."""
    logits: mx.array | None = None
    """Logits (1, vocabulary) after the last token; None before the last chunk and after a packed prefill."""
    stored_tokens: int = 0
    """Number of tokens in the cache. Before the first chunk: tokens found in the prefix cache, 0 without a `past`.
    After a packed prefill: all tokens, although the first decode step writes the last of them."""
    retry_at: float = 0.0
    """Monotonic time of the next attempt after a refusal by the gate; 0.0 without a refusal."""
    past: PrefixState | None = None
    """Prefix cache state; None: the prefix cache is not used."""
    alone: bool = False
    """Whether the prefill must not be packed with other prompts."""

    @property
    def weighted_key(self) -> WeightedKey:
        """API key of the request."""
        return self.sequence.request.weighted_key

    @property
    def arrived(self) -> float:
        """Monotonic time at which the request arrived."""
        return self.sequence.arrived

    @property
    def width(self) -> int:
        """Number of rows that have not joined."""
        return len(self.rows)

    @property
    def started(self) -> bool:
        """Whether the prefill has a cache. Its rows then count as rows of the decode batch."""
        return self.cache is not None

    @property
    def answered(self) -> bool:
        """Whether the answer was started, here or on another node, and the request was not preempted for another key.
        The prefill of an answered request gets rows before the prefill of a new request (`compute_service_order`)."""
        sequence = self.sequence
        return bool(sequence.joined or sequence.request.resume) and not sequence.yielded

    @property
    def left(self) -> int:
        """Number of tokens still to prefill."""
        return len(self.ids) - self.stored_tokens

    def bound_chunk(self, count: int) -> int:
        """Return the number of tokens in the next chunk: `count`, or fewer if the next planned snapshot is before the
        end of such a chunk."""
        stops = () if self.past is None else self.past.stops
        return min([count, *(stop - self.stored_tokens for stop in stops if stop > self.stored_tokens)])

    # changes

    def use_prefix_cache(self, past: PrefixState) -> None:
        """Set the prefix cache state of this prefill, which uses the prefix cache."""
        self.past = past

    def set_cached_tokens(self, tokens: int) -> None:
        """Set the number of tokens found in the prefix cache. Must be called before the first chunk."""
        self.stored_tokens = tokens

    def start(self, cache: Layers) -> None:
        """Set the cache with which the prefill starts."""
        self.cache = cache

    def delay(self, retry_at: float) -> None:
        """Set the monotonic time of the next attempt, because the gate has refused the chunk or join."""
        self.retry_at = retry_at

    def end_delay(self) -> None:
        """Clear `retry_at`, because the gate has passed the chunk."""
        self.retry_at = 0.0

    def begin_chunk(self) -> None:
        """Apply `RowEvent.CHUNK` to the rows, because the forward of a chunk begins or the cache was restored from the
        disk."""
        for row in self.rows:
            row.apply(RowEvent.CHUNK)

    def end_chunk(self, count: int, capacity_tokens: int, logits: mx.array | None) -> None:
        """Record a chunk of `count` tokens. The growing layers of the cache have room for `capacity_tokens` tokens on
        average. `logits` (1, vocabulary) are the logits after the prompt's last token; None before the last chunk."""
        self.stored_tokens += count
        self.logits = logits
        self.rows[0].commitment.record_prefill(self.stored_tokens, capacity_tokens)
        if logits is not None:
            for row in self.rows:
                row.apply(RowEvent.PREFILLED)

    def end_packed(self, capacity_tokens: int) -> None:
        """Record a packed prefill of all tokens but the last, which used no cached tokens. The last token counts as
        stored, because the first decode step stores it.

        The growing layers of the cache have room for `capacity_tokens` tokens on average.
        """
        if self.past is not None:
            self.past.discard_lookup()
        self.sequence.set_cached(0)
        self.stored_tokens = len(self.ids)
        self.rows[0].commitment.record_prefill(self.stored_tokens, capacity_tokens)
        for row in self.rows:
            row.apply(RowEvent.CHUNK)
            row.apply(RowEvent.PREFILLED)

    def remove_joined(self) -> None:
        """Remove the rows that have joined their batches."""
        self.rows = [row for row in self.rows if not row.commitment.is_joined]

    def reset_alone(self) -> None:
        """Restart this prefill from its first token, without packing, because the result of a packed prefill could not
        be used."""
        self.cache, self.stored_tokens, self.alone = None, 0, True
        for row in self.rows:
            row.commitment.reset()
            row.apply(RowEvent.RESTARTED)

    def clear(self) -> None:
        """Release the arrays of this prefill, and end its restoration from the disk.

        A remaining reference to the prefill then keeps no memory.
        """
        self.cache = self.logits = None
        if self.past is not None:
            self.past.set_history(None)
            self.past.set_restoring(None)


def group_by_past(rows: Iterable[Row]) -> dict[tuple[int, ...], list[Row]]:
    """Return the rows of a request by the token ids that their answers already have.

    These ids are empty for rows of a new request. Those of rows of a resumed or preempted request may differ.
    """
    parts: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        parts.setdefault(tuple(row.ids), []).append(row)
    return parts


def group_by_batch(loaded_model: LoadedModel, rows: list[Row]) -> list[list[Row]]:
    """Group rows by the decode batch to which the ledger of the model has assigned them. Return one list per batch."""
    parts: dict[int, list[Row]] = {}
    for row in rows:
        parts.setdefault(loaded_model.ledger.get_batch_number(row.commitment), []).append(row)
    return list(parts.values())


def create_row_sampler(sequence: Sequence, row: Row) -> RowSampler:
    """Return the sampler of a row, with its logits processors and the mask of its grammar."""
    grammar = sequence.prepared.grammar
    return RowSampler(
        create_sampler(sequence.sampling, sequence.seed, row.choice, len(row.ids)),
        create_processors(sequence.sampling, len(sequence.prompt)),
        None if grammar is None else LogitsMask(grammar, row.ids),
    )

"""Prefix cache in the scheduler: restore the start of a row, and store rows at their end.

    begin ─► find ─► (gate) ─► restore ─► prefill ─► reached ─► … ─► prompt_written ─► decode ─► row_ended
             looks up          copies or     snapshots for caches    the prompt's own    the whole row,
                               takes         that cannot be cut      state               copied out

Rules
- Lookup: A lookup guarantees nothing: the gate runs in between and may evict the entry. `restore` uses only live
  entries.
- Commitment: A request commits its whole prompt, cached or not. A copy takes no memory until its first write, and then
  as much as a new cache. `need`, ledger and gate therefore ignore the prefix cache.
- Reuse: The next turn of a conversation starts with *all* of a stored sequence and will be stored itself. It takes the
  cache instead of copying it. If it is cancelled before it has stored anything, it puts that cache back.
- Storage: A sequence is stored only if it passes the same check as a request, and it is evaluated at once.
- Eviction: Cached bytes are evicted first (`free_memory`). They never cause a refusal.
- Scopes: A request finds sequences of its own key. From other keys it finds only the system prompt that all keys share.
  The tokens of that message are stored a second time as a snapshot, in a scope of all keys.
- Faults: After any fault of a model none of its entries is used again (`invalidate`), because the fault may be in an
  entry.

Snapshots of a prompt are taken in three places, for caches that cannot be cut
- Turns: After the last end-of-turn token. The user's message is the last part that the next turn's prompt is sure to
  repeat. The rest (start of the answer, thinking marks) belongs to the template, and templates change it.
- Branches: At the end of the prefix shared with a stored prompt. Another request has the same start, most likely a
  system prompt. The third such request finds the snapshot.
- System prompts: After a system prompt that all keys share.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from host.heap import trim
from node.engine.kv.kv_cache import (
    CacheTrimMode,
    Layers,
    copy_prefix,
    create_cache,
    find_trim_mode,
    materialize,
    sum_nbytes,
)
from node.engine.kv.prefix_store import MIN_PREFIX_TOKENS, CachedPrefix, PrefixCache, PrefixHit, hash_prompt
from node.engine.kv.radix_trie import ID_BYTES, pack
from node.engine.memory.footprint import clear_buffers
from node.engine.models.loaded_model import LoadedModel
from node.engine.requests.sequence import Row
from node.engine.scheduling.decode_batch import DecodeBatch
from node.engine.scheduling.prefill import NO_PREFIX, Prefill, PrefixState
from wire.capacity.arithmetic import Fits, exceeds_headroom, judge
from wire.capacity.batches import compute_row_bytes
from wire.frames import SHARED_SCOPE
from wire.report import CacheState, Memory
from wire.units import parse_size

TURN_END_TOKENS = 64
"""Number of tokens at a prompt's end in which the last end-of-turn token is searched."""
MAX_TEMPLATE_TOKENS = 8
"""Tokens that a template may append to the user's message where no token ends a turn."""
MIN_SNAPSHOT_TOKENS = 64
"""Tokens beyond the cached ones from which a shared prefix is worth a snapshot."""
AUTO, OFF = "auto", "off"
AUTO_SHARE = 0.15
"""Limit of the prefix cache with `auto`, as a share of the cap minus the weights."""
RECLAIMABLE_SHARE = 7 / 8
"""Share of the cached bytes that the system is certain to get back: allocators keep parts of pages."""


def compute_limit(setting: str | int, cap: int, weights: int) -> int:
    """Return the limit of the prefix cache in bytes, from the setting `engine.mlx.prefix_cache_size`; 0: off.

    `cap` and `weights`, the weights of all loaded models, are in bytes. Raise `ValueError` if the setting is no size.
    """
    if setting == AUTO:
        return max(0, int(AUTO_SHARE * (cap - weights)))
    return 0 if setting == OFF else parse_size(setting)


class PrefixCacheManager:
    """Prefix cache of the scheduler: lookup and storage for rows, and eviction for the engine (see the module's
    docstring).

    `store` has the sequences. `memory()` reads the memory now. `limit(cap)` returns the limit of the cache in bytes
    under a cap. `on_released()` is called after memory was freed.
    """

    def __init__(
        self,
        store: PrefixCache[Layers],
        memory: Callable[[], Memory],
        limit: Callable[[int], int],
        on_released: Callable[[], None],
    ) -> None:
        self._store = store
        self._memory = memory
        self._limit = limit
        self._on_released = on_released
        self._trim_modes: dict[str, CacheTrimMode] = {}

    # for the engine

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self._store.nbytes

    @property
    def entries(self) -> tuple[CachedPrefix[Layers], ...]:
        """Entries, least recently used first."""
        return self._store.entries

    @property
    def reusable(self) -> int:
        """Bytes that are certain to be free once all entries are evicted."""
        return int(self._store.nbytes * RECLAIMABLE_SHARE)

    def get_state(self) -> CacheState:
        """Return the bytes, the entries and the counts since the start, with the prompt hashes of the last
        evictions."""
        return self._store.get_state()

    def free_memory(self, need: int) -> bool:
        """Evict the least recently used entries until `need` bytes fit; return whether they fit. Evict nothing if all
        entries would not suffice."""
        return _fits(self._memory(), need - self.nbytes) and self.evict_until_fits(need)

    def evict_until_fits(self, need: int) -> bool:
        """Evict the least recently used entries until `need` bytes fit or none is left; return whether they fit."""
        memory = self._memory()
        while self.nbytes and exceeds_headroom(memory, need):
            self._store.evict(max(1, need - (memory.headroom or 0)))
            clear_buffers()
            trim()
            self._on_released()
            memory = self._memory()
        return _fits(memory, need)

    def evict_until(self, enough: Callable[[], bool]) -> None:
        """Evict the least recently used entries until `enough()` or none is left."""
        while self.nbytes and not enough():
            self._store.evict(1)
            clear_buffers()
            trim()
            self._on_released()

    def evict_model(self, model: str) -> None:
        """Evict all entries of a model that is unloaded."""
        self._store.evict_model(model)
        self._trim_modes.pop(model, None)

    def invalidate(self, model: str) -> None:
        """Evict all entries of a model after a fault, because the fault may be in an entry."""
        self._store.evict_model(model)

    # prompts

    def begin_lookup(self, prefill: Prefill) -> None:
        """Find the cached prefix of a prefill, for a new request or for a preempted or rebuilt row. Set its `past`,
        or leave that None if the prefix cache is not used.

        Set `sequence.cached` to the number of cached tokens, except for rows that return after their first join.
        """
        if self._limit(self._memory().cap) <= 0 or self._get_trim_mode(prefill.loaded_model) is CacheTrimMode.NEVER:
            return
        key, sequence = pack(prefill.ids), prefill.sequence
        prompt, scope = key[: len(sequence.prompt) * ID_BYTES], sequence.cache_scope
        sequence.set_prompt_hash(hash_prompt(f"{prefill.loaded_model.descriptor.fingerprint} {scope}", prompt))
        shared = 0 if scope == SHARED_SCOPE else sequence.prepared.shared
        prefill.use_prefix_cache(PrefixState(key, sequence.prompt_hash, sequence.prepared.eos, scope, shared))
        self.find_prefix(prefill)
        sequence.set_cached(prefill.stored_tokens)

    def find_prefix(self, prefill: Prefill) -> None:
        """Find the longest cached prefix of a prefill, and store it in `past`. Set `stored_tokens` to its number of
        tokens, and `past.stops` to the positions of wanted snapshots.

        Do nothing if the prefill has a cache already, or does not use the prefix cache. Repeat this before the first
        chunk, because entries may have been evicted or stored since.
        """
        past, loaded_model = prefill.past, prefill.loaded_model
        if past is None or prefill.cache is not None:
            return
        cut = self._get_trim_mode(loaded_model) is CacheTrimMode.CUT
        hit = self._find_prefix(loaded_model.name, past, cut=cut)
        stops = [] if cut else choose_snapshot_positions(prefill.ids, past.eos, hit.length, hit.shared, past.shared)
        past.record_lookup(hit, stops)
        prefill.set_cached_tokens(hit.length)

    def _find_prefix(self, model: str, past: PrefixState, *, cut: bool) -> PrefixHit[Layers]:
        """Return the longest prefix among the sequences of the request's own key and the shared system prompts."""
        own = self._store.find(model, past.key, cut=cut, scope=past.scope)
        if past.shared <= own.length:
            return own
        opening = past.key[: (past.shared + 1) * ID_BYTES]  # one token of a prompt must be computed
        common = self._store.find(model, opening, cut=cut, scope=SHARED_SCOPE)
        return replace(common, shared=own.shared) if common.length > own.length else own

    def restore(self, prefill: Prefill) -> bool:
        """Set the cache with which a prefill starts: the cached prefix, or an empty cache.

        Return False if the entry was evicted since the lookup: the gate must then check the whole prompt.
        """
        past = prefill.past
        hit = NO_PREFIX if past is None else past.hit
        entry = hit.entry
        if entry is None:
            prefill.start(create_cache(prefill.loaded_model.model))
        elif entry.value is None:
            return False
        elif past is not None and entry.length == hit.length and not entry.snapshot:
            prefill.start(self._store.pop(entry))
            past.record_removal(hit.length)
        else:
            prefill.start(copy_prefix(entry.value, hit.length))
        if past is not None:
            prefill.sequence.set_cached(hit.length)
            past.discard_lookup()
        if hit.length:
            self._store.count_hit(hit.length)
        return True

    def take_snapshot(self, prefill: Prefill) -> None:
        """Store a snapshot of a prefill if one is wanted at the end of this chunk, it is not cached, and memory
        suffices."""
        past, cache = prefill.past, prefill.cache
        if past is None or cache is None or prefill.stored_tokens not in past.stops:
            return
        key = past.key[: prefill.stored_tokens * ID_BYTES]
        scope = SHARED_SCOPE if prefill.stored_tokens == past.shared else past.scope
        if not self._store.covers(prefill.loaded_model.name, key, cut=False, scope=scope) and self._make_room(
            sum_nbytes(cache)
        ):
            self._store_entry(prefill.loaded_model, key, materialize(cache), past.prompt_hash, scope, snapshot=True)

    def _store_shared_prompt(self, prefill: Prefill, layers: Layers, transient: int) -> None:
        """Store the tokens of a shared system prompt for all keys, where caches can be cut."""
        past = prefill.past
        if past is None or not past.shared:
            return
        name, key = prefill.loaded_model.name, past.key[: past.shared * ID_BYTES]
        opening = copy_prefix(layers, past.shared)
        if not self._store.covers(name, key, cut=True, scope=SHARED_SCOPE) and self._make_room(
            sum_nbytes(opening), transient
        ):
            self._store_entry(prefill.loaded_model, key, materialize(opening), b"", SHARED_SCOPE, snapshot=True)

    def store_prompt(self, prefill: Prefill, transient: int) -> None:
        """Store the state of a whole prompt while its rows decode, because the next prompt may start with it.

        This applies only to caches that can be cut, if the state is not cached and memory suffices. The join copies the
        cache without this as well; `transient` is the bytes of that copy.
        """
        past, cache = prefill.past, prefill.cache
        if past is None or cache is None or self._get_trim_mode(prefill.loaded_model) is not CacheTrimMode.CUT:
            return
        name, scope = prefill.loaded_model.name, past.scope
        past.record_removal(0)
        self._store_shared_prompt(prefill, cache, transient)
        covered = self._store.covers(name, past.key, cut=True, scope=scope)
        if not covered and self._make_room(sum_nbytes(cache), transient):
            self._store.remove_redundant(self._store.find_redundant(name, past.key, scope))
            self._store_entry(prefill.loaded_model, past.key, cache.copy(), past.prompt_hash, scope)

    def store_packed(self, prefill: Prefill, row: Layers, transient: int) -> None:
        """Store a copy of the state of a packed prompt, unless it is cached or memory does not suffice.

        `row` is a view of the packed cache with all tokens of the prompt but the last. `transient` is the bytes that
        the join of the packed prompts needs for a moment.
        """
        past = prefill.past
        if past is None:
            return
        name, key, scope = prefill.loaded_model.name, past.key[:-ID_BYTES], past.scope
        self._store_shared_prompt(prefill, row, transient)
        if not self._store.covers(name, key, cut=True, scope=scope) and self._make_room(sum_nbytes(row), transient):
            self._store.remove_redundant(self._store.find_redundant(name, key, scope))
            self._store_entry(prefill.loaded_model, key, materialize(row), past.prompt_hash, scope)

    def put_back(self, prefill: Prefill) -> None:
        """Store again the prefix that a prefill took out of the cache, because its request was cancelled.

        Do nothing if the prefill took none or has stored its prompt, if the cache cannot be cut, or without memory.
        """
        past, cache = prefill.past, prefill.cache
        if past is None or cache is None or not past.removed_tokens:
            return
        key = past.key[: past.removed_tokens * ID_BYTES]
        layers = copy_prefix(cache, past.removed_tokens)
        if self._get_trim_mode(prefill.loaded_model) is CacheTrimMode.CUT and self._make_room(sum_nbytes(layers)):
            self._store_entry(prefill.loaded_model, key, materialize(layers), past.prompt_hash, past.scope)

    # answers

    def store_row(self, loaded_model: LoadedModel, row: Row, batch: DecodeBatch[Row]) -> None:
        """Store the cache of a request's first choice at its end, before the row is dropped from its batch.

        Do nothing if the sequence is cached already or memory does not suffice. Exceptions of the batch propagate.
        """
        sequence = row.sequence
        if row.choice or not sequence.prompt_hash:
            return
        ids, cut = batch.get_ids(row), self._get_trim_mode(loaded_model) is CacheTrimMode.CUT
        key, scope = pack(ids), sequence.cache_scope
        if len(ids) < MIN_PREFIX_TOKENS or self._store.covers(loaded_model.name, key, cut=cut, scope=scope):
            return
        if self._make_room(compute_row_bytes(loaded_model.kv, len(ids))):
            if cut:
                self._store.remove_redundant(self._store.find_redundant(loaded_model.name, key, scope))
            self._store_entry(loaded_model, key, batch.extract(row), sequence.prompt_hash, scope)

    def _store_entry(
        self,
        loaded_model: LoadedModel,
        key: bytes,
        layers: Layers,
        prompt_hash: bytes,
        scope: str,
        *,
        snapshot: bool = False,
    ) -> None:
        if len(key) >= MIN_PREFIX_TOKENS * ID_BYTES:
            self._store.store(
                CachedPrefix(loaded_model.name, key, layers, sum_nbytes(layers), prompt_hash, snapshot, scope)
            )

    def _make_room(self, size: int, transient: int = 0) -> bool:
        """Evict older entries until `size` bytes fit into the limit of the cache and the memory; return whether they
        fit."""
        memory = self._memory()
        limit = self._limit(memory.cap)
        if size > limit or not _fits(memory, size + transient - self.nbytes):
            return False
        if self.nbytes + size > limit:
            self._store.evict(self.nbytes + size - limit)
            self._on_released()
        return self.free_memory(size + transient)

    def _get_trim_mode(self, loaded_model: LoadedModel) -> CacheTrimMode:
        mode = self._trim_modes.get(loaded_model.name)
        if mode is None:
            mode = self._trim_modes[loaded_model.name] = find_trim_mode(create_cache(loaded_model.model))
        return mode


def choose_snapshot_positions(
    ids: list[int], eos: Collection[int], cached: int, shared: int, system: int = 0
) -> list[int]:
    """Return the positions in a prompt, in tokens, at which a cache that cannot be cut is worth a snapshot (see the
    module's docstring).

    `cached` tokens of the prompt are cached. Some stored sequence shares its first `shared` tokens. Its first `system`
    tokens are a system prompt of all keys.
    """
    most = len(ids) - 1
    ends = (place for place in range(most, max(0, most - TURN_END_TOKENS), -1) if ids[place - 1] in eos)
    turn = next(ends, most - MAX_TEMPLATE_TOKENS)
    branch = shared if shared >= cached + MIN_SNAPSHOT_TOKENS else 0
    places = min(branch, most), min(system, most), turn
    return sorted({place for place in places if place > cached and place >= MIN_PREFIX_TOKENS})


def _fits(memory: Memory, need: int) -> bool:
    return isinstance(judge(memory, need), Fits)

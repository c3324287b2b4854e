"""Prefix cache in the scheduler: restore the cached start of a prompt, and store prompts and ended rows.

    begin_lookup ─► find_prefix ─► (gate) ─► restore ─► record_chunk ─► … ─► store_prompt ─► decode ─► store_row
                    looks up                 copies or   snapshots of         the prompt's              the whole row,
                                             takes       caches without cut   own state                 copied out

Rules
- Lookup: A lookup guarantees nothing: the gate runs in between and may evict the entry. `restore` uses only live
  entries.
- Commitment: A request commits its whole prompt, cached or not. A copy takes no memory until its first write, and then
  as much as a new cache. Estimates, ledger and gate therefore ignore the prefix cache.
- Reuse: The next turn of a conversation starts with *all* tokens of a stored sequence, and will itself be stored. Its
  prefill therefore takes the entry out of the store and uses the cache without a copy, unless the entry is a snapshot.
  If the request is cancelled before its prompt is stored, the entry is stored again if it can be cut and memory has
  room.
- Storage: A sequence is stored only if it passes the same check as a request, and it is evaluated at once.
- Eviction: Cached bytes are evicted before a request is refused for memory (`ModelManager.free_memory`). They never
  cause a refusal.
- Scopes: A request finds sequences of its own scope (`Sequence.cache_scope`), usually its key. From other keys it finds
  only the system prompt that all keys share. The tokens of that prompt are stored a second time as a snapshot, in a
  scope of all keys.
- Faults: After a fault of a model, all its entries in memory are evicted (`invalidate`), because the fault may be in an
  entry. Of its files on the disk, only files that a failed prefill has read, and files of its snapshots, are removed.
- Windows: Caches with sliding windows can be cut as well, because the tokens that leave a window are recorded during
  the prefill (`window_history`). A history in progress counts as cached, and is released before any entry.
- Snapshots: Where caches cannot be cut, snapshots are taken within the prompt (`rules.snapshots`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from node.engine.kv.disk.write_queue import RowView
from node.engine.kv.kv_cache import (
    CacheTrimMode,
    Layers,
    copy_prefix,
    count_arrays,
    create_cache,
    find_trim_mode,
    materialize,
    sum_nbytes,
)
from node.engine.kv.prefix_memory import PrefixMemory
from node.engine.kv.prefix_store import MIN_PREFIX_TOKENS, CachedPrefix, PrefixCache, PrefixHit, hash_prompt
from node.engine.kv.radix_trie import ID_BYTES, pack
from node.engine.kv.window_history import (
    begin_history,
    compute_cuts,
    cut_layers,
    extend_history,
    materialize_layers,
    restore_layers,
)
from node.engine.models.loaded_model import LoadedModel
from node.engine.requests.sequence import Row
from node.engine.scheduling.decode_batch import DecodeBatch
from node.engine.scheduling.disk.disk_tier import DiskTier
from node.engine.scheduling.prefill import NO_PREFIX, Prefill, PrefixState
from node.engine.scheduling.rules.snapshots import (
    MAX_LONG_SNAPSHOTS,
    choose_snapshot_positions,
    is_long_snapshot_due,
)
from wire.capacity.batches import compute_row_bytes
from wire.frames import SHARED_SCOPE
from wire.report import CacheState


class TrimModes:
    """Trim modes (`CacheTrimMode`) of the loaded models, each determined once from an empty cache of the model."""

    def __init__(self) -> None:
        self._modes: dict[str, CacheTrimMode] = {}

    def find(self, loaded_model: LoadedModel) -> CacheTrimMode:
        """Return the trim mode of a model's caches: the mode of the most restrictive layer."""
        mode = self._modes.get(loaded_model.name)
        if mode is None:
            mode = self._modes[loaded_model.name] = find_trim_mode(create_cache(loaded_model.model))
        return mode

    def remove(self, model: str) -> None:
        """Remove the trim mode of the model with this name, because the model is unloaded."""
        self._modes.pop(model, None)


class PrefixCacheManager:
    """Prefix cache of the scheduler: lookup and storage for rows (see the module's docstring).

    `store` has the entries in memory. `memory` evicts entries, to make room for new entries or to free memory for the
    engine. `disk` has the entries on the disk.
    """

    def __init__(self, store: PrefixCache[Layers], memory: PrefixMemory, disk: DiskTier) -> None:
        self.disk = disk
        self.memory = memory
        self._store = store
        self._trim_modes = TrimModes()

    # for the engine

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, of the histories of prefills in progress, and of the parts queued for the disk."""
        return self.memory.nbytes

    @property
    def entries(self) -> tuple[CachedPrefix[Layers], ...]:
        """Entries, least recently used first."""
        return self._store.entries

    def get_state(self, fingerprints: Mapping[str, str]) -> CacheState:
        """Return the state of the cache in memory and on the disk, with the prompt hashes of the last evictions. First
        count the evictions of prompts that neither memory nor disk has any longer. `fingerprints` has the fingerprints
        of the node's models by name."""
        for prompt_hash in self.disk.take_lost():
            self._store.count_eviction(prompt_hash)
        return self.disk.describe(self._store.get_state(), self._store.describe_models(), fingerprints)

    def clear(self, model: str, fingerprint: str) -> None:
        """Delete the entries of a model in memory and its files (`DiskTier.clear`); of all models if `fingerprint` is
        empty. Raise `OSError` if files remain, and `BlockingIOError` if another process writes to the folder."""
        for entry in self._store.entries:
            if not fingerprint or entry.model == model:
                entry.set_copy(None)  # its files are deleted next
                self._store.evict_entry(entry)
        self.disk.clear(fingerprint)

    def evict_until(self, enough: Callable[[], bool]) -> None:
        """Release histories of prefills, then the least recently used entries, then parts queued for the disk. Stop
        when `enough()` is true or nothing more can be released."""
        self.memory.evict_until(enough)

    def evict_model(self, model: str) -> None:
        """Evict all entries of a model that is unloaded, and remove its trim mode."""
        self._store.evict_model(model)
        self._trim_modes.remove(model)

    def invalidate(self, model: str) -> None:
        """Evict all entries of a model from memory, because a fault may be in an entry. Copies on the disk stay."""
        self._store.evict_model(model)

    # prompts

    def begin_lookup(self, prefill: Prefill) -> None:
        """Find the cached prefix of a prefill, for a new request or for a preempted or rebuilt row. Set `prefill.past`
        and the request's prompt hash. Before the first join, set `sequence.cached` to the number of cached tokens. Do
        nothing if the prefix cache is off or cannot store the caches of the model."""
        if self.memory.compute_limit() <= 0 or self._trim_modes.find(prefill.loaded_model) is CacheTrimMode.NEVER:
            return
        key, sequence = pack(prefill.ids), prefill.sequence
        prompt, scope = key[: len(sequence.prompt) * ID_BYTES], sequence.cache_scope
        sequence.set_prompt_hash(hash_prompt(f"{prefill.loaded_model.descriptor.fingerprint} {scope}", prompt))
        shared = 0 if scope == SHARED_SCOPE else sequence.prepared.shared
        prefill.use_prefix_cache(PrefixState(key, sequence.prompt_hash, sequence.prepared.eos, scope, shared))
        self.find_prefix(prefill)
        sequence.set_cached(prefill.stored_tokens)

    def find_prefix(self, prefill: Prefill) -> None:
        """Find the longest cached prefix of a prefill, and record it in `past`: in memory as `hit`, on the disk as
        `plan`. Set `stored_tokens` to the prefix's tokens, and `past.stops` to the positions of planned snapshots.

        Do nothing if the prefill already has a cache, is being restored from the disk, or does not use the prefix
        cache. Must be repeated before the first chunk, because entries may have been evicted or stored since.
        """
        past, loaded_model = prefill.past, prefill.loaded_model
        if past is None or prefill.cache is not None or past.restoring is not None:
            return
        mode = self._trim_modes.find(loaded_model)
        hit = self._find_prefix(loaded_model.name, past, cut=mode is not CacheTrimMode.EXACT)
        positions = choose_snapshot_positions(prefill.ids, past.eos, hit.length, hit.shared, past.shared)
        stops = [] if mode is CacheTrimMode.CUT else positions
        past.record_lookup(hit, stops)
        prefill.set_cached_tokens(self.disk.find(prefill, past, hit.length) or hit.length)

    def _find_prefix(self, model: str, past: PrefixState, *, cut: bool) -> PrefixHit[Layers]:
        """Return the longest prefix among the sequences of the request's scope and the shared system prompts."""
        own = self._store.find(model, past.key, cut=cut, scope=past.scope)
        if past.shared <= own.length:
            return own
        opening = past.key[: (past.shared + 1) * ID_BYTES]  # one token of a prompt must be computed
        common = self._store.find(model, opening, cut=cut, scope=SHARED_SCOPE)
        return replace(common, shared=own.shared) if common.length > own.length else own

    def restore(self, prefill: Prefill) -> bool:
        """Set the cache with which a prefill starts: the cached prefix, which counts as a hit, or an empty cache.

        An entry whose tokens are all used is taken out of the cache, not copied, unless it is a snapshot. Return False
        if the entry was evicted since the lookup; the prompt must then be looked up and pass the gate again.
        """
        past = prefill.past
        hit = NO_PREFIX if past is None else past.hit
        entry, layers = hit.entry, Layers()
        if entry is None:
            prefill.start(create_cache(prefill.loaded_model.model))
        elif entry.value is None:
            return False
        else:
            layers, last = entry.value, entry.length == hit.length and not entry.snapshot
            prefill.start(restore_layers(layers, hit.length, copy=not last))
            if last and past is not None:
                self._store.pop(entry)
                past.record_removal(hit.length)
        if past is not None and self._trim_modes.find(prefill.loaded_model) is CacheTrimMode.WINDOW:
            past.set_history(self.memory.histories.add(begin_history(layers, hit.length)))
        if past is not None:
            prefill.sequence.set_cached(hit.length)
            past.discard_lookup()
            past.record_snapshot(hit.length)
        if hit.length:
            self._store.count_hit(prefill.loaded_model.name, hit.length)
        return True

    def record_chunk(self, prefill: Prefill, count: int) -> None:
        """Record the last `count` tokens of a prefill in the history of its windows, or release the history if memory
        is short. Take a snapshot at the positions in `past.stops`, unless the history makes it unnecessary. For caches
        that cannot be cut, also take the snapshots of a long prompt (`is_long_snapshot_due`)."""
        past, cache = prefill.past, prefill.cache
        if past is None or cache is None:
            return
        history = past.history
        if history is not None and not history.is_lost:
            size = history.estimate_bytes(cache, count)
            whole = size + history.nbytes + sum_nbytes(cache)
            if whole <= self.memory.compute_limit() and self.memory.make_room(size) and not history.is_lost:
                history.record(cache, count)
            else:
                history.clear()
        if prefill.stored_tokens in past.stops and (
            history is None or history.is_lost or prefill.stored_tokens == past.shared
        ):
            self._take_snapshot(prefill, past, cache)
            past.record_snapshot(prefill.stored_tokens)
        elif self._trim_modes.find(prefill.loaded_model) is CacheTrimMode.EXACT:
            self._take_long_snapshot(prefill, past, cache)

    def _take_long_snapshot(self, prefill: Prefill, past: PrefixState, cache: Layers) -> None:
        """Store a snapshot of a long prompt if that is due and needs no eviction. Remove the oldest snapshot beyond
        `MAX_LONG_SNAPSHOTS`."""
        tokens, size = prefill.stored_tokens - past.snapshot_at, sum_nbytes(cache)
        seconds = prefill.loaded_model.stats.estimate_prefill_seconds(tokens)
        if not prefill.left or not is_long_snapshot_due(tokens, seconds) or not self.memory.has_spare(size):
            return
        key = past.key[: prefill.stored_tokens * ID_BYTES]
        entry = self._store_entry(
            prefill.loaded_model, key, materialize(cache), past.prompt_hash, past.scope, snapshot=True
        )
        past.record_snapshot(prefill.stored_tokens, entry)
        self._store.remove_redundant(past.take_snapshots(MAX_LONG_SNAPSHOTS))

    def remove_snapshots(self, prefill: Prefill) -> None:
        """Remove the snapshots of a long prompt, because its request was cancelled. They do not count as evictions."""
        if prefill.past is not None:
            self._store.remove_redundant(prefill.past.take_snapshots(0))

    def _take_snapshot(self, prefill: Prefill, past: PrefixState, cache: Layers) -> None:
        """Store a snapshot of a prefill, if it is not cached and memory suffices. A shared system prompt has no hash,
        because its eviction does not count as the eviction of a prompt."""
        key, is_shared = past.key[: prefill.stored_tokens * ID_BYTES], prefill.stored_tokens == past.shared
        scope, prompt_hash = (SHARED_SCOPE, b"") if is_shared else (past.scope, past.prompt_hash)
        if not self._store.covers(prefill.loaded_model.name, key, cut=False, scope=scope) and self.memory.make_room(
            sum_nbytes(cache)
        ):
            self._store_entry(prefill.loaded_model, key, materialize(cache), prompt_hash, scope, snapshot=True)

    def _store_shared_prompt(self, prefill: Prefill, past: PrefixState, layers: Layers, transient: int) -> None:
        """Store the tokens of a shared system prompt for all keys. The model's trim mode must be `CUT`."""
        if not past.shared:
            return
        name, key = prefill.loaded_model.name, past.key[: past.shared * ID_BYTES]
        opening = copy_prefix(layers, past.shared)
        if not self._store.covers(name, key, cut=True, scope=SHARED_SCOPE) and self.memory.make_room(
            sum_nbytes(opening), transient
        ):
            self._store_entry(prefill.loaded_model, key, materialize(opening), b"", SHARED_SCOPE, snapshot=True)

    def store_prompt(self, prefill: Prefill, transient: int, view: RowView) -> None:
        """Store the cache of a prefilled prompt right before its rows join a decode batch, because the next prompt may
        start with the same tokens. Do nothing if caches of this model cannot be cut, or if the history of their windows
        is lost. For a model without windows, also store the system prompt that all keys share, as a separate entry.

        Store nothing that is already cached. If memory has no room, offer the prompt only to the disk cache; `view()`
        returns the cache of its decoding row. `transient` is the bytes that must stay free for the join itself.
        """
        past, cache = prefill.past, prefill.cache
        mode = self._trim_modes.find(prefill.loaded_model)
        if past is None or cache is None or mode is CacheTrimMode.EXACT:
            return
        layers = cache.copy()
        if mode is CacheTrimMode.WINDOW:
            if past.history is None or past.history.is_lost:
                return
            layers = past.history.build_layers(cache, len(prefill.ids))
            self.memory.histories.remove(past.history)
            past.set_history(None)
        else:
            self._store_shared_prompt(prefill, past, cache, transient)
        past.record_removal(0)
        self._store_or_offer(prefill, past.key, layers, transient, view)

    def store_packed(self, prefill: Prefill, row: Layers, transient: int, view: RowView) -> None:
        """Store a copy of the cache of a packed prompt, and the system prompt that all keys share. Store nothing that
        is already cached. If memory has no room for the copy, offer the prompt only to the disk cache.

        `row` is a view of the packed cache with all tokens of the prompt but the last. `transient` is the bytes that
        must stay free for the join of the packed prompts. `view()` returns the cache of the prompt's decoding row.
        """
        if prefill.past is not None:
            self._store_shared_prompt(prefill, prefill.past, row, transient)
            key = prefill.past.key[:-ID_BYTES]
            self._store_or_offer(prefill, key, row, transient, view, copy=True)

    def _store_or_offer(
        self, prefill: Prefill, key: bytes, layers: Layers, transient: int, view: RowView, *, copy: bool = False
    ) -> None:
        """Store a prompt's cache, with `copy` a copy of it, unless it is cached. If memory has no room, offer the
        prompt only to the disk cache."""
        model, past = prefill.loaded_model, prefill.past
        if past is None or self._store.covers(model.name, key, cut=True, scope=past.scope):
            return
        if self.memory.make_room(sum_nbytes(layers), transient):
            stored = materialize(layers) if copy else layers
            self._store_entry(model, key, stored, past.prompt_hash, past.scope, view=view)
        else:
            self.disk.offer_row(model, key, past.prompt_hash, past.scope, sum_nbytes(layers), view)

    def put_back(self, prefill: Prefill) -> None:
        """Store again the prefix that a prefill took out of the cache, because its request was cancelled. Do nothing if
        no prefix was taken, the whole prompt has been stored since, or memory has no room. Do nothing as well if the
        cache cannot be cut, or if the history of its windows is lost."""
        past, cache = prefill.past, prefill.cache
        if past is None or cache is None or not past.removed_tokens:
            return
        mode, length, layers = self._trim_modes.find(prefill.loaded_model), past.removed_tokens, cache
        if mode is CacheTrimMode.WINDOW and past.history is not None and not past.history.is_lost:
            layers = past.history.build_layers(cache, length)
        elif mode is not CacheTrimMode.CUT:
            return
        layers = cut_layers(layers, length)
        if self.memory.make_room(sum_nbytes(layers)):
            key = past.key[: length * ID_BYTES]
            self._store_entry(prefill.loaded_model, key, materialize_layers(layers), past.prompt_hash, past.scope)

    # answers

    def store_row(self, loaded_model: LoadedModel, row: Row, batch: DecodeBatch[Row]) -> None:
        """Store the cache of a request's first choice at its end, before the row is dropped from its batch. Do nothing
        for other choices, or if the request does not use the prefix cache or memory has no room. Do nothing as well for
        a sequence that is below `MIN_PREFIX_TOKENS` or already cached. Exceptions of the batch propagate."""
        sequence = row.sequence
        if row.choice or not sequence.prompt_hash:
            return
        ids, mode = batch.get_ids(row), self._trim_modes.find(loaded_model)
        name, key, scope = loaded_model.name, pack(ids), sequence.cache_scope
        cut = mode is not CacheTrimMode.EXACT
        if len(ids) < MIN_PREFIX_TOKENS or self._store.covers(name, key, cut=cut, scope=scope):
            return
        if self.memory.make_room(compute_row_bytes(loaded_model.kv, len(ids))):
            layers = batch.extract(row)
            if mode is CacheTrimMode.WINDOW:
                earlier = self._store.find(name, key, cut=False, scope=scope).entry
                layers = layers if earlier is None else extend_history(layers, earlier.value or [])
            self._store_entry(loaded_model, key, layers, sequence.prompt_hash, scope)

    def _store_entry(
        self,
        loaded_model: LoadedModel,
        key: bytes,
        layers: Layers,
        prompt_hash: bytes,
        scope: str,
        *,
        snapshot: bool = False,
        view: RowView | None = None,
    ) -> CachedPrefix[Layers] | None:
        if len(key) < MIN_PREFIX_TOKENS * ID_BYTES:
            return None
        mode = self._trim_modes.find(loaded_model)
        cuts = compute_cuts(layers) if mode is CacheTrimMode.WINDOW else None
        model, size, arrays = loaded_model.name, sum_nbytes(layers), count_arrays(layers)
        entry = CachedPrefix(model, key, layers, size, prompt_hash, snapshot, scope, cuts, arrays=arrays)
        if mode is not CacheTrimMode.EXACT and not snapshot:
            self._store.remove_redundant(filter(entry.covers_cuts, self._store.find_redundant(model, key, scope)))
        self._store.store(entry)
        self.disk.offer(loaded_model, entry, view)
        return entry

"""Disk tier of the prefix cache in the scheduler: lookup of prompts, their restoration part by part, and writing.

    find ─► (gate) ─► restore_part ─► … ─► the prefill starts with the restored tokens
     ▲                     │ a file is missing or invalid
     └─────────────────────┘

A part is the content of one file (`kv.disk.block_file`). Other rows decode between two parts. The prefill has no cache
until all parts are restored. The commitment of its row covers their bytes. If the restoration fails, the prompt is
looked up again without the file that failed.
"""

from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from node.engine.kv.disk.block_index import FolderSize
from node.engine.kv.disk.disk_cache import DiskCache, clear_folder
from node.engine.kv.disk.layer_parts import get_window, list_parts
from node.engine.kv.disk.write_queue import CacheShape, RowView
from node.engine.kv.kv_cache import Layers, compute_mean_capacity, create_cache
from node.engine.kv.prefix_memory import PrefixMemory
from node.engine.kv.prefix_store import CachedPrefix
from node.engine.kv.radix_trie import ID_BYTES
from node.engine.kv.window_history import begin_history, restore_layers
from node.engine.models.loaded_model import LoadedModel
from node.engine.scheduling.prefill import Prefill, PrefixState
from wire.bounds import MAX_ITEMS
from wire.frames import SHARED_SCOPE
from wire.report import CacheState, ModelCache

READ_TIMEOUT_SECONDS = 0.02
"""Maximum seconds for which `DiskTier.restore_part` waits for the next part."""
MAX_PARTS_PER_TURN = 4
"""Maximum number of parts that one call of `DiskTier.write_next` copies for the writer. Memory must have room for one
more part."""


class DiskTier:
    """Disk tier of the prefix cache (see the module's docstring).

    `cache` is None if the disk cache is off. `folder` is the folder of the disk cache; None if no folder is set. If the
    disk cache is off, `clear` deletes the files of an earlier process there. `memory` is checked for room before parts
    are copied.
    """

    def __init__(self, cache: DiskCache | None, memory: PrefixMemory, folder: Path | None = None) -> None:
        self.cache = cache
        self._folder = folder
        self._memory = memory
        self._shapes: dict[str, CacheShape] = {}

    # prompts

    def find(self, prefill: Prefill, past: PrefixState, cached: int) -> int:
        """Find the longest prefix of a prompt on the disk, and return its length in tokens. Return 0 if it has no more
        than the `cached` tokens of the prefix in memory.

        Set `past.plan` to the files to read, or to None if the result is 0. Return 0 as well if the read would take at
        least as long as the prefill of the additional tokens, unless `DiskCache.min_seconds` is 0.
        """
        past.set_plan(None)
        if self.cache is None:
            return 0
        shape = self._get_shape(prefill.loaded_model)
        plan = self.cache.find(shape, past.scope, past.key)
        if past.shared:
            common = self.cache.find(shape, SHARED_SCOPE, past.key[: (past.shared + 1) * ID_BYTES])
            plan = common if plan is None or (common is not None and common.length > plan.length) else plan
        if plan is None or plan.length <= cached:
            return 0
        saved = prefill.loaded_model.stats.estimate_prefill_seconds(plan.length - cached)
        if self.cache.min_seconds and saved <= self.cache.estimate_read_seconds(plan.nbytes):
            return 0
        past.set_plan(plan)
        return plan.length

    def estimate_part_bytes(self, past: PrefixState) -> int:
        """Return the transient bytes of the next part of a planned restoration; 0 without a plan. The estimate is three
        times the mean size of a file, for the file and its arrays."""
        plan = past.plan
        return 0 if plan is None else 3 * plan.nbytes // len(plan.parts)

    def restore_part(self, prefill: Prefill, past: PrefixState) -> None:
        """Add the next part of a planned restoration to the cache, if it arrives within `READ_TIMEOUT_SECONDS`. The
        first call starts to read the files.

        After the last part, start the prefill with the restored tokens. If a file was missing, invalid or stalled,
        clear the lookup instead; the prompt must then be looked up again. Do nothing without a plan.
        """
        plan, disk = past.plan, self.cache
        if plan is None or disk is None:
            return
        if past.restoring is None:
            past.set_restoring(disk.begin_restore(plan, create_cache(prefill.loaded_model.model)))
        restoring = past.restoring
        if restoring is None or not restoring.step(READ_TIMEOUT_SECONDS):
            return
        disk.end_restore(restoring)
        past.discard_lookup()
        if restoring.layers is None:
            prefill.set_cached_tokens(0)
            return
        if self._get_shape(prefill.loaded_model).window:
            past.set_history(self._memory.histories.add(begin_history(restoring.layers, plan.length)))
        cache = restore_layers(restoring.layers, plan.length, copy=False)
        prefill.start(cache)
        prefill.begin_chunk()
        prefill.end_chunk(0, compute_mean_capacity(cache), None)
        prefill.sequence.set_cached(plan.length)
        past.record_restored(plan.parts)
        past.record_snapshot(plan.length)

    def remove_restored(self, prefill: Prefill) -> None:
        """Remove the files from which a failed prefill was restored, and the files of its snapshots, because they may
        be the cause of the failure."""
        past = prefill.past
        if self.cache is not None and past is not None:
            self.cache.remove_parts(past.restored)
            for entry in past.snapshots:
                self.cache.remove_entry(entry, self._get_shape(prefill.loaded_model))

    # entries

    def offer(self, loaded_model: LoadedModel, entry: CachedPrefix[Layers], view: RowView | None = None) -> None:
        """Queue an entry to be written. Ignore the entry if a read would save less than `DiskCache.min_seconds` of
        prefill, or if the disk cannot store the caches of the model. Ignore every entry if the disk cache is off or
        another process writes to the folder.

        `view()` returns the cache of a decoding row with the same tokens, or None after the end of the row. This cache
        is written if the entry is evicted from memory first.
        """
        if self.cache is not None:
            seconds = loaded_model.stats.estimate_prefill_seconds(entry.length)
            self.cache.offer(entry, self._get_shape(loaded_model), seconds, view)

    def offer_row(
        self,
        loaded_model: LoadedModel,
        key: bytes,
        prompt_hash: bytes,
        scope: str,
        nbytes: int,
        view: RowView,
    ) -> None:
        """Queue the prompt of a decoding row, because memory has no room for a copy of its cache. Ignore the prompt
        under the conditions of `offer`.

        `key` is the packed token ids of the prompt, `nbytes` the size of its cache in bytes. `view()` returns the cache
        of the row, or None after the end of the row; the rest of the prompt is then not written.
        """
        self.offer(loaded_model, CachedPrefix(loaded_model.name, key, None, nbytes, prompt_hash, scope=scope), view)

    def find_next_write(self) -> float | None:
        """Return the monotonic time at which `write_next` is next due; None if nothing is to be written."""
        return None if self.cache is None else self.cache.queue.get_next_write()

    def write_next(self, now: float, *, busy: bool) -> None:
        """Pass the copies of the last call to the writer, and launch the copy of the next part of the newest queued
        entry. Do nothing before a write is due; `now` is the monotonic time.

        Launch up to `MAX_PARTS_PER_TURN` copies if memory has no room for a second entry of the same size, because the
        entry may soon be evicted. Launch fewer copies, or none, if memory has no room for them and one more part.
        `busy`: requests run, and writes are spaced out (`compute_pause_seconds`).
        """
        due = self.find_next_write()
        if self.cache is not None and due is not None and due <= now:
            part = self.cache.queue.get_next_bytes()
            urgent = not self._memory.has_spare(self.cache.queue.get_entry_bytes())
            most = MAX_PARTS_PER_TURN if urgent else 1
            room = next((count for count in range(most, 0, -1) if self._memory.has_room((count + 1) * part)), 0)
            self.cache.write_next(now, busy=busy, room=room, urgent=urgent)

    # for the engine

    def describe(self, state: CacheState, models: dict[str, ModelCache], fingerprints: Mapping[str, str]) -> CacheState:
        """Return `state` with the fields of the disk cache, and with one `ModelCache` per model, sorted by name, at
        most `MAX_ITEMS`.

        `models` has the models with entries in memory, by name; models with files on the disk are added to this dict.
        `fingerprints` maps the names of all models of the node to their fingerprints. A model on the disk that the node
        no longer has is reported under its fingerprint.
        """
        if self.cache is not None:
            state = self.cache.describe(state)
            names = {fingerprint: name for name, fingerprint in sorted(fingerprints.items(), reverse=True)}
            sizes, hits = self.cache.list_models(), self.cache.model_hits
            for fingerprint in sizes.keys() | hits.keys():
                name, size = names.get(fingerprint, fingerprint), sizes.get(fingerprint, FolderSize())
                models[name] = replace(
                    models.get(name, ModelCache(name)),
                    disk_bytes=size.nbytes,
                    disk_files=size.files,
                    disk_hits=hits[fingerprint],
                )
        return replace(state, models=tuple(models[name] for name in sorted(models)[:MAX_ITEMS]))

    def take_lost(self) -> list[bytes]:
        """Return the hashes of prompts that are lost since the last call: neither memory nor the disk has them
        (`DiskCache.take_lost`)."""
        return [] if self.cache is None else self.cache.take_lost()

    def clear(self, fingerprint: str) -> None:
        """Delete the files of the model with this fingerprint, or of all models if it is empty, even if the disk cache
        is off. Drop all parts that wait to be written, even parts of other models. Wait at most `DISCARD_SECONDS` for a
        file that is being written. Raise `OSError` if files cannot be deleted, and `BlockingIOError` if another process
        writes to the folder."""
        if self.cache is not None:
            self.cache.clear(fingerprint)
        elif self._folder is not None:
            clear_folder(self._folder, fingerprint)

    def close(self) -> None:
        """Release the lock of the folder, because the process ends."""
        if self.cache is not None:
            self.cache.close()

    def _get_shape(self, loaded_model: LoadedModel) -> CacheShape:
        shape = self._shapes.get(loaded_model.descriptor.fingerprint)
        if shape is None:
            layers = create_cache(loaded_model.model)
            shape = CacheShape(loaded_model.descriptor.fingerprint, list_parts(layers), get_window(layers))
            self._shapes[shape.fingerprint] = shape
        return shape

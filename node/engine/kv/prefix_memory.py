"""Memory of the prefix cache: room for new entries, and eviction for the engine.

Cached bytes are evicted before any request is refused for memory. Histories of prefills in progress (`window_history`)
and parts in the queue of the disk cache count as cached. If memory is short, histories are released before any entry.
Parts are released after the last entry, because they are soon written and free their memory then. At the limit of the
cache, only entries are evicted.
"""

from collections.abc import Callable

from host.heap import trim
from node.engine.kv.disk.disk_cache import DiskCache
from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_store import PrefixCache
from node.engine.kv.window_history import WindowHistories
from node.engine.memory.footprint import clear_buffers
from wire.capacity.arithmetic import Fits, exceeds_headroom, judge
from wire.report import Memory
from wire.units import parse_size

AUTO, OFF = "auto", "off"
"""Words of the setting `engine.mlx.prefix_cache_size`."""
AUTO_SHARE = 0.15
"""Limit of the prefix cache with `auto`, as a share of the cap minus the weights."""
RECLAIMABLE_SHARE = 7 / 8
"""Share of the cached bytes that the system is certain to get back: allocators keep parts of pages."""


def compute_limit(setting: str | int, cap: int, weights: int) -> int:
    """Return the limit of the prefix cache in bytes, from the setting `engine.mlx.prefix_cache_size`; 0: off.

    `cap` and `weights` (of all loaded models) are in bytes. Raise `ValueError` if the setting cannot be parsed.
    """
    if setting == AUTO:
        return max(0, int(AUTO_SHARE * (cap - weights)))
    return 0 if setting == OFF else parse_size(setting)


class PrefixMemory:
    """Memory of the prefix cache (see the module's docstring).

    `store` contains the sequences. `memory()` returns a current reading. `limit(cap)` returns the limit of the cache in
    bytes under a cap. `on_released()` is called after memory was freed. `disk` has the parts that wait to be written;
    None without a disk cache. `settled()` returns a reading without bytes that are freed but still in the footprint;
    None: the same as `memory`.
    """

    def __init__(
        self,
        store: PrefixCache[Layers],
        memory: Callable[[], Memory],
        limit: Callable[[int], int],
        on_released: Callable[[], None],
        disk: DiskCache | None = None,
        settled: Callable[[], Memory] | None = None,
    ) -> None:
        self.histories = WindowHistories()
        """Histories of the prefills in progress."""
        self._store = store
        self._memory = memory
        self._settled = settled or memory
        self._limit = limit
        self._on_released = on_released
        self._disk = disk

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, of the histories of prefills in progress, and of the parts that wait to be written."""
        queued = 0 if self._disk is None else self._disk.queued_bytes
        return self._store.nbytes + self.histories.nbytes + queued

    @property
    def reusable(self) -> int:
        """Bytes that are certain to be free after the release of all `nbytes`."""
        return int(self.nbytes * RECLAIMABLE_SHARE)

    def compute_limit(self) -> int:
        """Return the limit of the cache in bytes under the cap in force; 0: off."""
        return self._limit(self._memory().cap)

    def evict_until_fits(self, need: int) -> bool:
        """Release histories, then the least recently used entries, then queued parts, until `need` bytes fit or nothing
        more can be released. Return whether `need` bytes fit by the settled reading (`settled`)."""
        memory, released = self._settled(), True
        while self.nbytes and released and exceeds_headroom(memory, need):
            released = self._release(max(1, need - (memory.headroom or 0)))
            memory = self._settled()
        return _fits(memory, need)

    def evict_until(self, enough: Callable[[], bool]) -> None:
        """Release histories, then the least recently used entries, then queued parts, until `enough()` is true or
        nothing more can be released."""
        released = True
        while self.nbytes and released and not enough():
            released = self._release(1)

    def _release(self, size: int) -> bool:
        """Release histories of prefills in progress. Then release entries until `size` bytes are free or none is left,
        and then the queued parts. Return whether memory was released. The part that is being written is not
        released."""
        released = self.histories.clear()
        if released < size:
            released += self._store.evict(size - released)
        if released < size and self._disk is not None:
            released += self._disk.clear_queue()
        clear_buffers()
        trim()
        self._on_released()
        return released > 0

    def has_room(self, size: int) -> bool:
        """Return whether `size` bytes fit without an eviction."""
        return _fits(self._memory(), size)

    def has_spare(self, size: int) -> bool:
        """Return whether an entry of `size` bytes fits into the limit of the cache and the memory without an
        eviction."""
        memory = self._memory()
        return self.nbytes + size <= self._limit(memory.cap) and _fits(memory, size)

    def make_room(self, size: int, transient: int = 0) -> bool:
        """Evict the least recently used entries until `size` bytes fit into the limit of the cache. Then release memory
        as `evict_until_fits` does, until `size + transient` bytes fit into memory. Return whether both fit.

        `transient` is the bytes of a copy that exists only for a moment. Evict nothing if the release of all cached
        bytes would not suffice. The result can be False even after evictions, because an eviction may free less than
        expected.
        """
        memory, need = self._memory(), size + transient
        limit, kept = self._limit(memory.cap), self.nbytes - self._store.nbytes
        if kept + size > limit or not _fits(memory, need - self.nbytes):
            return False
        if self.nbytes + size > limit:
            self._store.evict(self.nbytes + size - limit)
            self._on_released()
            if self.nbytes + size > limit:  # parts of evicted entries wait to be written
                return False
        elif _fits(memory, need):
            return True
        return _fits(self._memory(), need - self.nbytes) and self.evict_until_fits(need) and _fits(self._memory(), need)


def _fits(memory: Memory, need: int) -> bool:
    return isinstance(judge(memory, need), Fits)

"""Unloading of models, and the order in which reusable memory is freed.

The order is: MLX's free buffers, spare memory, the prefix cache, then idle models, least recently used first. Models in
use and preloaded models are not unloaded to free memory. Any other model is also unloaded after `max_idle_seconds`
without use (0: never). A model whose files were replaced on disk is unloaded as soon as it is idle, even if it is
preloaded. Until then it serves requests under its old fingerprint.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from node.engine.memory.footprint import clear_buffers, release_free_memory
from node.engine.memory.leak_check import LeakCheck
from node.engine.models.model_descriptor import ModelDescriptor
from node.engine.models.model_table import ModelTable
from node.engine.scheduling.prefix_cache import PrefixCacheManager
from node.models.catalogue import ModelCatalogue
from wire.capacity.arithmetic import Fits, compute_hard_limit, exceeds_headroom, judge, judge_load
from wire.report import Memory
from wire.units import show_size

log = structlog.get_logger("engine.loading")


class ReclaimableMemory(Protocol):
    """Spare memory, released after MLX's free buffers, and before cached prefixes and idle models. Examples: the
    emergency reserve, the row of a sweep."""

    @property
    def nbytes(self) -> int:
        """Bytes that `release` would free."""
        ...

    def release(self) -> None:
        """Release the memory now."""
        ...


class ModelUnloader:
    """Unloader of models, which also frees memory that a request could reuse (see the module's docstring).

    `memory()` returns a reading without bytes that are freed but still in the footprint. `on_released()` is called
    after memory was freed, because the recent peak must then be reset. `pinned` are the preloaded models. `spares` is
    spare memory in the order of its release. An unused model is unloaded after `max_idle_seconds`; 0: never.
    """

    def __init__(
        self,
        table: ModelTable,
        prefix_cache: PrefixCacheManager,
        catalogue: ModelCatalogue,
        spares: Sequence[ReclaimableMemory],
        memory: Callable[[], Memory],
        on_released: Callable[[], None],
        pinned: frozenset[str],
        max_idle_seconds: float,
    ) -> None:
        self._table = table
        self._prefix_cache = prefix_cache
        self._catalogue = catalogue
        self._spares = spares
        self._memory = memory
        self._on_released = on_released
        self.pinned = pinned
        self._max_idle_seconds = max_idle_seconds
        self.leak_check = LeakCheck()
        """Detection of memory that unloads did not return."""
        self.evictions = 0
        """Number of idle models that were unloaded to make room."""
        self.departures = 0
        """Number of models that were unloaded because they were unused for `max_idle_seconds`."""

    # models

    def unload(self, name: str) -> None:
        """Unload a model: release its weights and evict its cached prefixes. Raise `KeyError` if it is not loaded.

        This method does not check whether requests use the model.
        """
        loaded_model = self._table.remove(name)
        self._catalogue.unpin(name)
        self._prefix_cache.evict_model(name)
        log.info("model unloaded", model=name, weights=show_size(loaded_model.weights))
        self.leak_check.on_unload(loaded_model.weights, time.monotonic())
        del loaded_model
        release_free_memory()
        self._on_released()

    def close(self) -> None:
        """Unload all models, used or not, and release all spare memory, because the process ends."""
        for spare in self._spares:
            spare.release()
        for name in list(self._table.loaded):
            self.unload(name)

    def list_idle(self) -> list[str]:
        """Return the names of the loaded models without users that are not preloaded, least recently used first."""
        loaded = self._table.loaded
        idle = [
            name for name, loaded_model in loaded.items() if not loaded_model.usage.users and name not in self.pinned
        ]
        return sorted(idle, key=lambda name: loaded[name].usage.used_at)

    def find_next_idle_unload(self) -> float | None:
        """Return the monotonic time of the next unload of an idle model; 0.0 (at once) if an idle model was replaced on
        disk. Otherwise return None if `list_idle` is empty or `max_idle_seconds` is 0."""
        if self._find_replaced():
            return 0.0
        idle = self.list_idle() if self._max_idle_seconds else []
        return self._table.loaded[idle[0]].usage.used_at + self._max_idle_seconds if idle else None

    def unload_idle(self, now: float) -> list[ModelDescriptor]:
        """Unload idle models that were replaced on disk, or that have been unused for `max_idle_seconds` at the
        monotonic time `now`. Return the new versions of preloaded models that were replaced: the caller must load
        them."""
        again = list[ModelDescriptor]()
        for found in self._find_replaced():
            log.info("model replaced on disk", model=found.name)
            self.unload(found.name)
            if found.name in self.pinned:
                again.append(found)
        for name in self.list_idle() if self._max_idle_seconds else ():
            if self._table.loaded[name].usage.used_at + self._max_idle_seconds <= now:
                self.departures += 1
                self.unload(name)
        return again

    def _find_replaced(self) -> list[ModelDescriptor]:
        """Return the new versions on disk of models that are loaded and idle."""
        found = (
            self._catalogue.find_replacement(loaded_model.descriptor)
            for loaded_model in self._table.loaded.values()
            if not loaded_model.usage.users
        )
        return [replacement for replacement in found if replacement is not None]

    def _evict(self, name: str) -> None:
        self.evictions += 1
        self.unload(name)

    # memory

    def can_free(self, need: int, further: int = 0) -> bool:
        """Free MLX's free buffers. Return whether `need` bytes then fit, or would fit if spare memory, the prefix cache
        and idle models were freed. `further` is the number of bytes that the caller could free in addition."""
        clear_buffers()
        return fits(self._memory(), need) or fits(self._memory(), need - self._compute_freeable_bytes() - further)

    def _compute_freeable_bytes(self) -> int:
        spare = self._prefix_cache.nbytes + sum(spare.nbytes for spare in self._spares)
        return spare + sum(self._table.loaded[name].weights for name in self.list_idle())

    def free_memory(self, need: int) -> bool:
        """Free memory until `need` bytes fit, and return whether they fit. If all reusable memory together would not
        suffice, free only MLX's buffers."""
        return self.can_free(need) and self.free_until_fits(need)

    def free_until_fits(self, need: int) -> bool:
        """Free spare memory, the prefix cache and idle models, in this order, until `need` bytes fit or nothing
        reusable is left. Return whether they fit."""
        if self.release_spare(lambda: fits(self._memory(), need)):
            return True
        if self._prefix_cache.memory.evict_until_fits(need):
            return True
        for name in self.list_idle():
            if not exceeds_headroom(self._memory(), need):
                break
            self._evict(name)
        return fits(self._memory(), need)

    def reclaim_memory(self, enough: Callable[[], bool]) -> None:
        """Free memory until `enough()` is true: MLX's free buffers, spare memory, the prefix cache, then idle models.

        Keep the only loaded model if nothing but the margin is missing, because the next request would load it again.
        """
        if not enough():
            clear_buffers()
        self.release_spare(enough)
        self._prefix_cache.evict_until(enough)
        for name in self.list_idle():
            if enough() or (len(self._table.loaded) == 1 and _lacks_only_margin(self._memory())):
                return
            self._evict(name)

    def release_spare(self, enough: Callable[[], bool]) -> bool:
        """Release spare memory, in the order of `spares`, until `enough()` is true. Return whether it is."""
        for spare in self._spares:
            if spare.nbytes and not enough():
                spare.release()
                self._on_released()
        return enough()


def fits(memory: Memory, need: int) -> bool:
    """Return whether `need` bytes fit under a reading of the memory, with its margin."""
    return isinstance(judge(memory, need), Fits)


def _lacks_only_margin(memory: Memory) -> bool:
    """Return whether only the margin is missing. All held memory then fits under cap − leases, and no other application
    lowers the ceiling below that."""
    return memory.ceiling >= compute_hard_limit(memory) and isinstance(judge_load(memory, 0), Fits)

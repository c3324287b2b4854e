"""Room for new entries of the prefix cache."""

import mlx.core as mx
import pytest

from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_memory import PrefixMemory
from node.engine.kv.prefix_store import CachedPrefix, PrefixCache
from node.engine.kv.radix_trie import pack
from node.engine.kv.window_history import WindowHistory, WindowPiece
from tests.support.cluster.loopback_cluster import a_memory
from wire.report import Memory
from wire.units import MIB

SIZE = 10 * MIB


@pytest.mark.parametrize(("headroom", "has_room", "left"), [(-15 * MIB, False, 2), (100 * MIB, True, 1)])
def test_nothing_is_evicted_for_an_entry_that_would_not_fit_after_all_evictions(
    headroom: int, has_room: bool, left: int
):
    store = PrefixCache[Layers]()
    for number in range(2):
        store.store(CachedPrefix("m", pack(range(20 * number, 20 * number + 20)), Layers(), SIZE))
    memory = PrefixMemory(store, lambda: a_memory(headroom), lambda cap: 25 * MIB, lambda: None)
    assert memory.make_room(SIZE) is has_room
    assert len(store) == left


class Cached:
    """Prefix memory over three entries of 80 bytes, under a headroom that grows by the evicted bytes."""

    def __init__(self, free: int = 0, limit: int = 10_000) -> None:
        self.store = PrefixCache[Layers]()
        self.released = 0
        self.free = free
        for number in range(3):
            self.store.store(CachedPrefix("m", pack(range(20 * number, 20 * number + 20)), Layers(), 80))
        self.memory = PrefixMemory(self.store, self.read, lambda cap: limit, self.record)

    def read(self) -> Memory:
        return a_memory(self.free + 240 - self.store.nbytes)

    def record(self) -> None:
        self.released += 1


def create_history(nbytes: int) -> WindowHistory:
    """Return a history of this many bytes, a multiple of 8."""
    keys = mx.zeros((1, 1, nbytes // 8, 1))
    return WindowHistory([[WindowPiece(0, keys, keys)]])


def test_seven_eighths_of_the_cached_bytes_are_reusable():
    cached = Cached()
    assert (cached.memory.nbytes, cached.memory.reusable) == (240, 210)
    history = cached.memory.histories.add(create_history(16))
    assert (cached.memory.nbytes, cached.memory.reusable) == (256, 224)
    cached.memory.histories.remove(history)
    cached.store.evict(240)
    assert (cached.memory.nbytes, cached.memory.reusable) == (0, 0)


@pytest.mark.parametrize(
    ("free", "need", "fits", "left"),
    [(100, 100, True, 3), (100, 101, True, 2), (100, 180, True, 2), (100, 181, True, 1), (100, 341, False, 0)],
)
def test_entries_are_evicted_until_the_need_fits_and_no_further(free: int, need: int, fits: bool, left: int):
    cached = Cached(free)
    assert cached.memory.evict_until_fits(need) is fits
    assert len(cached.store) == left
    assert bool(cached.released) is (left < 3)


def test_nothing_is_evicted_while_the_memory_cannot_be_read():
    cached = Cached()
    memory = PrefixMemory(cached.store, lambda: Memory(cap=1000, armed=True), lambda cap: cap, cached.record)
    assert not memory.evict_until_fits(1)
    assert (len(cached.store), cached.released) == (3, 0)


def test_an_empty_cache_releases_nothing():
    cached = Cached()
    cached.store.evict(240)
    assert not cached.memory.evict_until_fits(1000)
    cached.memory.evict_until(lambda: False)
    assert cached.released == 0


def test_histories_of_prefills_are_released_before_entries_and_entries_one_by_one():
    cached = Cached()
    history = cached.memory.histories.add(create_history(16))
    cached.memory.evict_until(lambda: cached.memory.nbytes <= 240)
    assert (history.is_lost, len(cached.store)) == (True, 3)
    cached.memory.evict_until(lambda: cached.memory.nbytes < 240)
    assert [entry.key for entry in cached.store.entries] == [pack(range(20, 40)), pack(range(40, 60))]
    cached.memory.evict_until(lambda: not cached.memory.nbytes)
    assert cached.store.entries == ()


@pytest.mark.parametrize(
    ("free", "limit", "size", "spare"),
    [(60, 300, 60, True), (59, 300, 60, False), (60, 299, 60, False), (1000, 239, 1, False)],
)
def test_a_spare_place_is_within_the_limit_and_the_memory(free: int, limit: int, size: int, spare: bool):
    cached = Cached(free, limit)
    assert cached.memory.has_spare(size) is spare
    assert len(cached.store) == 3


@pytest.mark.parametrize(("free", "size", "room"), [(60, 60, True), (60, 61, False)])
def test_room_is_memory_without_an_eviction(free: int, size: int, room: bool):
    assert Cached(free).memory.has_room(size) is room


@pytest.mark.parametrize(
    ("free", "limit", "size", "transient", "fits", "left"),
    [
        (1000, 300, 60, 0, True, 3),
        (1000, 300, 61, 0, True, 2),
        (1000, 300, 300, 0, True, 0),
        (1000, 300, 301, 0, False, 3),
        (50, 10_000, 50, 0, True, 3),
        (50, 10_000, 50, 1, True, 2),
        (50, 10_000, 50, 240, True, 0),
        (50, 10_000, 50, 241, False, 3),
    ],
)
def test_room_for_an_entry_is_made_within_the_limit_and_the_memory(
    free: int, limit: int, size: int, transient: int, fits: bool, left: int
):
    cached = Cached(free, limit)
    assert cached.memory.make_room(size, transient) is fits
    assert len(cached.store) == left


def test_histories_in_progress_take_their_part_of_the_limit():
    cached = Cached(1000, 100)
    history = cached.memory.histories.add(create_history(64))
    assert not cached.memory.make_room(40)
    assert (len(cached.store), history.is_lost) == (3, False), "without room after all evictions, nothing is evicted"
    assert cached.memory.make_room(36)
    assert (len(cached.store), history.is_lost) == (0, False)

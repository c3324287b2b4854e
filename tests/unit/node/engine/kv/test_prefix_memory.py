"""Room for new entries of the prefix cache."""

import pytest

from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_memory import PrefixMemory
from node.engine.kv.prefix_store import CachedPrefix, PrefixCache
from node.engine.kv.radix_trie import pack
from tests.support.cluster.loopback_cluster import a_memory
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

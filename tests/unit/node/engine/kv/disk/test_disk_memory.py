"""Bytes in the queue of the disk cache count as cached, and are dropped first."""

from pathlib import Path

import numpy as np

from node.engine.kv.disk.block_chain import BlockName
from node.engine.kv.disk.block_file import BlockArray, BlockPart
from node.engine.kv.disk.disk_cache import DiskCache
from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_memory import PrefixMemory
from node.engine.kv.prefix_store import CachedPrefix, PrefixCache
from node.engine.kv.radix_trie import pack
from wire.report import Memory
from wire.units import GIB, MIB


def test_the_queue_goes_before_any_entry(tmp_path: Path):
    store, disk = PrefixCache[Layers](), DiskCache(tmp_path, "auto", 0.0)
    memory = PrefixMemory(store, lambda: Memory(cap=GIB), lambda cap: cap, lambda: None, disk)
    store.store(CachedPrefix("m", pack(range(20)), Layers(), 10))
    assert memory.nbytes == 10
    assert disk.writer is not None
    part = [BlockArray("float32", np.zeros((1, 1, 256, 64 * 1024), np.float32))]
    for number in range(6):
        disk.writer.put(BlockName("m", BlockPart.TOKENS, bytes([number]) * 16), part)
    assert memory.nbytes >= 4 * 64 * MIB
    memory.evict_until(iter([False, True]).__next__)
    assert (len(store), disk.writer.drops > 0) == (1, True)
    assert memory.nbytes <= 10 + 2 * 64 * MIB, "the part in progress stays"

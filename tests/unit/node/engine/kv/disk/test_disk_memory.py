"""Bytes in the queue of the disk cache count as cached, and are dropped first. Parts are cut out only with room."""

import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from node.engine.kv.disk.block_chain import BlockName
from node.engine.kv.disk.block_file import BlockArray, BlockPart
from node.engine.kv.disk.disk_budget import (
    BUSY_WRITE_INTERVAL_SECONDS,
    BUSY_WRITE_SPEED,
    URGENT_WRITE_INTERVAL_SECONDS,
    URGENT_WRITE_SPEED,
)
from node.engine.kv.disk.disk_cache import CacheShape, DiskCache
from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_memory import PrefixMemory
from node.engine.kv.prefix_store import BLOCK_TOKENS, CachedPrefix, PrefixCache
from node.engine.kv.radix_trie import pack
from node.engine.scheduling.disk.disk_tier import WRITE_ROOM_PARTS, DiskTier
from tests.support.cluster.loopback_cluster import a_memory
from wire.report import CacheState, Memory
from wire.units import GIB, MIB

SHAPE = CacheShape("m", frozenset({BlockPart.TOKENS}), 0)
WIDTH = 64


def build_entry(blocks: int) -> CachedPrefix[Layers]:
    """Return an entry of some blocks."""
    layer: Any = KVCache()
    values = mx.zeros((1, 1, blocks * BLOCK_TOKENS, WIDTH))
    layer.update_and_fetch(values, values)
    ids = range(blocks * BLOCK_TOKENS)
    return CachedPrefix("m", pack(ids), Layers([layer]), 2 * values.nbytes)


PART = 2 * 4 * BLOCK_TOKENS * WIDTH
"""Bytes of a block of such an entry."""


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


@pytest.mark.parametrize(("room", "parts"), [(WRITE_ROOM_PARTS * PART, 1), (WRITE_ROOM_PARTS * PART - 1, 0)])
def test_a_part_is_cut_out_where_two_of_them_fit_however_small_the_room(tmp_path: Path, room: int, parts: int):
    disk = DiskCache(tmp_path, "auto", 0.0)
    memory = PrefixMemory(PrefixCache[Layers](), lambda: a_memory(room), lambda cap: cap, lambda: None, disk)
    disk.offer(build_entry(3), SHAPE, 1.0)
    tier = DiskTier(disk, memory)
    tier.write_next(1.0, busy=False)
    assert disk.queued_bytes == parts * PART
    disk.write_next(1.0, busy=False, has_room=False)
    assert disk.describe(CacheState()).disk_saves == parts


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(("urgent", "speed"), [(False, BUSY_WRITE_SPEED), (True, URGENT_WRITE_SPEED)])
def test_small_parts_are_written_at_a_speed_while_requests_run(tmp_path: Path, blocks: int, urgent: bool, speed: float):
    disk = DiskCache(tmp_path, "auto", 0.0)
    disk.offer(build_entry(blocks), SHAPE, 1.0)
    disk.write_next(5.0, busy=True, has_room=True, urgent=urgent)
    assert disk.get_next_write() == 0.0, "the copies are passed on in the next turn"
    disk.write_next(5.1, busy=True, has_room=True, urgent=urgent)
    assert disk.get_next_write() == 5.0 + PART / speed


@pytest.mark.parametrize(
    ("urgent", "seconds"), [(False, BUSY_WRITE_INTERVAL_SECONDS), (True, URGENT_WRITE_INTERVAL_SECONDS)]
)
def test_large_parts_are_written_in_an_interval_while_requests_run(tmp_path: Path, urgent: bool, seconds: float):
    disk = DiskCache(tmp_path, "auto", 0.0)
    entry = build_entry(1)
    large = CachedPrefix("m", entry.key, entry.value or Layers(), 64 * MIB)
    disk.offer(large, SHAPE, 1.0)
    disk.write_next(5.0, busy=True, has_room=True, urgent=urgent)
    assert disk.get_next_write() == 0.0, "the copies are passed on in the next turn"
    disk.write_next(5.1, busy=True, has_room=True, urgent=urgent)
    assert disk.get_next_write() == 5.0 + seconds


@pytest.mark.parametrize(("spare", "speed"), [(0, BUSY_WRITE_SPEED), (-1, URGENT_WRITE_SPEED)])
def test_an_entry_is_urgent_where_memory_has_no_room_for_another(tmp_path: Path, spare: int, speed: float):
    disk, entry = DiskCache(tmp_path, "auto", 0.0), build_entry(3)
    room = entry.nbytes + spare
    memory = PrefixMemory(PrefixCache[Layers](), lambda: a_memory(room), lambda cap: cap, lambda: None)
    disk.offer(entry, SHAPE, 1.0)
    tier = DiskTier(disk, memory)
    tier.write_next(5.0, busy=True)
    tier.write_next(5.1, busy=True)
    assert disk.get_next_write() == 5.0 + PART / speed


def write_rest(disk: DiskCache) -> CacheState:
    """Write all that waits; return the state."""
    until = time.monotonic() + 60
    while disk.get_next_write() is not None or disk.queued_bytes:
        assert time.monotonic() < until
        disk.write_next(time.monotonic(), busy=False, has_room=True)
    return disk.describe(CacheState())


def test_copies_that_were_dropped_for_memory_are_made_again_while_their_entry_stays(tmp_path: Path):
    disk, entry = DiskCache(tmp_path, "auto", 0.0), build_entry(3)
    disk.offer(entry, SHAPE, 1.0)
    disk.write_next(1.0, busy=False, has_room=True)
    assert disk.clear_queue() == PART
    assert disk.queued_bytes == 0
    state = write_rest(disk)
    assert (state.disk_drops, state.disk_saves, disk.files) == (1, 3, 3)


def test_copies_of_a_cleared_prompt_are_not_written(tmp_path: Path):
    disk = DiskCache(tmp_path, "auto", 0.0)
    disk.offer(build_entry(1), SHAPE, 1.0)
    disk.write_next(1.0, busy=False, has_room=True)
    disk.clear("")
    assert disk.queued_bytes == 0
    assert (write_rest(disk).disk_saves, disk.files) == (0, 0)

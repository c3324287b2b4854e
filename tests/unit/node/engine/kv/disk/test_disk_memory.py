"""Bytes in the queue of the disk cache count as cached, and are dropped last. Parts are cut out only with room."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from node.engine.kv.disk.block_chain import BlockName
from node.engine.kv.disk.block_file import BlockArray, BlockPart
from node.engine.kv.disk.block_index import TEMPORARY
from node.engine.kv.disk.disk_budget import (
    BUSY_WRITE_INTERVAL_SECONDS,
    BUSY_WRITE_SPEED,
    URGENT_BURST_SECONDS,
    URGENT_WRITE_INTERVAL_SECONDS,
    URGENT_WRITE_SPEED,
)
from node.engine.kv.disk.disk_cache import DiskCache
from node.engine.kv.disk.write_queue import FLUSH_SECONDS, CacheShape
from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_memory import PrefixMemory
from node.engine.kv.prefix_store import BLOCK_TOKENS, CachedPrefix, PrefixCache
from node.engine.kv.radix_trie import pack
from node.engine.scheduling.disk.disk_tier import DiskTier
from tests.support.cluster.loopback_cluster import a_memory
from wire.report import CacheState, Memory
from wire.units import GIB, MIB

SHAPE = CacheShape("m", frozenset({BlockPart.TOKENS}), 0)
WIDTH = 64


def build_entry(blocks: int, token: int = 0) -> CachedPrefix[Layers]:
    """Return an entry of `blocks` blocks, all of the same token."""
    layer: Any = KVCache()
    values = mx.zeros((1, 1, blocks * BLOCK_TOKENS, WIDTH))
    layer.update_and_fetch(values, values)
    ids = [token] * (blocks * BLOCK_TOKENS)
    return CachedPrefix("m", pack(ids), Layers([layer]), 2 * values.nbytes)


@contextmanager
def stalled(disk: DiskCache, folder: Path) -> Iterator[None]:
    """Stall the writer at a file of half the size of a part, as a disk that does not answer does."""
    name = BlockName("m", BlockPart.TOKENS, bytes(16))
    file = folder / f"{name.file}{TEMPORARY}"
    file.parent.mkdir()
    os.mkfifo(file)  # opening it waits for a reader
    assert disk.writer is not None
    budget, until = disk.writer.budget_bytes, time.monotonic() + 60
    disk.writer.put(name, [BlockArray("float32", np.zeros((1, 1, 256, 64), np.float32))])
    while disk.writer.budget_bytes > budget - PART // 4:  # until the writer has begun
        assert time.monotonic() < until
        time.sleep(0.001)
    try:
        yield
    finally:
        file.read_bytes()


PART = 2 * 4 * BLOCK_TOKENS * WIDTH
"""Bytes of one block of an entry of `build_entry`."""


def test_the_queue_is_released_after_the_last_entry(tmp_path: Path):
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
    assert (len(store), disk.writer.drops) == (0, 0), "parts are soon written, and free their memory then"
    memory.evict_until(iter([False, True]).__next__)
    assert disk.writer.drops > 0
    assert memory.nbytes <= 2 * 64 * MIB, "the part in progress stays"


def test_the_parts_of_a_removed_entry_are_not_written_although_the_writer_has_them(tmp_path: Path):
    disk, entry = DiskCache(tmp_path, "auto", 0.0), build_entry(2)
    with stalled(disk, tmp_path):
        disk.offer(entry, SHAPE, 1.0)
        while disk.queue.get_next_write() is not None:
            disk.write_next(time.monotonic(), busy=False, room=4, urgent=True)
        disk.remove_entry(entry, SHAPE)
    assert disk.writer is not None
    assert disk.writer.wait(10)
    assert (disk.files, disk.find(SHAPE, "", entry.key), len(list(tmp_path.glob("m/*")))) == (1, None, 1)


def test_an_eviction_does_not_wait_for_the_part_that_is_being_written(tmp_path: Path):
    disk = DiskCache(tmp_path, "auto", 0.0)
    memory = PrefixMemory(PrefixCache[Layers](), lambda: a_memory(0), lambda cap: cap, lambda: None, disk)
    with stalled(disk, tmp_path):
        memory.evict_until(lambda: False)
        begun = time.monotonic()
        assert not any(memory.evict_until_fits(1) for _ in range(100))
        assert time.monotonic() - begun < 50 * FLUSH_SECONDS, "only the first one waits"
        assert memory.nbytes == PART // 2


def test_the_newest_entry_is_written_first_and_evicted_ones_cost_no_pause(tmp_path: Path):
    disk, old, evicted, new = DiskCache(tmp_path, "auto", 0.0), build_entry(2), build_entry(1, 1), build_entry(1, 2)
    for entry in (old, evicted, new):
        disk.offer(entry, SHAPE, 1.0)
    evicted.clear()
    now = 1.0
    disk.write_next(now, busy=True, room=1)
    disk.write_next(now + 0.001, busy=True, room=1)
    wait_written(disk)
    assert disk.find(SHAPE, "", new.key + pack([0])) is not None
    assert disk.find(SHAPE, "", old.key) is None
    now = disk.queue.get_next_write() or 0.0
    for _ in range(3):
        disk.write_next(now, busy=True, room=1)
    disk.write_next(now + 0.001, busy=True, room=1)
    wait_written(disk)
    assert (disk.files, disk.queue.unwritten) == (2, 1)
    assert disk.find(SHAPE, "", old.key) is not None


@pytest.mark.parametrize(("room", "parts"), [(2 * PART, 1), (2 * PART - 1, 0)])
def test_a_part_is_cut_out_where_two_of_them_fit_however_small_the_room(tmp_path: Path, room: int, parts: int):
    disk = DiskCache(tmp_path, "auto", 0.0)
    memory = PrefixMemory(PrefixCache[Layers](), lambda: a_memory(room), lambda cap: cap, lambda: None, disk)
    disk.offer(build_entry(3), SHAPE, 1.0)
    tier = DiskTier(disk, memory)
    tier.write_next(1.0, busy=False)
    assert disk.queued_bytes == parts * PART
    disk.write_next(1.0, busy=False, room=0)
    assert disk.describe(CacheState()).disk_saves == parts


@pytest.mark.parametrize("blocks", [1, 3])
def test_small_parts_are_written_at_a_speed_while_requests_run(tmp_path: Path, blocks: int):
    disk = DiskCache(tmp_path, "auto", 0.0)
    disk.offer(build_entry(blocks), SHAPE, 1.0)
    disk.write_next(5.0, busy=True, room=4)
    assert disk.queue.get_next_write() == 0.0, "the copies are passed on in the next turn"
    disk.write_next(5.001, busy=True, room=4)
    assert disk.queue.get_next_write() == 5.0 + PART / BUSY_WRITE_SPEED


def test_small_urgent_parts_are_written_together_at_a_speed_while_requests_run(tmp_path: Path):
    disk, begin, seconds = DiskCache(tmp_path, "auto", 0.0), 5.0, 0.1
    disk.offer(build_entry(80), SHAPE, 1.0)
    disk.write_next(begin, busy=True, room=3, urgent=True)
    assert disk.queued_bytes == 3 * PART
    for turn in range(1, 101):
        disk.write_next(begin + turn * seconds / 100, busy=True, room=3, urgent=True)
    wait_written(disk)
    allowed = URGENT_WRITE_SPEED * (seconds + URGENT_BURST_SECONDS)
    assert allowed - 4 * PART <= disk.describe(CacheState()).disk_saves * PART <= allowed + PART


@pytest.mark.parametrize(
    ("urgent", "due"),
    [(False, BUSY_WRITE_INTERVAL_SECONDS), (True, URGENT_WRITE_INTERVAL_SECONDS - URGENT_BURST_SECONDS)],
)
def test_large_parts_are_written_in_an_interval_while_requests_run(tmp_path: Path, urgent: bool, due: float):
    disk = DiskCache(tmp_path, "auto", 0.0)
    entry = build_entry(1)
    large = CachedPrefix("m", entry.key, entry.value or Layers(), 64 * MIB)
    disk.offer(large, SHAPE, 1.0)
    disk.write_next(5.0, busy=True, room=4, urgent=urgent)
    assert disk.queue.get_next_write() == 0.0, "the copies are passed on in the next turn"
    disk.write_next(5.001, busy=True, room=4, urgent=urgent)
    assert disk.queue.get_next_write() == 5.0 + due


@pytest.mark.parametrize(("spare", "due"), [(0, 5.0 + PART / BUSY_WRITE_SPEED), (-1, 0.0)])
def test_an_entry_is_urgent_where_memory_has_no_room_for_another(tmp_path: Path, spare: int, due: float):
    disk, entry = DiskCache(tmp_path, "auto", 0.0), build_entry(3)
    room = entry.nbytes + spare
    memory = PrefixMemory(PrefixCache[Layers](), lambda: a_memory(room), lambda cap: cap, lambda: None)
    disk.offer(entry, SHAPE, 1.0)
    tier = DiskTier(disk, memory)
    tier.write_next(5.0, busy=True)
    tier.write_next(5.001, busy=True)
    assert disk.queue.get_next_write() == due, "0.0: the next part was cut out already"


def test_a_part_of_a_batch_is_copied_before_the_next_step(tmp_path: Path):
    disk, entry = DiskCache(tmp_path, "auto", 0.0), build_entry(2)
    layers = entry.value
    entry.clear()
    disk.offer(entry, SHAPE, 1.0, lambda: layers)
    disk.write_next(1.0, busy=True, room=1)
    assert (disk.queue.nbytes, disk.describe(CacheState()).disk_saves) == (0, 1)
    disk.write_next(2.0, busy=True, room=1)
    wait_written(disk)
    assert disk.find(SHAPE, "", entry.key + pack([0])) is not None


def wait_written(disk: DiskCache) -> None:
    """Wait until the writer has written all that is queued."""
    until = time.monotonic() + 60
    while disk.queued_bytes:
        assert time.monotonic() < until
        time.sleep(0.001)


def write_rest(disk: DiskCache) -> CacheState:
    """Write all that waits; return the state."""
    until = time.monotonic() + 60
    while disk.queue.get_next_write() is not None or disk.queued_bytes:
        assert time.monotonic() < until
        disk.write_next(time.monotonic(), busy=False, room=1)
    return disk.describe(CacheState())


def test_copies_are_written_before_their_memory_is_released(tmp_path: Path):
    disk = DiskCache(tmp_path, "auto", 0.0)
    disk.offer(build_entry(3), SHAPE, 1.0)
    disk.write_next(1.0, busy=False, room=1)
    assert disk.clear_queue() == PART
    assert (disk.files, disk.queued_bytes) == (1, 0)
    state = write_rest(disk)
    assert (state.disk_drops, state.disk_saves, disk.files) == (0, 3, 3)


def test_copies_are_dropped_where_the_disk_does_not_answer_and_made_again_while_their_entry_stays(tmp_path: Path):
    disk = DiskCache(tmp_path, "auto", 0.0)
    with stalled(disk, tmp_path):
        disk.offer(build_entry(3), SHAPE, 1.0)
        disk.write_next(1.0, busy=False, room=1)
        assert disk.clear_queue() == PART
        assert disk.queued_bytes == PART // 2, "the part that is being written"
    state = write_rest(disk)
    assert (state.disk_drops, state.disk_saves) == (1, 5)
    assert disk.files == 4


def test_copies_of_a_cleared_prompt_are_not_written(tmp_path: Path):
    disk = DiskCache(tmp_path, "auto", 0.0)
    disk.offer(build_entry(1), SHAPE, 1.0)
    disk.write_next(1.0, busy=False, room=1)
    disk.clear("")
    assert disk.queued_bytes == 0
    assert (write_rest(disk).disk_saves, disk.files) == (0, 0)

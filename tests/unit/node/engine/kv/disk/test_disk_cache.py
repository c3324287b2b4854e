"""The disk cache without an engine: lookups, counts, copies of entries, two caches on one folder, and removals."""

import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import msgspec
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from node.engine.kv.disk.block_file import BlockPart
from node.engine.kv.disk.block_index import TEMPORARY
from node.engine.kv.disk.disk_budget import DAILY_DISK_SHARE, FILE
from node.engine.kv.disk.disk_cache import FIRST_READ_SPEED, IDENTITY, LOCK, SPEED_WEIGHT, DiskCache, clear_folder
from node.engine.kv.disk.write_queue import RETRY_SECONDS, VERSIONS, CacheShape, list_entry_parts
from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_store import BLOCK_TOKENS, MAX_EVICTIONS_REPORTED, CachedPrefix, DiskCopy
from node.engine.kv.radix_trie import pack
from node.engine.kv.window_history import StoredWindow, WindowPiece
from wire.report import CacheState
from wire.units import MIB

PLAIN = CacheShape("m", frozenset({BlockPart.TOKENS}), 0)
WINDOWS = CacheShape("m", frozenset({BlockPart.TOKENS, BlockPart.WINDOW}), BLOCK_TOKENS + 1)
STATES = CacheShape("m", frozenset({BlockPart.TOKENS, BlockPart.STATE}), 0)
IDS = list(range(4 * BLOCK_TOKENS))


def open_cache(folder: Path, min_seconds: float = 0.0) -> DiskCache:
    return DiskCache(folder, "auto", min_seconds)


def build_entry(shape: CacheShape, ids: Iterable[int], name: bytes = b"hash", scope: str = "") -> CachedPrefix[Layers]:
    """Return an entry of these tokens with the layers of a shape."""
    key = pack(ids)
    values = mx.zeros((1, 1, len(key) // 4, 2))
    layer: Any = KVCache()
    layer.update_and_fetch(values, values)
    layers: list[Any] = [layer]
    if BlockPart.WINDOW in shape.parts:
        layers.append(StoredWindow(shape.window, (WindowPiece(0, values, values),)))
    if BlockPart.STATE in shape.parts:
        state = cast("Any", ArraysCache)(1)
        state[0] = mx.zeros((1, 3))
        layers.append(state)
    return CachedPrefix("m", key, layers, 2 * values.nbytes, name, scope=scope)


def write(disk: DiskCache, *entries: CachedPrefix[Layers], shape: CacheShape = PLAIN) -> CacheState:
    """Write all parts of entries, and return the state."""
    for entry in entries:
        disk.offer(entry, shape, 1.0)
    until = time.monotonic() + 60
    while disk.queue.get_next_write() is not None or disk.queued_bytes:
        assert time.monotonic() < until
        disk.write_next(time.monotonic(), busy=False, room=4, urgent=True)
    return disk.describe(CacheState())


def find(disk: DiskCache, shape: CacheShape, ids: Iterable[int], scope: str = "") -> list[tuple[str, int]]:
    """Return kind and first position of each part of the plan for a prompt."""
    plan = disk.find(shape, scope, pack(ids))
    if plan is None:
        return []
    assert plan.length >= max(part.start for part in plan.parts)
    return [(part.name.part.value, part.start) for part in plan.parts]


@pytest.mark.parametrize("drop", [lambda disk, _: disk.clear(""), lambda disk, entry: disk.remove_entry(entry, PLAIN)])
def test_launched_copies_end_before_they_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drop: Callable[[DiskCache, CachedPrefix[Layers]], None]
):
    disk, entry, waited = open_cache(tmp_path), build_entry(PLAIN, IDS), list[tuple[mx.array, ...]]()
    disk.offer(entry, PLAIN, 1.0)
    disk.write_next(time.monotonic(), busy=False, room=1)
    assert disk.queue.launched
    monkeypatch.setattr("node.engine.kv.disk.layer_parts.evaluate", waited.append)
    drop(disk, entry)
    assert len(waited) == 1
    assert not disk.queue.launched


# lookups


def test_whole_blocks_are_found_up_to_the_last_token(tmp_path: Path):
    disk = open_cache(tmp_path)
    assert disk.find(PLAIN, "", pack(IDS)) is None
    write(disk, build_entry(PLAIN, IDS[: 3 * BLOCK_TOKENS + 9]))
    blocks = [("t", 0), ("t", BLOCK_TOKENS), ("t", 2 * BLOCK_TOKENS)]
    assert find(disk, PLAIN, IDS) == find(disk, PLAIN, IDS[: 3 * BLOCK_TOKENS + 1]) == blocks
    assert find(disk, PLAIN, IDS[: 3 * BLOCK_TOKENS]) == blocks[:2], "a forward computes the last token"
    assert find(disk, PLAIN, [*IDS[: 2 * BLOCK_TOKENS], 7, *IDS]) == blocks[:2]
    assert find(disk, PLAIN, [7, *IDS[1:]]) == find(disk, PLAIN, IDS, "other") == []
    assert find(disk, PLAIN._replace(fingerprint="n"), IDS) == find(disk, PLAIN._replace(parts=frozenset()), IDS) == []
    plan = disk.find(PLAIN, "", pack(IDS))
    assert plan is not None
    assert (plan.length, plan.nbytes) == (3 * BLOCK_TOKENS, sum(file.stat().st_size for file in tmp_path.glob("m/*")))
    assert (disk.files, disk.nbytes) == (3, plan.nbytes)


def test_a_prompt_with_windows_needs_the_blocks_of_its_window_only(tmp_path: Path):
    disk = open_cache(tmp_path)
    write(disk, build_entry(WINDOWS, IDS), shape=WINDOWS)
    plan = disk.find(WINDOWS, "", pack([*IDS, 1]))
    assert plan is not None
    names = {(part.name.part.value, part.start): part for part in plan.parts}
    windows, tokens = [("w", at * BLOCK_TOKENS) for at in (2, 3)], [("t", at * BLOCK_TOKENS) for at in range(4)]
    assert list(names) == [*windows, *tokens], "two blocks hold a window of one block and a token"
    disk.remove_parts([names["w", 3 * BLOCK_TOKENS]])
    assert find(disk, WINDOWS, [*IDS, 1]) == [("w", BLOCK_TOKENS), ("w", 2 * BLOCK_TOKENS), *tokens[:3]]
    disk.remove_parts([names["w", 2 * BLOCK_TOKENS]])
    assert find(disk, WINDOWS, [*IDS, 1]) == [("w", 0), ("w", BLOCK_TOKENS), *tokens[:2]]
    assert find(disk, WINDOWS, IDS[: BLOCK_TOKENS + 1]) == [("w", 0), ("t", 0)]


def test_a_prompt_with_a_state_is_found_at_its_longest_state(tmp_path: Path):
    disk = open_cache(tmp_path)
    lengths = (40, BLOCK_TOKENS + 3, 2 * BLOCK_TOKENS)
    write(disk, *(build_entry(STATES, IDS[:length]) for length in lengths), shape=STATES)
    blocks = [("t", 0), ("t", BLOCK_TOKENS)]
    for most, length, parts in (
        (len(IDS), 2 * BLOCK_TOKENS, [*blocks, ("s", 2 * BLOCK_TOKENS)]),
        (2 * BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS, [*blocks, ("s", 2 * BLOCK_TOKENS)]),
        (2 * BLOCK_TOKENS, BLOCK_TOKENS + 3, [blocks[0], ("s", BLOCK_TOKENS)]),
        (41, 40, [("s", 0)]),
        (40, 0, []),
    ):
        plan = disk.find(STATES, "", pack(IDS[:most]))
        assert (0 if plan is None else plan.length) == length
        assert find(disk, STATES, IDS[:most]) == parts


# restorations


def test_a_restoration_counts_as_a_hit_and_updates_the_speed_and_the_times_of_its_files(tmp_path: Path):
    disk = open_cache(tmp_path)
    write(disk, build_entry(PLAIN, IDS))
    files = list(tmp_path.glob("m/*"))
    for file in files:
        os.utime(file, (1e9, 1e9))
    plan = disk.find(PLAIN, "", pack([*IDS, 1]))
    assert plan is not None
    assert disk.estimate_read_seconds(int(FIRST_READ_SPEED)) == 1.0
    cache: Any = KVCache()
    restore = disk.begin_restore(plan, [cache])
    while not restore.step(0.1):
        assert restore.invalid is None
    disk.end_restore(restore)
    state = disk.describe(CacheState())
    assert (state.disk_hits, state.disk_hit_tokens, state.disk_read_bytes) == (1, len(IDS), disk.nbytes)
    assert (state.disk_errors, dict(disk.model_hits)) == (0, {"m": 1})
    speed = FIRST_READ_SPEED + SPEED_WEIGHT * (plan.nbytes / restore.seconds - FIRST_READ_SPEED)
    assert disk.estimate_read_seconds(1000) == pytest.approx(1000 / speed)
    until = time.monotonic() + 60
    while not all(file.stat().st_mtime > 1e9 for file in files):
        assert time.monotonic() < until
        time.sleep(0.001)
    times = [(tmp_path / part.name.file).stat().st_mtime_ns for part in plan.parts]
    assert times == sorted(set(times), reverse=True), "the first file is the last to be evicted after a restart"
    disk.close()
    again = DiskCache(tmp_path, plan.nbytes, 0.0)
    write(again, build_entry(PLAIN, [7] * (3 * BLOCK_TOKENS)))
    assert find(again, PLAIN, [*IDS, 1]) == [("t", 0)]


def test_an_invalid_file_is_a_fault_and_is_deleted(tmp_path: Path):
    disk = open_cache(tmp_path)
    write(disk, build_entry(PLAIN, IDS))
    plan = disk.find(PLAIN, "", pack([*IDS, 1]))
    assert plan is not None
    file = tmp_path / plan.parts[2].name.file
    file.write_bytes(b"invalid")
    cache: Any = KVCache()
    restore = disk.begin_restore(plan, [cache])
    while not restore.step(0.1):
        continue
    disk.end_restore(restore)
    state = disk.describe(CacheState())
    assert (state.disk_hits, state.disk_hit_tokens, state.disk_errors, disk.faults) == (0, 0, 1, 1)
    assert not file.exists()
    assert find(disk, PLAIN, [*IDS, 1]) == [("t", 0), ("t", BLOCK_TOKENS)]


# two caches on one folder


def test_a_second_cache_reads_and_writes_only_after_the_first_has_ended(tmp_path: Path):
    first = open_cache(tmp_path)
    write(first, build_entry(PLAIN, IDS))
    unfinished = tmp_path / "m" / f"{'0' * 32}.t.new"
    unfinished.write_bytes(b"x")
    second = open_cache(tmp_path)
    assert (first.writer is None, second.writer is None, second.store_id) == (False, True, first.store_id)
    assert find(second, PLAIN, [*IDS, 1]) == find(first, PLAIN, [*IDS, 1])
    state = write(second, build_entry(PLAIN, [9] * BLOCK_TOKENS))
    assert (state.disk_saves, state.disk_waiting, state.disk_quota, state.disk_budget) == (0, 0, 0, 0)
    assert (state.disk_files, state.disk_bytes, second.clear_queue()) == (4, first.nbytes, 0)
    assert (state.disk_evictions, state.disk_persisted, state.disk_drops, state.disk_errors) == (0, 0, 0, 0)
    with pytest.raises(BlockingIOError):
        second.clear("")
    second.write_next(time.monotonic(), busy=False, room=1)
    second.remove_entry(build_entry(PLAIN, [9] * BLOCK_TOKENS), PLAIN)
    plan = second.find(PLAIN, "", pack([*IDS, 1]))
    assert plan is not None
    second.remove_parts(plan.parts[2:])
    assert (second.files, len(list(tmp_path.glob("m/*.t")))) == (2, 4), "another process may use the files"
    assert unfinished.exists()
    first.close()
    state = write(second, build_entry(PLAIN, [9] * BLOCK_TOKENS))
    assert (state.disk_saves, state.disk_persisted, state.disk_files) == (1, 1, 3), "its quota counts all files"
    assert len(list(tmp_path.glob("m/*.t"))) == 3, "the removed files are not found again"
    assert find(second, PLAIN, [*IDS, 1]) == [("t", 0), ("t", BLOCK_TOKENS)]
    assert state.disk_quota > 0
    assert state.disk_budget > 0


def test_the_identity_of_a_folder_stays_until_all_models_are_cleared(tmp_path: Path):
    disk = open_cache(tmp_path)
    write(disk, build_entry(PLAIN, IDS))
    write(disk, build_entry(PLAIN, IDS), shape=PLAIN._replace(fingerprint="n"))
    assert {model: size.files for model, size in disk.list_models().items()} == {"m": 4, "n": 4}
    store = disk.store_id
    assert len(store) == 16
    disk.clear("m")
    assert (list(disk.list_models()), disk.store_id) == (["n"], store)
    assert sorted(path.name for path in tmp_path.iterdir()) == [IDENTITY, LOCK, "n"]
    disk.close()
    again = open_cache(tmp_path)
    assert (again.store_id, again.files) == (store, 4)
    again.offer(build_entry(PLAIN, [9] * BLOCK_TOKENS), PLAIN, 1.0)
    again.clear("")
    assert (again.files, again.nbytes, len(again.queue)) == (0, 0, 0)
    assert again.store_id not in ("", store)
    assert sorted(path.name for path in tmp_path.iterdir()) == [IDENTITY, LOCK]
    again.close()
    (tmp_path / IDENTITY).write_text("x" * 100)
    assert open_cache(tmp_path).store_id == "x" * 32


def test_no_folder_is_deleted_while_the_writer_writes_to_it(tmp_path: Path):
    disk, entry = open_cache(tmp_path), build_entry(PLAIN, IDS)
    name, _, _ = next(list_entry_parts(entry, PLAIN))
    temporary, pipe = tmp_path / (name.file + TEMPORARY), tmp_path / "pipe"
    temporary.parent.mkdir()
    os.mkfifo(temporary)
    pipe.hardlink_to(temporary)
    disk.offer(entry, PLAIN, 1.0)
    while disk.writer is None or not disk.writer.writing:
        disk.write_next(time.monotonic(), busy=False, room=1)
    cleared = threading.Event()

    def read_pipe() -> None:
        cleared.wait(0.2)  # it is not set before, because `clear` waits for the writer
        pipe.read_bytes()

    thread = threading.Thread(target=read_pipe)
    thread.start()
    disk.clear("m")
    writing = disk.writer.writing
    cleared.set()
    thread.join()
    assert (writing, disk.files, (tmp_path / "m").exists()) == ("", 0, False)


def test_the_written_bytes_of_an_earlier_engine_count_for_the_day(tmp_path: Path):
    disk = open_cache(tmp_path)
    daily = disk.describe(CacheState()).disk_budget
    disk.close()
    (tmp_path / FILE).write_bytes(msgspec.json.encode((0.0, time.time())))
    assert open_cache(tmp_path).describe(CacheState()).disk_budget < daily / 10


def test_a_folder_without_a_cache_is_cleared_unless_another_process_writes_to_it(tmp_path: Path):
    clear_folder(tmp_path / "gone", "")
    assert not (tmp_path / "gone").exists()
    disk = open_cache(tmp_path)
    write(disk, build_entry(PLAIN, IDS))
    write(disk, build_entry(PLAIN, IDS), shape=PLAIN._replace(fingerprint="n"))
    with pytest.raises(BlockingIOError):
        clear_folder(tmp_path, "")
    disk.close()
    clear_folder(tmp_path, "m")
    assert sorted(path.name for path in tmp_path.iterdir()) == [IDENTITY, LOCK, "n"]
    clear_folder(tmp_path, "")
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    clear_folder(tmp_path, "")
    open_cache(tmp_path).close()


# entries


@pytest.mark.parametrize(("seconds", "count"), [(0.5, 1), (0.499, 0)])
def test_an_entry_is_written_if_its_prefill_takes_enough_longer_than_reading_it(
    tmp_path: Path, seconds: float, count: int
):
    disk, entry = open_cache(tmp_path, 0.25), build_entry(PLAIN, IDS)
    entry.nbytes = int(FIRST_READ_SPEED) // 4  # 0.25 s
    disk.offer(entry, PLAIN, seconds)
    disk.offer(entry, PLAIN._replace(parts=frozenset()), 9.0)
    assert disk.describe(CacheState()).disk_waiting == count


def test_quota_and_budget_follow_from_the_disk_and_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    total, free = 400 * MIB, 100 * MIB
    disk_usage = SimpleNamespace(total=total, used=total - free, free=free)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: disk_usage)
    disk = open_cache(tmp_path)
    begun = disk.describe(CacheState())
    assert (begun.disk_quota, begun.disk_budget) == (free // 2, int(DAILY_DISK_SHARE * total))
    state = write(disk, build_entry(PLAIN, IDS))
    size = state.disk_bytes // 4
    assert state.disk_quota == (free + 3 * size) // 2, "the files before the last one count as free space"
    assert state.disk_budget == pytest.approx(DAILY_DISK_SHARE * total - 4 * size, abs=size)


def test_parts_that_the_writer_has_not_written_wait_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk, entry, may, measure = open_cache(tmp_path), build_entry(PLAIN, IDS), threading.Event(), shutil.disk_usage

    def wait(folder: Path) -> object:
        assert may.wait(30)
        return measure(folder)

    monkeypatch.setattr("shutil.disk_usage", wait)
    disk.offer(entry, PLAIN, 1.0)
    for _ in range(2):  # the second call passes the copies of the first one to the writer
        disk.write_next(time.monotonic(), busy=False, room=2, urgent=True)
    waiting = disk.describe(CacheState()).disk_waiting
    may.set()
    assert waiting == 1 + 2, "the entry, of which parts are not copied yet, and two parts"
    assert write(disk).disk_waiting == 0


def test_an_idle_engine_writes_without_pauses(tmp_path: Path):
    disk, entry = open_cache(tmp_path), build_entry(PLAIN, IDS)
    entry.nbytes = 400 * MIB  # 100 MiB a part: a second apart while requests run
    disk.offer(entry, PLAIN, 9.0)
    counts = list[int]()
    for now, busy in ((1.0, True), (1.9, True), (2.0, False), (2.001, False)):
        disk.write_next(now, busy=busy, room=1)
        counts.append(len(disk.queue.launched))
    assert counts == [1, 0, 1, 1]


def test_a_removed_entry_leaves_no_file_and_nothing_in_the_queue(tmp_path: Path):
    disk = open_cache(tmp_path)
    other, written, waiting = (build_entry(PLAIN, ids) for ids in ([9] * BLOCK_TOKENS, IDS, [7] * (3 * BLOCK_TOKENS)))
    write(disk, other, written)
    disk.offer(build_entry(PLAIN, [5] * BLOCK_TOKENS), PLAIN, 1.0)
    disk.offer(waiting, PLAIN, 1.0)
    disk.write_next(time.monotonic(), busy=False, room=1)
    assert (disk.queue.nbytes > 0, len(disk.queue)) == (True, 2)
    for entry in (written, waiting):
        disk.remove_entry(entry, PLAIN)
    assert (disk.queue.nbytes, len(disk.queue), disk.queue.unwritten) == (0, 1, 0)
    state = write(disk)
    assert (state.disk_files, state.disk_drops) == (2, 0)
    assert find(disk, PLAIN, [5] * 300) == [("t", 0)], "another entry is written"
    assert find(disk, PLAIN, [9] * 300) == [("t", 0)], "other files stay"


def test_after_a_failed_write_no_part_is_copied_for_a_while(tmp_path: Path):
    disk, file = open_cache(tmp_path), tmp_path / "m"
    file.touch()
    assert write(disk, build_entry(PLAIN, IDS[:BLOCK_TOKENS])).disk_errors == 1
    file.unlink()
    disk.offer(build_entry(PLAIN, [7] * BLOCK_TOKENS), PLAIN, 1.0)
    now = time.monotonic()
    disk.write_next(now, busy=False, room=1)
    assert (disk.queue.get_next_write(), disk.queue.launched, len(disk.queue)) == (now + RETRY_SECONDS, set(), 1)


def test_the_names_of_files_depend_on_the_versions_of_the_libraries():
    assert f"mlx {version('mlx')} " in VERSIONS
    assert f"mlx-lm {version('mlx-lm')}" in VERSIONS


def test_a_prompt_that_is_continued_is_evicted_last_and_from_its_end(tmp_path: Path):
    single = open_cache(tmp_path / "single")
    write(single, build_entry(PLAIN, IDS[:BLOCK_TOKENS]))
    disk = DiskCache(tmp_path / "full", 5 * single.nbytes, 0.0)
    other = [9] * (2 * BLOCK_TOKENS)
    for ids in (IDS[: 2 * BLOCK_TOKENS], other, IDS[: 3 * BLOCK_TOKENS]):
        write(disk, build_entry(PLAIN, ids))
        disk.take_lost()
    assert disk.files == 5
    write(disk, build_entry(PLAIN, [8] * (2 * BLOCK_TOKENS)))
    assert (len(find(disk, PLAIN, [*other, 1])), len(find(disk, PLAIN, IDS))) == (0, 3)
    write(disk, build_entry(PLAIN, [7] * BLOCK_TOKENS))
    assert len(find(disk, PLAIN, IDS)) == 2


def test_a_prompt_is_lost_once_neither_memory_nor_disk_has_it(tmp_path: Path):
    disk = open_cache(tmp_path)
    entries = [build_entry(STATES, IDS[:length], bytes([length])) for length in (40, 41, 42)]
    write(disk, *entries, shape=STATES)
    for entry in entries[:2]:
        assert entry.copy is not None
        assert (entry.copy.in_memory, entry.copy.on_disk) == (True, True)
        entry.copy.leave_memory()
    assert disk.take_lost() == []
    for entry in entries[1:]:
        plan = disk.find(STATES, "", entry.key + pack([1]))
        assert plan is not None
        disk.remove_parts(plan.parts)
    assert disk.take_lost() == [bytes([41])]
    assert disk.take_lost() == []
    assert [entry.copy and entry.copy.on_disk for entry in entries] == [True, False, False]


def test_a_prompt_whose_parts_the_writer_drops_is_not_on_the_disk(tmp_path: Path):
    disk = DiskCache(tmp_path, 1000, 0.0)
    evicted, cached = (build_entry(PLAIN, [*IDS[:BLOCK_TOKENS], number], bytes([number])) for number in (1, 2))
    assert write(disk, evicted, cached).disk_drops == 2
    assert evicted.copy is not None
    evicted.copy.leave_memory()
    assert (disk.take_lost(), disk.take_lost()) == ([bytes([1])], [])
    assert (cached.copy is not None, cached.copy and cached.copy.on_disk) == (True, False)


def test_a_prompt_whose_parts_the_writer_drops_leaves_nothing_in_memory(tmp_path: Path):
    def count_copies() -> int:
        return sum(isinstance(found, DiskCopy) for found in gc.get_objects())

    disk, before = DiskCache(tmp_path, 1000, 0.0), count_copies()
    assert write(disk, build_entry(PLAIN, IDS)).disk_drops == 4
    assert count_copies() == before + 1
    assert (disk.take_lost(), count_copies()) == ([], before)


def test_a_prompt_written_again_before_its_removal_is_reported_is_on_the_disk(tmp_path: Path):
    disk, entries = open_cache(tmp_path), [build_entry(PLAIN, IDS, name) for name in (b"1", b"2")]
    write(disk, entries[0])
    assert disk.take_lost() == []
    plan = disk.find(PLAIN, "", entries[0].key)
    assert plan is not None
    disk.remove_parts(plan.parts)
    write(disk, entries[1])
    for entry in entries:
        assert entry.copy is not None
        entry.copy.leave_memory()
    assert (disk.take_lost(), disk.take_lost()) == ([b"1"], [])


def test_a_prompt_whose_first_file_is_evicted_before_its_last_is_written_is_lost(tmp_path: Path):
    disk, entry = open_cache(tmp_path), build_entry(PLAIN, IDS[: 2 * BLOCK_TOKENS])
    write(disk, build_entry(PLAIN, IDS[:BLOCK_TOKENS]))
    disk.take_lost()
    disk.offer(entry, PLAIN, 1.0)
    disk.write_next(time.monotonic(), busy=False, room=4, urgent=True)
    assert entry.copy is not None
    entry.copy.leave_memory()
    assert disk.take_lost() == []
    plan = disk.find(PLAIN, "", pack(IDS))
    assert plan is not None
    disk.remove_parts(plan.parts[:1])
    assert disk.take_lost() == [b"hash"]


def test_a_prompt_whose_parts_wait_for_the_writer_is_on_the_disk_until_they_are_dropped(tmp_path: Path):
    disk = open_cache(tmp_path)
    first, second = build_entry(PLAIN, IDS[: 2 * BLOCK_TOKENS], b"1"), build_entry(PLAIN, [7] * BLOCK_TOKENS, b"2")
    write(disk, build_entry(PLAIN, IDS[:BLOCK_TOKENS]))
    for entry in (first, second):
        disk.offer(entry, PLAIN, 1.0)
        disk.write_next(time.monotonic(), busy=False, room=4, urgent=True)
        assert entry.copy is not None
        entry.copy.leave_memory()
    assert disk.take_lost() == [], "written, being written, or about to be"
    disk.clear("another model")
    assert sorted(disk.take_lost()) in ([b"2"], [b"1", b"2"]), "the copy of the second was not passed to the writer"
    assert disk.take_lost() == []


def test_an_entry_without_its_state_is_not_on_the_disk(tmp_path: Path):
    disk = open_cache(tmp_path)
    entry = build_entry(STATES, IDS[: BLOCK_TOKENS + 3])
    assert entry.value is not None
    cast("Any", entry.value[-1])[0] = None
    assert write(disk, entry, shape=STATES).disk_files == 1
    assert disk.take_lost() == []
    assert entry.copy is not None
    assert not entry.copy.on_disk


def test_a_prompt_without_the_early_parts_of_its_window_is_on_the_disk(tmp_path: Path):
    disk, late = open_cache(tmp_path), mx.zeros((1, 1, 2 * BLOCK_TOKENS, 2))
    entry = build_entry(WINDOWS, IDS)
    assert entry.value is not None
    cast("Any", entry.value)[1] = StoredWindow(WINDOWS.window, (WindowPiece(2 * BLOCK_TOKENS, late, late),))
    assert write(disk, entry, shape=WINDOWS).disk_files == 4 + 2
    assert disk.take_lost() == []
    assert entry.copy is not None
    assert entry.copy.on_disk


def test_a_cache_that_becomes_the_writer_later_counts_the_files_of_the_earlier_one(tmp_path: Path):
    first = open_cache(tmp_path)
    second = open_cache(tmp_path)
    write(first, build_entry(PLAIN, IDS))
    nbytes = first.nbytes
    assert (second.nbytes, second.writer) == (0, None)
    first.close()
    state = write(second, build_entry(PLAIN, [7] * BLOCK_TOKENS))
    assert (state.disk_files, state.disk_bytes) == (5, nbytes * 5 // 4)
    assert find(second, PLAIN, [*IDS, 1]) == [("t", block * BLOCK_TOKENS) for block in range(4)]


def test_a_folder_that_cannot_be_read_when_its_lock_is_free_stores_nothing(tmp_path: Path):
    first, second = open_cache(tmp_path / "cache"), open_cache(tmp_path / "cache")
    first.close()
    shutil.rmtree(tmp_path / "cache")
    state = write(second, build_entry(PLAIN, IDS))
    assert (second.writer, state.disk_files, state.disk_waiting) == (None, 0, 0)


def test_of_many_prompts_behind_one_block_the_newest_are_reported(tmp_path: Path):
    disk, count, state = open_cache(tmp_path), MAX_EVICTIONS_REPORTED + 2, CacheState()
    for number in range(count):
        entry = build_entry(PLAIN, [*IDS[:BLOCK_TOKENS], number], bytes([number]))
        state = write(disk, entry)
        assert entry.copy is not None
        entry.copy.leave_memory()
        assert disk.take_lost() == []
    assert (state.disk_files, state.disk_persisted) == (1, 1)
    plan = disk.find(PLAIN, "", pack(IDS))
    assert plan is not None
    disk.remove_parts(plan.parts)
    assert disk.take_lost() == [bytes([number]) for number in range(2, count)]


def test_above_the_limit_of_the_queue_the_oldest_entry_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.engine.kv.disk.write_queue.MAX_PENDING", 2)
    disk = open_cache(tmp_path)
    assert (disk.queue.get_next_bytes(), disk.queue.get_entry_bytes(), disk.queue.get_next_write()) == (0, 0, None)
    entries = [build_entry(PLAIN, [number] * (number * BLOCK_TOKENS)) for number in (1, 2, 3)]
    for number, entry in enumerate(entries, 1):
        disk.offer(entry, PLAIN, 1.0)
        assert disk.queue.get_entry_bytes() == entry.nbytes
        assert disk.queue.get_next_bytes() == entry.nbytes // number, "a block"
    disk.offer(build_entry(PLAIN, [5] * (BLOCK_TOKENS - 1)), PLAIN, 1.0)
    assert (len(disk.queue), disk.queue.unwritten) == (2, 1), "an entry without a whole block is ignored"
    state = write(disk)
    assert (state.disk_files, state.disk_drops) == (5, 1)
    assert find(disk, PLAIN, [1] * 300) == []

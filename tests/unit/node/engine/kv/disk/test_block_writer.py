"""The writer of the disk cache: complete files, limits, and a disk that fails."""

import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from node.engine.kv.disk.block_chain import BlockName
from node.engine.kv.disk.block_file import BlockArray, BlockPart, decode_block
from node.engine.kv.disk.block_index import MAX_EVICTIONS_PER_SAVE, TEMPORARY, BlockIndex
from node.engine.kv.disk.block_writer import MAX_QUEUED_BYTES, PAUSE_AFTER_ERROR_SECONDS, BlockWriter
from node.engine.kv.disk.disk_budget import WriteBudget
from tests.support.readings import Later
from wire.units import GIB

ARRAYS = [BlockArray("float32", np.zeros((1, 1, 4, 8), np.float32))]


def block(number: int) -> BlockName:
    return BlockName("m", BlockPart.TOKENS, bytes([number]) * 16, 4)


def writer(folder: Path, quota: Callable[[], int] = lambda: GIB, daily: float = GIB) -> tuple[BlockWriter, BlockIndex]:
    index = BlockIndex()
    return BlockWriter(folder, index, quota, WriteBudget(daily, time.monotonic())), index


def wait(made: BlockWriter) -> None:
    until = time.monotonic() + 10
    while made.nbytes:
        assert time.monotonic() < until
        time.sleep(0.002)


def test_a_part_is_a_private_file_under_its_name(tmp_path: Path):
    made, index = writer(tmp_path)
    assert made.quota == GIB, "it is known before the first write"
    made.put(block(1), ARRAYS)
    wait(made)
    (file,) = tmp_path.glob("*/*")
    assert file == tmp_path / block(1).file
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert index.nbytes == file.stat().st_size
    assert decode_block(file.read_bytes(), block(1).chain, BlockPart.TOKENS, 4)
    assert (made.saves, made.persisted, made.drops, made.errors) == (1, 1, 0, 0)


def test_a_burst_loses_nothing_and_the_quota_is_kept(tmp_path: Path):
    made, index = writer(tmp_path, lambda: 2000)
    for number in range(100):
        made.put(block(number), ARRAYS)
    wait(made)
    assert made.saves == made.persisted == 100
    assert made.evictions == 100 - len(index)
    assert index.nbytes == sum(file.stat().st_size for file in tmp_path.glob("*/*")) <= 2000
    assert block(99) in index


def test_without_quota_or_budget_parts_are_dropped_and_counted(tmp_path: Path):
    for made, index in (writer(tmp_path, lambda: 0), writer(tmp_path, daily=10.0)):
        made.put(block(1), ARRAYS)
        wait(made)
        assert (made.saves, made.persisted, made.drops, len(index)) == (1, 0, 1, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_the_smaller_quota_drops_costs_no_write_budget(tmp_path: Path):
    quota = GIB
    made, index = writer(tmp_path, lambda: quota)
    for number in range(MAX_EVICTIONS_PER_SAVE + 2):
        made.put(block(number), ARRAYS)
    wait(made)
    left, quota = made.budget_bytes, index.nbytes // len(index) + 1
    made.put(block(100), ARRAYS)
    wait(made)
    assert (made.drops, len(index)) == (1, 2), "one save evicts at most that many files"
    assert left <= made.budget_bytes < left + quota, "time only adds to the budget"


def test_without_write_budget_no_file_is_evicted(tmp_path: Path):
    made, index = writer(tmp_path, lambda: 300, daily=300)
    made.put(block(1), ARRAYS)
    wait(made)
    assert index.nbytes > 150, "a second part needs the room of the first"
    made.put(block(2), ARRAYS)
    wait(made)
    assert (made.drops, made.evictions, list(tmp_path.glob("*/*"))) == (1, 0, [tmp_path / block(1).file])


def test_a_folder_that_is_gone_is_an_error_and_the_rest_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    queued = threading.Event()
    queued.set()

    def wait_quota() -> int:
        assert queued.wait(10)
        return GIB

    made, index = writer(tmp_path / "gone", wait_quota)
    queued.clear()
    for number in range(3):
        made.put(block(number), ARRAYS)
    queued.set()
    wait(made)
    assert (made.persisted, len(index)) == (0, 0)
    assert (made.saves, made.errors, made.drops) == (3, 1, 2)
    clock = Later()
    monkeypatch.setattr(time, "monotonic", clock)
    for clock.by, accepts in ((0.0, False), (PAUSE_AFTER_ERROR_SECONDS - 10, False), (PAUSE_AFTER_ERROR_SECONDS, True)):
        assert made.can_accept() is accepts


def test_a_part_that_cannot_get_its_name_leaves_no_file(tmp_path: Path):
    made, index = writer(tmp_path)
    (tmp_path / block(1).file).mkdir(parents=True)
    made.put(block(1), ARRAYS)
    wait(made)
    assert (made.errors, len(index), list(tmp_path.glob("m/*"))) == (1, 0, [tmp_path / block(1).file])


def test_a_part_that_cannot_be_encoded_is_an_error_and_the_next_part_is_written(tmp_path: Path):
    made, index = writer(tmp_path)
    made.put(block(1), [BlockArray("float32", np.zeros((1, 0, 4, 8), np.float32))])
    assert made.wait(10)
    assert (made.errors, made.persisted, made.nbytes) == (1, 0, 0)
    made.put(block(2), ARRAYS)
    assert made.wait(10)
    assert (made.persisted, len(index)) == (1, 1)


def test_queued_parts_are_dropped_when_memory_is_short(tmp_path: Path):
    made, _ = writer(tmp_path)
    large = [BlockArray("float32", np.zeros((1, 1, 4, MAX_QUEUED_BYTES // 32), np.float32))]
    for number in range(4):
        made.put(block(number), large)
    assert not made.can_accept()
    dropped = made.clear()
    wait(made)
    assert dropped == made.drops * large[0].nbytes
    assert made.drops >= 1
    assert (made.persisted + made.drops, len(made)) == (4, 0)


@pytest.mark.parametrize("removed", [(1, 2, 3), (2,), (1,)])
def test_a_removed_part_is_not_written_although_it_is_being_written(tmp_path: Path, removed: tuple[int, ...]):
    writing, may = threading.Event(), threading.Event()
    may.set()

    def wait_quota() -> int:
        writing.set()
        assert may.wait(10)
        return GIB

    made, index = writer(tmp_path, wait_quota)
    writing.clear()
    may.clear()
    for number in (1, 2, 3):
        made.put(block(number), ARRAYS)
    assert writing.wait(10)
    made.remove({block(number).file for number in removed})
    may.set()
    wait(made)
    assert [block(number) in index for number in (1, 2, 3)] == [number not in removed for number in (1, 2, 3)]
    assert (made.persisted, len(made), made.drops) == (3 - len(removed), 0, len(set(removed) - {1}))


def test_a_discarded_part_is_removed_although_it_is_being_written(tmp_path: Path):
    writing, may = threading.Event(), threading.Event()
    may.set()

    def wait_quota() -> int:
        writing.set()
        assert may.wait(10)
        return GIB

    made, index = writer(tmp_path, wait_quota)
    writing.clear()
    may.clear()
    for number in (1, 2):
        made.put(block(number), ARRAYS)
    assert writing.wait(10)
    made.discard()
    may.set()
    wait(made)
    assert (len(index), made.persisted, list(tmp_path.glob("*/*"))) == (0, 0, [])
    made.put(block(3), ARRAYS)
    wait(made)
    assert len(index) == 1


def test_a_folder_that_is_cleared_during_a_write_is_no_error(tmp_path: Path):
    made, index = writer(tmp_path)
    temporary, pipe = tmp_path / (block(1).file + TEMPORARY), tmp_path / "pipe"
    temporary.parent.mkdir()
    os.mkfifo(temporary)
    pipe.hardlink_to(temporary)
    larger_than_a_pipe = [BlockArray("float32", np.zeros((1, 1, 4, 65_536), np.float32))]
    made.put(block(1), larger_than_a_pipe)
    with pipe.open("rb") as reader:  # waits until the writer has opened the file
        made.discard()
        temporary.unlink()
        temporary.parent.rmdir()
        reader.read()
    assert made.wait(10)
    assert (made.errors, made.persisted, len(index), made.can_accept()) == (0, 0, 0, True)
    made.put(block(2), ARRAYS)
    wait(made)
    assert len(index) == 1


def test_a_quota_that_fell_is_reached_before_anything_is_written(tmp_path: Path):
    quota = [GIB]
    made, index = writer(tmp_path, lambda: quota[0])
    for number in range(40):
        made.put(block(number), ARRAYS)
    wait(made)
    quota[0] = size = index.nbytes // 40
    made.put(block(40), ARRAYS)
    wait(made)
    assert (made.evictions, made.drops, len(index)) == (MAX_EVICTIONS_PER_SAVE, 1, 40 - MAX_EVICTIONS_PER_SAVE)
    made.put(block(41), ARRAYS)
    wait(made)
    assert (made.evictions, made.drops, index.nbytes, block(41) in index) == (40, 1, size, True)
    assert [file.name for file in tmp_path.glob("*/*")] == [Path(block(41).file).name]
    assert made.quota == size

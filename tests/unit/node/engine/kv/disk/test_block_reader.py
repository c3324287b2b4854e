"""The reader of the disk cache: files in order, faults, stalls, and the end of its thread."""

import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from node.engine.kv.disk import block_reader
from node.engine.kv.disk.block_chain import BlockName
from node.engine.kv.disk.block_file import BlockArray, BlockPart, decode_block, encode_block
from node.engine.kv.disk.block_reader import BlockReader, DiskRestore, PlannedPart, ReadPlan
from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_store import BLOCK_TOKENS

PARTS = 6
Read = Callable[[], list[threading.Thread]]


def name(number: int) -> BlockName:
    return BlockName("m", BlockPart.TOKENS, bytes([number]) * 16)


def encode(number: int, width: int = 2) -> bytes:
    """Return a file whose keys and values are its number."""
    array = BlockArray("float32", np.full((1, 1, BLOCK_TOKENS, width), number, np.float32))
    return b"".join(bytes(piece) for piece in encode_block(name(number).chain, BlockPart.TOKENS, 256, [array, array]))


@pytest.fixture
def plan(tmp_path: Path) -> ReadPlan:
    """Write several files to the folder of the test, and return a plan of them."""
    (tmp_path / "m").mkdir()
    for number in range(PARTS):
        (tmp_path / name(number).file).write_bytes(encode(number))
    parts = tuple(PlannedPart(name(number), number * BLOCK_TOKENS) for number in range(PARTS))
    return ReadPlan(PARTS * BLOCK_TOKENS, parts, PARTS * len(encode(0)))


@pytest.fixture
def readers() -> Callable[[], list[threading.Thread]]:
    """Return a function that lists the threads that were started after the fixture."""
    before = set(threading.enumerate())
    return lambda: [thread for thread in threading.enumerate() if thread not in before]


def create_layers() -> Layers:
    cache: Any = KVCache()
    return [cache]


def run(restore: DiskRestore) -> None:
    """Step a restoration to its end."""
    until = time.monotonic() + 60
    while not restore.step(0.01):
        assert restore.layers is None
        assert time.monotonic() < until


def wait_ended(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_parts_are_restored_in_order(tmp_path: Path, plan: ReadPlan, readers: Read, monkeypatch: pytest.MonkeyPatch):
    def decode_slowly(*place: Any) -> list[BlockArray]:
        time.sleep(0.01)
        return decode_block(*place)

    monkeypatch.setattr(block_reader, "decode_block", decode_slowly)
    began = time.monotonic()
    restore = DiskRestore(tmp_path, plan, create_layers())
    run(restore)
    assert 0.01 * PARTS <= restore.seconds <= time.monotonic() - began
    assert (restore.invalid, restore.layers is None) == (None, False)
    layer: Any = (restore.layers or [])[0]
    assert layer.keys[0, 0, : PARTS * BLOCK_TOKENS : BLOCK_TOKENS, 0].tolist() == list(range(PARTS))
    wait_ended(readers())


@pytest.mark.parametrize(
    "content", [b"", encode(0), encode(3, 3)], ids=["empty", "of another place", "of other layers"]
)
def test_an_invalid_part_ends_the_restoration_and_the_reading(
    tmp_path: Path, plan: ReadPlan, readers: Read, content: bytes
):
    (tmp_path / name(3).file).write_bytes(content)
    restore = DiskRestore(tmp_path, plan, create_layers())
    run(restore)
    assert (restore.invalid, restore.layers) == (plan.parts[3], None)
    wait_ended(readers())


def test_the_reading_ends_at_a_file_that_is_gone(tmp_path: Path, plan: ReadPlan, readers: Read):
    (tmp_path / name(1).file).unlink()
    reader = BlockReader(tmp_path, plan)
    first, second = reader.take(10), reader.take(10)
    assert first is not None
    assert (first.planned, first.nbytes, first.arrays is None) == (plan.parts[0], len(encode(0)), False)
    assert second is not None
    assert (second.planned, second.nbytes, second.arrays) == (plan.parts[1], 0, None)
    wait_ended(readers())
    assert reader.take(0.0) is None


def test_a_closed_restoration_ends_its_thread_and_holds_no_part(tmp_path: Path, plan: ReadPlan, readers: Read):
    restore = DiskRestore(tmp_path, plan, create_layers())
    assert not restore.step(10)
    restore.close()
    wait_ended(readers())


def test_a_part_that_is_queued_during_the_close_is_released(
    tmp_path: Path, plan: ReadPlan, readers: Read, monkeypatch: pytest.MonkeyPatch
):
    queueing, closed = threading.Event(), threading.Event()

    class LateQueue(queue.Queue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            queueing.set()
            closed.wait(10)
            super().put(item, block, timeout)

    monkeypatch.setattr(block_reader, "queue", SimpleNamespace(Queue=LateQueue, Empty=queue.Empty, Full=queue.Full))
    reader = BlockReader(tmp_path, plan)
    assert queueing.wait(10)
    reader.close()
    closed.set()
    wait_ended(readers())
    assert reader.take(0.0) is None


def test_a_slow_file_is_awaited(tmp_path: Path, plan: ReadPlan):
    file = tmp_path / name(0).file
    file.unlink()
    os.mkfifo(file)  # reading it waits for a writer
    restore = DiskRestore(tmp_path, plan, create_layers())
    assert not restore.step(0.0)
    file.write_bytes(encode(0))
    run(restore)
    assert restore.invalid is None


def test_each_part_begins_a_new_wait(tmp_path: Path, plan: ReadPlan, monkeypatch: pytest.MonkeyPatch, readers: Read):
    file = tmp_path / name(1).file
    file.unlink()
    os.mkfifo(file)
    monkeypatch.setattr("node.engine.kv.disk.block_reader.STALLED_SECONDS", 0.0)
    restore = DiskRestore(tmp_path, plan, create_layers())
    monkeypatch.setattr("node.engine.kv.disk.block_reader.STALLED_SECONDS", 60.0)
    assert not restore.step(60.0), "the first part arrived"
    assert not restore.step(0.0), "the second part has 60 s from now"
    file.write_bytes(encode(1))
    run(restore)
    assert restore.invalid is None
    wait_ended(readers())


def test_a_file_that_does_not_come_is_the_invalid_part(
    tmp_path: Path, plan: ReadPlan, monkeypatch: pytest.MonkeyPatch, readers: Read
):
    monkeypatch.setattr("node.engine.kv.disk.block_reader.STALLED_SECONDS", 0.05)
    file = tmp_path / name(2).file
    file.unlink()
    os.mkfifo(file)
    restore = DiskRestore(tmp_path, plan, create_layers())
    run(restore)
    assert (restore.invalid, restore.layers) == (plan.parts[2], None)
    file.write_bytes(encode(2))
    wait_ended(readers())

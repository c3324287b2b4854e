"""The writer thread of a database: order, waits for the disk, the end of writing, and its own death."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.state import store_writer
from coordinator.state.store_errors import StoreError
from coordinator.state.store_writer import StoreWriter

INSERT = "INSERT INTO changes VALUES (?)"
FULL = sqlite3.OperationalError("database or disk is full")


class Connection(sqlite3.Connection):
    """A connection that raises `failure`, while it is set, for the change with the value `fails_at`, or for all."""

    failure: BaseException | None = None
    fails_at: object = None
    on_success: Callable[[], object] = bool

    def execute(self, sql: str, values: Any = (), /) -> sqlite3.Cursor:
        if self.failure is not None and self.fails_at in (None, *values):
            raise self.failure
        cursor = super().execute(sql, values)
        self.on_success()
        return cursor


class Writing:
    """A writer, the connection on which it writes, and the number of its deaths."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False, factory=Connection)
        self.connection.execute("CREATE TABLE changes (value)")
        self.deaths = list[bool]()
        self.writer = StoreWriter(self.connection, lambda: self.deaths.append(True))

    def put(self, *values: object) -> None:
        for value in values:
            try:
                self.writer.enqueue(INSERT, value)
            except StoreError:
                continue

    def read(self) -> list[object]:
        """Return the values on the disk, in the order in which they were written."""
        connection = sqlite3.connect(self.file)
        try:
            return [value for (value,) in connection.execute("SELECT value FROM changes ORDER BY rowid")]
        finally:
            connection.close()


@pytest.fixture
def writing(tmp_path: Path) -> Writing:
    return Writing(tmp_path / "changes.db")


async def test_a_flush_ends_after_the_changes_before_it_also_if_an_earlier_wait_was_cancelled(writing: Writing):
    writing.put(1, 2)
    cancelled = writing.writer.flush()
    cancelled.cancel()
    await writing.writer.flush()
    assert writing.read() == [1, 2]
    assert writing.writer.count_unwritten() == 0
    writing.put(3)
    writing.writer.close()
    assert writing.read() == [1, 2, 3]
    with pytest.raises(sqlite3.ProgrammingError):
        writing.connection.execute(INSERT, (4,))


async def test_changes_wait_in_their_order_and_are_tried_again_without_a_new_change(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_writer, "RETRY_SECONDS", 0.01)
    loop, written = asyncio.get_running_loop(), asyncio.Queue[None]()
    writing.connection.failure, writing.connection.fails_at = FULL, 2
    writing.put(1, 2)
    with pytest.raises(StoreError, match="disk is full\\): make room; it is tried again every 0 s"):
        await writing.writer.flush()
    writing.put(3, 4)
    with pytest.raises(StoreError):
        writing.writer.raise_failure()
    with pytest.raises(StoreError):
        await writing.writer.flush()
    assert (writing.read(), writing.writer.count_unwritten()) == ([1], 3)
    writing.connection.on_success = lambda: loop.call_soon_threadsafe(written.put_nowait, None)
    writing.connection.failure = None
    for _ in range(3):
        await asyncio.wait_for(written.get(), 20)
    await writing.writer.flush()
    assert (writing.read(), writing.writer.count_unwritten()) == ([1, 2, 3, 4], 0)
    writing.writer.raise_failure()
    writing.writer.close()
    assert writing.deaths == []


async def test_changes_that_wait_are_written_at_the_close(writing: Writing):
    writing.connection.failure = FULL
    writing.put(1, 2)
    with pytest.raises(StoreError):
        await writing.writer.flush()
    writing.connection.failure = None
    writing.writer.close()
    assert writing.read() == [1, 2]
    writing.writer.raise_failure()


async def test_a_later_change_is_not_tried_before_the_wait_is_over(writing: Writing):
    writing.connection.failure, writing.connection.fails_at = FULL, 1
    writing.put(1)
    with pytest.raises(StoreError):
        await writing.writer.flush()
    writing.put(2)
    with pytest.raises(StoreError):
        await writing.writer.flush()
    assert (writing.read(), writing.writer.count_unwritten()) == ([], 2)
    writing.writer.close()


@pytest.mark.parametrize(
    "failure", [sqlite3.IntegrityError("x"), OverflowError("x"), UnicodeEncodeError("utf-8", "x", 0, 1, "x")]
)
async def test_a_change_that_can_never_be_written_ends_the_writing(writing: Writing, failure: Exception):
    writing.put(1)
    await writing.writer.flush()
    writing.connection.failure, writing.connection.fails_at = failure, 2
    writing.put(2, 3)
    with pytest.raises(StoreError, match="restart the coordinator"):
        await writing.writer.flush()
    writing.connection.failure = None
    writing.put(4)
    with pytest.raises(StoreError, match="restart the coordinator"):
        await writing.writer.flush()
    assert writing.writer.count_unwritten() == 1
    writing.writer.close()
    assert (writing.read(), writing.deaths) == ([1], [])
    with pytest.raises(StoreError):
        writing.writer.raise_failure()


@pytest.mark.parametrize("waiting", [3, 4])
async def test_more_than_the_maximum_of_waiting_changes_are_lost(
    writing: Writing, monkeypatch: pytest.MonkeyPatch, waiting: int
):
    monkeypatch.setattr(store_writer, "MAX_UNWRITTEN", 3)
    writing.connection.failure = FULL
    writing.put(*range(waiting))
    with pytest.raises(StoreError, match="make room"):
        await writing.writer.flush()
    assert writing.writer.count_unwritten() == (3 if waiting == 3 else 1)
    writing.connection.failure = None
    writing.writer.close()
    assert writing.read() == ([0, 1, 2] if waiting == 3 else [])


def test_a_loop_that_ended_before_its_flush_does_not_end_the_writing(writing: Writing):
    goes_on = threading.Event()
    writing.connection.on_success = goes_on.wait
    writing.put(1)

    async def flush() -> None:
        writing.writer.flush()

    asyncio.run(flush())
    writing.put(2)
    goes_on.set()
    writing.writer.close()
    assert (writing.read(), writing.deaths) == ([1, 2], [])
    writing.writer.raise_failure()


async def test_an_unexpected_error_is_reported_once_and_every_later_flush_fails(writing: Writing):
    writing.put(1)
    await writing.writer.flush()
    writing.connection.failure = MemoryError()
    writing.put(2)
    for _ in range(2):
        with pytest.raises(StoreError, match="cannot be written any more \\(MemoryError"):
            await writing.writer.flush()
    writing.connection.failure = None
    writing.put(3)
    writing.writer.close()
    assert (writing.read(), writing.deaths) == ([1], [True])

"""Writer thread of a database: executes changes in order, each as one transaction."""

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable

import structlog

from coordinator.state.store_errors import StoreError

log = structlog.get_logger()


class StoreWriter:
    """Writer of changes to a database, on a thread of its own.

    A failed write is permanent: every later change raises `StoreError`. The thread calls `on_death` after any other
    error, and does no further writes.
    """

    def __init__(self, connection: sqlite3.Connection, on_death: Callable[[], object]) -> None:
        self._connection = connection
        self._on_death = on_death
        self._failure: StoreError | None = None
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_changes, name="store", daemon=True)
        self._thread.start()

    def enqueue(self, statement: str, *values: object) -> None:
        """Enqueue an SQL statement with its values as one change. Raise `StoreError` after a failed write."""
        self.raise_failure()
        self._writes.put(lambda: self._execute(statement, values))

    async def flush(self) -> None:
        """Wait until every change up to now is on disk. Raise `StoreError` if a write failed.

        Do not call after `close`, because the wait would not end.
        """
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the waiting loop may be closed
                loop.call_soon_threadsafe(done.set)

        self._writes.put(wake)
        await done.wait()
        self.raise_failure()

    def close(self) -> None:
        """Write pending changes and close the database. Call `raise_failure` to find out whether a write failed."""
        self._writes.put(None)
        self._thread.join()
        self._connection.close()

    def raise_failure(self) -> None:
        """Raise `StoreError` if a write has failed."""
        if self._failure is not None:
            raise self._failure

    def _write_changes(self) -> None:
        while (write := self._writes.get()) is not None:
            try:
                write()
            except BaseException as error:  # the thread must answer every later `flush`
                log.critical("store writer died", error=f"{type(error).__name__}: {error}")
                self._failure = StoreError(f"the state cannot be written any more ({type(error).__name__}: {error})")
                self._on_death()

    def _execute(self, statement: str, values: tuple[object, ...]) -> None:
        if self._failure is not None:
            return
        try:
            self._connection.execute(statement, values)
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            log.exception("store write failed")
            self._failure = StoreError(f"the state could not be written ({error}): make room, then restart")

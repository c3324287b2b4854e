"""Writer thread of a database, which executes changes in order, each as one transaction."""

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

from coordinator.state.store_errors import StoreError

RETRY_SECONDS = 5.0
"""Seconds between two attempts to write waiting changes, for example while the disk is full."""
MAX_UNWRITTEN = 100_000
"""Maximum number of waiting changes. Above that, all waiting changes are lost, and writing ends until a restart."""

log = structlog.get_logger()


class StoreWriter:
    """Writer of changes to a database, on a thread of its own.

    If the disk does not accept a change, that change and all later ones wait in their order, and are tried again every
    `RETRY_SECONDS`. Writing ends after a change that the database can never accept, and above `MAX_UNWRITTEN` waiting
    changes. After any other error, the thread calls `on_death` and writes nothing more.
    """

    def __init__(self, connection: sqlite3.Connection, on_death: Callable[[], object]) -> None:
        self._connection = connection
        self._on_death = on_death
        self._failure: StoreError | None = None
        self._is_broken = False
        self._unwritten: deque[tuple[str, tuple[object, ...]]] = deque()
        self._retry_at = 0.0
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_changes, name="store", daemon=True)
        self._thread.start()

    def enqueue(self, statement: str, *values: object) -> None:
        """Enqueue an SQL statement with its values as one change.

        Raise `StoreError` while changes cannot be written. The change then waits with the earlier ones, or is discarded
        if writing has ended.
        """
        self._writes.put(lambda: self._execute(statement, values))
        self.raise_failure()

    def flush(self) -> asyncio.Future[None]:
        """Return a future that is done when all changes enqueued before this call are on disk.

        The future fails with `StoreError` if these changes cannot be written now. Later changes have no effect on it.
        Do not call after `close`, because the future would never be done.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def end(failure: StoreError | None) -> None:
            if not done.done():
                done.set_exception(failure) if failure is not None else done.set_result(None)

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the waiting loop may be closed
                loop.call_soon_threadsafe(end, self._failure)

        self._writes.put(wake)
        return done

    def close(self) -> None:
        """Write pending changes and close the database. Block until this is done.

        If a change could not be written, `raise_failure` raises afterwards.
        """
        self._writes.put(None)
        self._thread.join()
        self._connection.close()

    def raise_failure(self) -> None:
        """Raise `StoreError` if changes cannot currently be written."""
        if self._failure is not None:
            raise self._failure

    def count_unwritten(self) -> int:
        """Return the number of changes that wait for the disk: 0 while changes are written, 1 if writing has ended."""
        return 0 if self._failure is None else max(1, len(self._unwritten))

    def _write_changes(self) -> None:
        write: Callable[[], None] | None = self._write_pending
        while write is not None:
            try:
                write()
            except BaseException as error:  # the thread must answer every later `flush`
                log.critical("store writer died", error=f"{type(error).__name__}: {error}")
                self._end_writing(f"the state cannot be written any more ({type(error).__name__}: {error})")
                self._on_death()
            write = self._get_next_write()
        self._write_pending()

    def _get_next_write(self) -> Callable[[], None] | None:
        """Return the next write or the retry that is due, whichever comes first; None at the end."""
        seconds = self._retry_at - time.monotonic() if self._unwritten else None
        try:
            return self._writes.get(timeout=seconds) if seconds is None or seconds > 0 else self._write_pending
        except queue.Empty:
            return self._write_pending

    def _execute(self, statement: str, values: tuple[object, ...]) -> None:
        if self._is_broken:
            return
        self._unwritten.append((statement, values))
        if len(self._unwritten) > MAX_UNWRITTEN:
            self._end_writing(
                f"more than {MAX_UNWRITTEN} changes of the state are not written: make room, then restart"
            )
        elif self._failure is None:
            self._write_pending()

    def _write_pending(self) -> None:
        try:
            while self._unwritten:
                self._connection.execute(*self._unwritten[0])
                self._unwritten.popleft()
        except sqlite3.OperationalError as error:
            if self._failure is None:
                log.exception("store write failed", retry_in=RETRY_SECONDS)
            text = f"the state could not be written ({error}): make room; it is tried again every {RETRY_SECONDS:.0f} s"
            self._failure, self._retry_at = StoreError(text), time.monotonic() + RETRY_SECONDS
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            log.exception("store write failed")
            self._end_writing(f"the state could not be written ({error}): restart the coordinator")
        else:
            if self._failure is not None and not self._is_broken:
                log.info("store writes again")
                self._failure = None

    def _end_writing(self, text: str) -> None:
        """Write no change any more."""
        self._failure, self._is_broken = StoreError(text), True
        self._unwritten.clear()

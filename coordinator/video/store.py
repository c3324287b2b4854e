"""Persistent state of video jobs and measured memory profiles.

The database is separate from the cluster's and is created at the first change. As in the cluster's database, all data
is in memory. Each change is one transaction (WAL, synchronous=FULL), written in order by one writer thread. `await
flush()` returns after all earlier changes are on disk. A job is confirmed to its client only after that. Changes that
the disk does not accept wait (`StoreWriter`).
"""

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coordinator.state.sqlite_file import open_database
from coordinator.state.store_errors import StoreError
from coordinator.state.store_writer import StoreWriter
from coordinator.video.state.jobs import VideoJob
from coordinator.video.state.memory_model import VideoMemoryProfile, VideoProfileKey

MIGRATIONS = (
    """
    CREATE TABLE jobs (id TEXT PRIMARY KEY, sequence INTEGER NOT NULL, record TEXT NOT NULL);
    CREATE TABLE profiles (package TEXT, engine TEXT, bits INTEGER, record TEXT NOT NULL,
                           PRIMARY KEY (package, engine, bits));
    """,
)
"""One SQL script per schema version, as in `coordinator.state.schema`."""
FILE = "videos.db"
"""Name of the database in the state folder."""


class VideoStore:
    """Database of video jobs and memory profiles in `folder`, created at the first change.

    The constructor raises `StoreError` if an existing database cannot be opened or read. The lock of the cluster's
    store in the same folder excludes other processes.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._writer: StoreWriter | None = None
        self._open_failure: StoreError | None = None
        self.jobs: tuple[VideoJob, ...] = ()
        """Jobs that were in the database when it was opened."""
        self.profiles: dict[VideoProfileKey, VideoMemoryProfile] = {}
        """Memory profiles that were in the database when it was opened."""
        if self._file.exists():
            self._open_writer()

    def _open_writer(self) -> StoreWriter:
        if self._writer is None:
            connection = open_database(self._file, MIGRATIONS)
            try:
                self._load_rows(connection)
            except (sqlite3.Error, msgspec.MsgspecError) as error:
                connection.close()
                raise StoreError(f"{self._file} cannot be used: {error}; move it away, or restore a backup") from None
            self._writer = StoreWriter(connection, on_death=lambda: None)
        return self._writer

    def _load_rows(self, connection: sqlite3.Connection) -> None:
        rows: Sequence[tuple[str]] = connection.execute("SELECT record FROM jobs ORDER BY sequence").fetchall()
        self.jobs = tuple(msgspec.json.decode(record, type=VideoJob) for (record,) in rows)
        for package, engine, bits, record in connection.execute("SELECT * FROM profiles"):
            self.profiles[VideoProfileKey(package, engine, bits)] = msgspec.json.decode(record, type=VideoMemoryProfile)

    def put_job(self, job: VideoJob) -> None:
        """Add or replace a job in the background.

        Raise `StoreError` while changes cannot be written; the change then waits. Raise it also if the database cannot
        be opened, in which case the change is lost.
        """
        record = msgspec.json.encode(job).decode()
        self._enqueue_write("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?)", job.id, job.sequence, record)

    def delete_job(self, job: str) -> None:
        """Delete a job (id) in the background.

        Raise `StoreError` while changes cannot be written; the change then waits. Raise it also if the database cannot
        be opened, in which case the change is lost.
        """
        self._enqueue_write("DELETE FROM jobs WHERE id = ?", job)

    def put_profile(self, key: VideoProfileKey, profile: VideoMemoryProfile) -> None:
        """Add or replace the memory profile of a package in the background.

        Raise `StoreError` while changes cannot be written; the change then waits. Raise it also if the database cannot
        be opened, in which case the change is lost.
        """
        record = msgspec.json.encode(profile).decode()
        self._enqueue_write("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?, ?)", *key, record)

    def flush(self) -> asyncio.Future[None]:
        """Return a future that is done when all changes before this call are on disk (`StoreWriter.flush`).

        The future fails with `StoreError` if the changes cannot be written now. Raise `StoreError` at once if the
        database could not be opened for a change.
        """
        if self._writer is not None:
            return self._writer.flush()
        if self._open_failure is not None:
            raise self._open_failure
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def raise_failure(self) -> None:
        """Raise `StoreError` if changes cannot currently be written.

        Do nothing if the database could not be opened, because the next change tries again.
        """
        if self._writer is not None:
            self._writer.raise_failure()

    def count_unwritten(self) -> int:
        """Return the number of changes that wait for the disk: 0 while changes are written, 1 if writing has ended."""
        return 0 if self._writer is None else self._writer.count_unwritten()

    def close(self) -> None:
        """Write pending changes and close the database. A failed write is only logged: call `flush` first."""
        if self._writer is not None:
            self._writer.close()

    def _enqueue_write(self, statement: str, *values: object) -> None:
        try:
            writer = self._open_writer()
        except StoreError as error:
            self._open_failure = error
            raise
        self._open_failure = None
        writer.enqueue(statement, *values)

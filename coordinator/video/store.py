"""Persistent state of video jobs and measured profiles.

A separate database next to the cluster's, created with the first job. As in the cluster's database, all data is in
memory. Each change is one transaction (WAL, synchronous=FULL), written in order by one writer thread. `await flush()`
returns after all changes so far are on disk. A job is confirmed to its client only after that.
"""

import asyncio
import sqlite3
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import structlog

from coordinator.state.sqlite_file import open_database
from coordinator.state.store_errors import StoreError
from coordinator.video.state.jobs import VideoJob
from coordinator.video.state.memory_model import VideoMemoryProfile, VideoProfileKey

log = structlog.get_logger("coordinator.video.store")

MIGRATIONS = (
    """
    CREATE TABLE jobs (id TEXT PRIMARY KEY, sequence INTEGER NOT NULL, record TEXT NOT NULL);
    CREATE TABLE profiles (package TEXT, engine TEXT, bits INTEGER, record TEXT NOT NULL,
                           PRIMARY KEY (package, engine, bits));
    """,
)
"""One script per schema version, as in `coordinator.state.schema`."""
FILE = "videos.db"
"""Name of the database in the state folder."""


class VideoStore:
    """Database of video jobs and memory profiles in `folder`, created at the first change.

    Raise `StoreError` if an existing database cannot be opened or read. The lock of the cluster's store in the same
    folder excludes other processes.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._connection: sqlite3.Connection | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="videos")
        self._failure: StoreError | None = None
        self.jobs: tuple[VideoJob, ...] = ()
        """Jobs that the database had when it was opened."""
        self.profiles: dict[VideoProfileKey, VideoMemoryProfile] = {}
        """Memory profiles that the database had when it was opened."""
        if self._file.exists():
            self._open_connection()

    def _open_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = self._connection = open_database(self._file, MIGRATIONS)
            try:
                self._load_rows(connection)
            except (sqlite3.Error, msgspec.MsgspecError) as error:
                connection.close()
                raise StoreError(f"{self._file} cannot be used: {error}; move it away, or restore a backup") from None
        return self._connection

    def _load_rows(self, connection: sqlite3.Connection) -> None:
        rows: Sequence[tuple[str]] = connection.execute("SELECT record FROM jobs ORDER BY sequence").fetchall()
        self.jobs = tuple(msgspec.json.decode(record, type=VideoJob) for (record,) in rows)
        for package, engine, bits, record in connection.execute("SELECT * FROM profiles"):
            self.profiles[VideoProfileKey(package, engine, bits)] = msgspec.json.decode(record, type=VideoMemoryProfile)

    def put_job(self, job: VideoJob) -> Future[None]:
        """Add or replace a job, in the background. The result raises `StoreError` if this write fails.

        Raise `StoreError` if the database cannot be opened or an earlier change was not written.
        """
        record = msgspec.json.encode(job).decode()
        return self._enqueue_write("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?)", job.id, job.sequence, record)

    def delete_job(self, job: str) -> Future[None]:
        """Delete a job, in the background. The result raises `StoreError` if this write fails.

        Raise `StoreError` if the database cannot be opened or an earlier change was not written.
        """
        return self._enqueue_write("DELETE FROM jobs WHERE id = ?", job)

    def put_profile(self, key: VideoProfileKey, profile: VideoMemoryProfile) -> Future[None]:
        """Add or replace the memory profile of a package, in the background. The result raises `StoreError` if this
        write fails.

        Raise `StoreError` if the database cannot be opened or an earlier change was not written.
        """
        record = msgspec.json.encode(profile).decode()
        return self._enqueue_write("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?, ?)", *key, record)

    async def flush(self) -> None:
        """Wait until all changes so far are on the disk. Raise `StoreError` if one of them could not be written."""
        await asyncio.wrap_future(self._writer.submit(_do_nothing))
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise `StoreError` if a write has failed."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Write pending changes and close the file. A failed write is only logged: call `flush` first."""
        self._writer.shutdown()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _enqueue_write(self, statement: str, *values: object) -> Future[None]:
        self.raise_failure()
        connection = self._open_connection()
        return self._writer.submit(self._execute, connection, statement, values)

    def _execute(self, connection: sqlite3.Connection, statement: str, values: tuple[object, ...]) -> None:
        self.raise_failure()
        try:
            connection.execute(statement, values)
        except sqlite3.Error as error:
            log.exception("video store write failed")
            self._failure = StoreError(f"a video job could not be written down ({error}): make room, then restart")
            raise self._failure from None


def _do_nothing() -> None:
    return

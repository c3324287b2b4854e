"""Persistent state of the coordinator: identity, members, tokens, API keys, wishes, usage, audit log and deny list.

All data is in memory, on the event loop that owns the store: readers read mappings, and changes are visible at once.
Each change is also one transaction. A single writer thread writes the changes in order into SQLite (WAL,
synchronous=FULL). `await flush()` returns after all earlier changes are on disk. Code that issues a certificate or a
key flushes first.

While changes cannot be written, for example because the disk is full, every change raises `StoreError`. The change is
in memory, and is written in its order as soon as the disk accepts changes. Reads work, and the pool keeps serving.

A value that the database cannot store ends the writing until a restart, as do more than `store_writer.MAX_UNWRITTEN`
unwritten changes. All unwritten changes are then lost. Any other error of the writer thread calls `on_death`, which
ends the coordinator. Every `flush` after one of these errors raises `StoreError`.
"""

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from coordinator.backup.atomic_swap import finish_swap
from coordinator.state.rows import ClusterMeta
from coordinator.state.schema import MIGRATIONS
from coordinator.state.sqlite_file import open_database
from coordinator.state.state_lock import StateLock
from coordinator.state.store_errors import StoreError
from coordinator.state.store_writer import StoreWriter
from coordinator.state.tables import AuditLog, DenyList, KeyTable, MemberTable, TokenTable, UsageTable, WishTable
from host.private_files import create_private_folder


class Database:
    """Database of a state folder, which is locked until `close`. Opening also finishes an interrupted restore.

    The constructor raises `StoreError` if the database cannot be opened, and `StateLockedError` if another process uses
    the folder. The writer thread calls `on_death` after an unexpected error, and then writes nothing more. Methods that
    change the state raise `StoreError` after a failed write.
    """

    def __init__(self, folder: Path, on_death: Callable[[], object] = lambda: None) -> None:
        try:
            self._lock = StateLock(create_private_folder(folder))
        except OSError as error:
            raise StoreError(f"cannot write to the state folder {folder}: {error.strerror}") from None
        try:
            finish_swap(folder)
            connection = open_database(folder / "cluster.db", MIGRATIONS)
            self._writer = StoreWriter(connection, on_death)
            try:
                self._load_tables(connection)
            except BaseException:
                self._writer.close()
                raise
        except (sqlite3.Error, msgspec.MsgspecError, TypeError, ValueError) as error:
            self._lock.release()
            raise StoreError(f"{folder / 'cluster.db'} cannot be used: {error}; restore a backup") from None
        except OSError as error:
            self._lock.release()
            raise StoreError(f"an interrupted restore in {folder} cannot be finished: {error}") from None
        except StoreError:
            self._lock.release()
            raise

    def _load_tables(self, connection: sqlite3.Connection) -> None:
        self._meta = ClusterMeta(*connection.execute("SELECT cluster, name, epoch, generation FROM meta").fetchone())
        self.members = MemberTable(connection, self._writer)
        self.tokens = TokenTable(connection, self._writer)
        self.keys = KeyTable(connection, self._writer)
        self.wishes = WishTable(connection, self._writer)
        self.usage = UsageTable(connection, self._writer)
        self.audit = AuditLog(connection, self._writer)
        self.deny_list = DenyList(connection, self._writer)

    @property
    def meta(self) -> ClusterMeta:
        """Identity of the coordinator, with the newest changes."""
        return self._meta

    def create_cluster(self, cluster: str, name: str) -> None:
        """Set id and display name of a new cluster. Raise `StoreError` after a failed write."""
        self._meta = replace(self._meta, cluster=cluster, name=name)
        self._writer.enqueue("UPDATE meta SET cluster = ?, name = ?", cluster, name)

    def increment_epoch(self) -> int:
        """Increment the epoch, once at each start of the coordinator, and return the new value.

        Raise `StoreError` after a failed write.
        """
        self._meta = replace(self._meta, epoch=self._meta.epoch + 1)
        self._writer.enqueue("UPDATE meta SET epoch = ?", self._meta.epoch)
        return self._meta.epoch

    async def flush(self) -> None:
        """Wait until all earlier changes are on disk. Raise `StoreError` if they cannot be written now.

        In that case the changes wait for the disk. A cancellation ends only the wait. Do not call after `close`,
        because the wait would not end.
        """
        await self._writer.flush()

    def raise_failure(self) -> None:
        """Raise `StoreError` if changes cannot currently be written."""
        self._writer.raise_failure()

    def count_unwritten(self) -> int:
        """Return the number of changes that wait for the disk: 0 while changes are written, 1 if writing has ended."""
        return self._writer.count_unwritten()

    def close(self) -> None:
        """Write pending changes, close the database and release the lock.

        Raise `StoreError` if changes remain unwritten.
        """
        self._writer.close()
        self._lock.release()
        self._writer.raise_failure()

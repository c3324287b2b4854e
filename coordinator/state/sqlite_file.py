"""SQLite file with schema versions, which is checked when it is opened, and copied before a migration."""

import contextlib
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from coordinator.state.store_errors import StoreError


def open_database(path: Path, migrations: Sequence[str]) -> sqlite3.Connection:
    """Open a database (mode 0600, WAL, synchronous=FULL) and apply the missing `migrations`.

    `migrations` has one SQL script per schema version, oldest first. Before a change of the schema, the database is
    copied to the file `NAME.schema-VERSION` next to it.

    Raise `StoreError` if the database cannot be opened, is damaged, or was written by a newer version of Macpool. The
    error is also raised if the copy cannot be written.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot write {path}: {error}") from None
    try:
        _prepare_schema(connection, path, migrations)
    except sqlite3.Error as error:
        connection.close()
        raise StoreError(f"{path} cannot be used: {error}; restore a backup or move it away") from None
    except StoreError:
        connection.close()
        raise
    return connection


def _prepare_schema(connection: sqlite3.Connection, path: Path, migrations: Sequence[str]) -> None:
    (state,) = connection.execute("PRAGMA quick_check").fetchone()
    if state != "ok":
        raise StoreError(f"{path} is damaged ({state}): restore a backup or move it away")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = ON")  # on macOS; without effect elsewhere (host.private_files)
    connection.execute("PRAGMA checkpoint_fullfsync = ON")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(migrations):
        raise StoreError(
            f"{path} was written by a newer macpool (schema {version}, we know {len(migrations)}): update macpool"
        )
    if 0 < version < len(migrations):
        try:
            _copy_before_migration(connection, path, version)
        except (OSError, sqlite3.Error) as error:
            text = f"{path} needs a newer schema, and its copy cannot be written before the change: {error}; make room"
            raise StoreError(text) from None
    for number, script in enumerate(migrations[version:], version + 1):
        connection.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT;")


def _copy_before_migration(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """Copy a database before a schema change, because an older macpool cannot read it afterwards.

    An existing copy is complete, and older than an interrupted attempt.
    """
    target = path.with_name(f"{path.name}.schema-{version}")
    if target.exists():
        return
    temporary = path.with_name(f"{target.name}.new")
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with contextlib.closing(sqlite3.connect(temporary)) as copy:
        connection.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")
    temporary.replace(target)

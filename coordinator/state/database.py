"""Persistent state of the coordinator: identity, members, join tokens, API keys, usage, audit log and deny list.

All data is in memory, on the event loop that owns the store: readers read mappings, changes are visible at once. Each
change is also one transaction. A single writer thread writes them in order into SQLite (WAL, synchronous=FULL). `await
flush()` returns after all changes up to now are on disk. Code that issues a certificate or a key flushes first.

A failed write breaks the store permanently: every later change raises `StoreError`. Memory and disk no longer agree,
and only a restart shows the stored state. Reads still work, and the pool keeps serving. Any other error of the writer
thread calls `on_death`, which ends the coordinator. Every `flush` still returns.
"""

import asyncio
import contextlib
import fcntl
import os
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import structlog

from coordinator.backup.atomic_swap import finish_swap
from host.private_files import private_folder
from router.admission.rate_limits import KeyLimits
from router.admission.usage import UsageTotals
from wire.identity import NodeId
from wire.report import Hardware

log = structlog.get_logger()
MAX_AUDIT_ENTRIES = 10_000
"""Most entries of the audit log."""

MIGRATIONS = (
    """
    CREATE TABLE meta (one INTEGER PRIMARY KEY CHECK (one = 1), cluster TEXT, name TEXT, epoch INTEGER);
    INSERT INTO meta VALUES (1, '', '', 0);
    CREATE TABLE members (node TEXT PRIMARY KEY, name TEXT, machine TEXT, hardware TEXT, serial TEXT, joined REAL,
                          cordoned INTEGER, removed REAL);
    CREATE TABLE tokens (id TEXT PRIMARY KEY, key BLOB, created REAL, expires REAL, uses_left INTEGER, name TEXT,
                         revoked INTEGER);
    CREATE TABLE keys (id TEXT PRIMARY KEY, name TEXT, scopes TEXT, digest BLOB, created REAL, expires REAL,
                       revoked REAL);
    CREATE TABLE denied (subject TEXT PRIMARY KEY, at REAL, reason TEXT);
    """,
    """
    ALTER TABLE keys ADD COLUMN limits TEXT;
    ALTER TABLE members ADD COLUMN labels TEXT NOT NULL DEFAULT '';
    CREATE TABLE usage (key TEXT, model TEXT, day TEXT, requests INTEGER, failed INTEGER, prompt_tokens INTEGER,
                        cached_tokens INTEGER, completion_tokens INTEGER, PRIMARY KEY (key, model, day));
    CREATE TABLE audit (number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL, actor TEXT, action TEXT, subject TEXT);
    """,
    """
    ALTER TABLE meta ADD COLUMN generation INTEGER NOT NULL DEFAULT 0;
    """,
    """
    ALTER TABLE members ADD COLUMN video INTEGER NOT NULL DEFAULT 0;
    UPDATE members SET video = 1;
    """,
    """
    ALTER TABLE audit ADD COLUMN address TEXT NOT NULL DEFAULT '';
    """,
)
"""One script per schema version. SQLite's `user_version`, readable in any schema, counts the applied scripts."""


class StoreError(Exception):
    """The state cannot be read or written. The text names the file and the next step."""


class StateLockedError(StoreError):
    """Another process holds the lock of the state folder."""


@dataclass(frozen=True, slots=True)
class ClusterMeta:
    """Identity of the coordinator. Of two coordinators of one cluster, the one with the higher generation is valid."""

    cluster: str = ""
    """Id of the cluster; empty before it is created."""
    name: str = ""
    """Display name of the cluster."""
    epoch: int = 0
    """Number of the coordinator's current start. A start adds 1; a restore of a backup adds `RESERVED_EPOCHS`."""
    generation: int = 0
    """Raised by every restore of a backup, to at least the Unix time of the restore."""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A node that has joined the cluster. Times are in Unix seconds."""

    node: NodeId
    name: str
    """Display name."""
    machine: str
    """Id of the machine."""
    hardware: Hardware
    serial: str
    """Serial (hex) of the node's newest certificate."""
    joined: float
    cordoned: bool = False
    removed: float | None = None
    """Time of the removal; None for a member."""
    labels: tuple[str, ...] = ()
    video: bool = False
    """Whether an administrator allows video jobs on the node."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A join token. `key` is the MAC key derived from its secret, and is also secret. Times are in Unix seconds."""

    id: str
    key: bytes
    created: float
    expires: float
    uses_left: int
    name: str = ""
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class KeyRow:
    """An API key without its secret. Times are in Unix seconds."""

    id: str
    name: str
    scopes: tuple[str, ...]
    """Any of `infer`, `admin` and `metrics`."""
    digest: bytes
    """Digest of the secret."""
    created: float
    expires: float | None = None
    """None: never."""
    limits: KeyLimits | None = None


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Usage of a model by a key on one day (UTC, `2026-01-31`)."""

    key: str
    model: str
    day: str
    used: UsageTotals


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One entry of the audit log: the action of an actor on a subject."""

    number: int
    at: float
    """Time in Unix seconds."""
    actor: str
    """Id of a key, `local`, `offline`, or the name of a node."""
    action: str
    subject: str
    address: str = ""
    """Address of the actor; empty if unknown, as for actions on this machine's files."""


class StateLock:
    """Exclusive lock of a state folder, held until `release` or the end of the process.

    Raise `StateLockedError` if another process holds the lock, and `OSError` if the lock file cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._file, 32, 0).decode(errors="replace").strip()
            os.close(self._file)
            raise StateLockedError(
                f"the state folder {folder} is in use by process {owner or 'unknown'}: "
                "use the running coordinator, or stop it first"
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._file)


class Database:
    """Database of a state folder, which is locked until `close`. Opening also finishes an interrupted restore.

    The writer thread calls `on_death` if it cannot continue.

    Raise `StoreError` if the database cannot be opened, and `StateLockedError` if another process uses the folder.
    Methods that change the state raise `StoreError` after a failed write.
    """

    def __init__(self, folder: Path, on_death: Callable[[], object] = lambda: None) -> None:
        try:
            self._lock = StateLock(private_folder(folder))
        except OSError as error:
            raise StoreError(f"cannot write to the state folder {folder}: {error.strerror}") from None
        try:
            finish_swap(folder)
            connection = open_database(folder / "cluster.db", MIGRATIONS)
            self._load_rows(connection)
        except (sqlite3.Error, msgspec.MsgspecError, TypeError, ValueError) as error:
            self._lock.release()
            raise StoreError(f"{folder / 'cluster.db'} cannot be used: {error}; restore a backup") from None
        except OSError as error:
            self._lock.release()
            raise StoreError(f"an interrupted restore in {folder} cannot be finished: {error}") from None
        except StoreError:
            self._lock.release()
            raise
        self._failure: StoreError | None = None
        self._on_death = on_death
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._connection = connection
        self._writer = threading.Thread(target=self._write_changes, name="store", daemon=True)
        self._writer.start()

    def _load_rows(self, connection: sqlite3.Connection) -> None:
        row = connection.execute("SELECT cluster, name, epoch, generation FROM meta").fetchone()
        self._meta = ClusterMeta(*row)
        self._members = {row.node: row for row in map(_parse_member_row, connection.execute("SELECT * FROM members"))}
        self._tokens = {row.id: row for row in map(_parse_token_row, connection.execute("SELECT * FROM tokens"))}
        live = connection.execute("SELECT * FROM keys WHERE revoked IS NULL")
        self._keys = {row.id: row for row in map(_parse_key_row, live)}
        rows = connection.execute("SELECT * FROM usage")
        self._usage = {
            (key, model, day): UsageRow(key, model, day, UsageTotals(*used)) for key, model, day, *used in rows
        }
        acts = connection.execute("SELECT * FROM audit ORDER BY number")
        self._audit = deque((AuditRow(*row) for row in acts), maxlen=MAX_AUDIT_ENTRIES)
        self._denied = {str(subject) for (subject,) in connection.execute("SELECT subject FROM denied")}

    @property
    def meta(self) -> ClusterMeta:
        """Identity of the coordinator, as last set."""
        return self._meta

    @property
    def members(self) -> Mapping[NodeId, MemberRow]:
        """Rows of all nodes that ever joined, by node id, including removed ones (`removed` is set)."""
        return self._members

    @property
    def tokens(self) -> Mapping[str, TokenRow]:
        """All join tokens by id, including used and revoked ones until their deletion."""
        return self._tokens

    @property
    def keys(self) -> Mapping[str, KeyRow]:
        """API keys by id, without revoked ones."""
        return self._keys

    def create_cluster(self, cluster: str, name: str) -> None:
        """Set id and display name of a new cluster."""
        self._meta = replace(self._meta, cluster=cluster, name=name)
        self._enqueue_write("UPDATE meta SET cluster = ?, name = ?", cluster, name)

    def increment_epoch(self) -> int:
        """Increment the epoch, once at each start of the coordinator, and return the new value."""
        self._meta = replace(self._meta, epoch=self._meta.epoch + 1)
        self._enqueue_write("UPDATE meta SET epoch = ?", self._meta.epoch)
        return self._meta.epoch

    def put_member(self, row: MemberRow) -> None:
        """Add a member, or replace the row of its node id."""
        self._members[row.node] = row
        self._enqueue_write(
            "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            row.node,
            row.name,
            row.machine,
            msgspec.json.encode(row.hardware).decode(),
            row.serial,
            row.joined,
            row.cordoned,
            row.removed,
            " ".join(row.labels),
            row.video,
        )

    def put_token(self, row: TokenRow) -> None:
        """Add a join token, or replace the row of its id."""
        self._tokens[row.id] = row
        self._enqueue_write(
            "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?)",
            row.id,
            row.key,
            row.created,
            row.expires,
            row.uses_left,
            row.name,
            row.revoked,
        )

    def delete_token(self, token: str) -> None:
        """Delete the join token of this id. Do nothing if there is none."""
        self._tokens.pop(token, None)
        self._enqueue_write("DELETE FROM tokens WHERE id = ?", token)

    def put_key(self, row: KeyRow) -> None:
        """Add an API key, or replace the row of its id."""
        self._keys[row.id] = row
        self._enqueue_write(
            "INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?, ?, ?, NULL, ?)",
            row.id,
            row.name,
            " ".join(row.scopes),
            row.digest,
            row.created,
            row.expires,
            None if row.limits is None else msgspec.json.encode(row.limits).decode(),
        )

    def revoke_key(self, key: str, now: float) -> bool:
        """Revoke an API key at `now` (Unix seconds). Return False if no key has this id. Its row is kept on disk."""
        known = self._keys.pop(key, None) is not None
        self._enqueue_write("UPDATE keys SET revoked = ? WHERE id = ?", now, key)
        return known

    def add_usage(self, key: str, model: str, day: str, used: UsageTotals) -> None:
        """Add `used` to the usage of a model by a key (id) on a day (UTC, `2026-01-31`)."""
        row = self._usage.setdefault((key, model, day), UsageRow(key, model, day, UsageTotals()))
        row.used.add(used)
        self._enqueue_write(
            "INSERT OR REPLACE INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            key,
            model,
            day,
            *msgspec.structs.astuple(row.used),
        )

    @property
    def usage(self) -> Iterable[UsageRow]:
        """Usage of every key, model and day, oldest day first."""
        return sorted(self._usage.values(), key=lambda row: (row.day, row.key, row.model))

    def delete_usage_before(self, before: str) -> None:
        """Delete the usage of all days before `before` (`2026-01-31`)."""
        old = [one for one in self._usage if one[2] < before]
        for one in old:
            del self._usage[one]
        if old:
            self._enqueue_write("DELETE FROM usage WHERE day < ?", before)

    def add_audit_entry(self, at: float, actor: str, action: str, subject: str, address: str = "") -> None:
        """Append an entry with the fields of `AuditRow` to the audit log. Keep at most `MAX_AUDIT_ENTRIES` entries."""
        number = self._audit[-1].number + 1 if self._audit else 1
        self._audit.append(AuditRow(number, at, actor, action, subject, address))
        self._enqueue_write("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?)", number, at, actor, action, subject, address)
        self._enqueue_write("DELETE FROM audit WHERE number <= ?", number - MAX_AUDIT_ENTRIES)

    @property
    def audit(self) -> Sequence[AuditRow]:
        """Entries of the audit log, at most the newest `MAX_AUDIT_ENTRIES`, oldest first."""
        return self._audit

    def deny_node(self, node: NodeId, now: float, reason: str) -> None:
        """Add a node to the deny list permanently, with any certificate. `now` is in Unix seconds."""
        self._deny(f"node:{node}", now, reason)

    def deny_serial(self, serial: str, now: float, reason: str) -> None:
        """Add a certificate (serial in hex) to the deny list permanently. `now` is in Unix seconds."""
        self._deny(f"serial:{serial}", now, reason)

    def is_denied(self, node: NodeId, serial: str) -> bool:
        """Return whether a node or its certificate is on the deny list."""
        return f"node:{node}" in self._denied or f"serial:{serial}" in self._denied

    def _deny(self, subject: str, now: float, reason: str) -> None:
        self._denied.add(subject)
        self._enqueue_write("INSERT OR REPLACE INTO denied VALUES (?, ?, ?)", subject, now, reason)

    async def flush(self) -> None:
        """Wait until every change up to now is on disk. Raise `StoreError` if a write failed."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the waiting loop may be closed
                loop.call_soon_threadsafe(done.set)

        self._writes.put(wake)
        await done.wait()
        self._raise_failure()

    def close(self) -> None:
        """Write pending changes, close the database and release the lock. Raise `StoreError` if a write failed."""
        self._writes.put(None)
        self._writer.join()
        self._connection.close()
        self._lock.release()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _enqueue_write(self, statement: str, *values: object) -> None:
        self._raise_failure()
        self._writes.put(lambda: self._execute(statement, values))

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


def open_database(path: Path, migrations: Sequence[str]) -> sqlite3.Connection:
    """Open a database (mode 0600, WAL, synchronous=FULL) and apply the missing `migrations`.

    `migrations` has one SQL script per schema version, oldest first. Before a change of the schema, keep a copy of the
    database next to it. Raise `StoreError` if the database cannot be opened, is damaged, or was written by a newer
    macpool.
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
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(migrations):
        raise StoreError(
            f"{path} was written by a newer macpool (schema {version}, we know {len(migrations)}): update macpool"
        )
    if 0 < version < len(migrations):
        _copy_before_migration(connection, path, version)
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


def _parse_member_row(row: tuple[Any, ...]) -> MemberRow:
    node, name, machine, hardware, serial, joined, cordoned, removed, labels, video = row
    decoded = msgspec.json.decode(hardware, type=Hardware)
    return MemberRow(
        NodeId(node),
        name,
        machine,
        decoded,
        serial,
        joined,
        bool(cordoned),
        removed,
        tuple(labels.split()),
        bool(video),
    )


def _parse_token_row(row: tuple[Any, ...]) -> TokenRow:
    token, key, created, expires, uses_left, name, revoked = row
    return TokenRow(token, key, created, expires, uses_left, name, bool(revoked))


def _parse_key_row(row: tuple[Any, ...]) -> KeyRow:
    key, name, scopes, digest, created, expires, _, limits = row
    bounds = None if limits is None else msgspec.json.decode(limits, type=KeyLimits)
    return KeyRow(key, name, tuple(scopes.split()), digest, created, expires, bounds)

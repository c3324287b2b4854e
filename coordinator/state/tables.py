"""Tables of the cluster's database: all rows in memory, with each change also written to disk by the store's writer.

Methods that change a table raise `StoreError` after a failed write. The rows in memory then have the change.
"""

import sqlite3
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import msgspec

from coordinator.models.wishes import Wish
from coordinator.state.rows import AuditRow, KeyRow, MemberRow, TokenRow, UsageRow
from coordinator.state.store_writer import StoreWriter
from router.admission.rate_limits import KeyLimits
from router.admission.usage import UsageTotals
from wire.identity import NodeId
from wire.report import Hardware

MAX_AUDIT_ENTRIES = 10_000
"""Maximum entries of the audit log. The oldest ones above it are deleted."""
Key = TypeVar("Key")
Row = TypeVar("Row")


class RowTable(Mapping[Key, Row]):
    """Read access to the rows of a table, by key. Subclasses have the methods that change rows."""

    def __init__(self, rows: dict[Key, Row], writer: StoreWriter) -> None:
        self._rows = rows
        self._writer = writer

    def __getitem__(self, key: Key) -> Row:
        return self._rows[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class MemberTable(RowTable[NodeId, MemberRow]):
    """All nodes that have ever joined, by node id, including removed ones (`removed` is set)."""

    def __init__(self, connection: sqlite3.Connection, writer: StoreWriter) -> None:
        rows = map(_parse_member_row, connection.execute("SELECT * FROM members"))
        super().__init__({row.node: row for row in rows}, writer)

    def put(self, row: MemberRow) -> None:
        """Add a member, or replace the row of its node id. Raise `StoreError` after a failed write."""
        self._rows[row.node] = row
        self._writer.enqueue(
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


class TokenTable(RowTable[str, TokenRow]):
    """All join tokens by id. Used and revoked tokens are included until they are deleted."""

    def __init__(self, connection: sqlite3.Connection, writer: StoreWriter) -> None:
        rows = map(_parse_token_row, connection.execute("SELECT * FROM tokens"))
        super().__init__({row.id: row for row in rows}, writer)

    def put(self, row: TokenRow) -> None:
        """Add a join token, or replace the row of its id. Raise `StoreError` after a failed write."""
        self._rows[row.id] = row
        self._writer.enqueue(
            "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?)",
            row.id,
            row.key,
            row.created,
            row.expires,
            row.uses_left,
            row.name,
            row.revoked,
        )

    def delete(self, token: str) -> None:
        """Delete the join token with this id. Do nothing if there is none. Raise `StoreError` after a failed write."""
        self._rows.pop(token, None)
        self._writer.enqueue("DELETE FROM tokens WHERE id = ?", token)


class KeyTable(RowTable[str, KeyRow]):
    """API keys by id, except revoked keys."""

    def __init__(self, connection: sqlite3.Connection, writer: StoreWriter) -> None:
        rows = map(_parse_key_row, connection.execute("SELECT * FROM keys WHERE revoked IS NULL"))
        super().__init__({row.id: row for row in rows}, writer)
        self.was_empty = connection.execute("SELECT 1 FROM keys").fetchone() is None
        """Whether no key, not even a revoked one, had ever been stored when the database was opened."""

    def put(self, row: KeyRow) -> None:
        """Add an API key, or replace the row of its id. Raise `StoreError` after a failed write."""
        self._rows[row.id] = row
        self._writer.enqueue(
            "INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?, ?, ?, NULL, ?)",
            row.id,
            row.name,
            " ".join(row.scopes),
            row.digest,
            row.created,
            row.expires,
            None if row.limits is None else msgspec.json.encode(row.limits).decode(),
        )

    def revoke(self, key: str, now: float) -> bool:
        """Revoke an API key at `now` (Unix seconds). Return False if no key has this id.

        The row of the key is kept on disk. Raise `StoreError` after a failed write.
        """
        known = self._rows.pop(key, None) is not None
        self._writer.enqueue("UPDATE keys SET revoked = ? WHERE id = ?", now, key)
        return known


class WishTable(RowTable[str, Wish]):
    """Wishes by model."""

    def __init__(self, connection: sqlite3.Connection, writer: StoreWriter) -> None:
        rows = connection.execute("SELECT model, wish FROM wishes")
        super().__init__({model: msgspec.json.decode(wish, type=Wish) for model, wish in rows}, writer)

    def put(self, wish: Wish) -> None:
        """Add a wish, or replace the wish for its model. Raise `StoreError` after a failed write."""
        self._rows[wish.model] = wish
        self._writer.enqueue(
            "INSERT OR REPLACE INTO wishes VALUES (?, ?)", wish.model, msgspec.json.encode(wish).decode()
        )

    def delete(self, model: str) -> bool:
        """Delete the wish for a model. Return False if there is none. Raise `StoreError` after a failed write."""
        known = self._rows.pop(model, None) is not None
        self._writer.enqueue("DELETE FROM wishes WHERE model = ?", model)
        return known


class UsageTable:
    """Usage by key, model and day."""

    def __init__(self, connection: sqlite3.Connection, writer: StoreWriter) -> None:
        rows = connection.execute("SELECT * FROM usage")
        self._rows = {
            (key, model, day): UsageRow(key, model, day, UsageTotals(*used)) for key, model, day, *used in rows
        }
        self._writer = writer

    def add(self, key: str, model: str, day: str, used: UsageTotals) -> None:
        """Add `used` to the usage of a model by a key (id) on a day (UTC, such as `2026-01-31`).

        Raise `StoreError` after a failed write. The rows in memory then have the addition.
        """
        row = self._rows.setdefault((key, model, day), UsageRow(key, model, day, UsageTotals()))
        row.used.add(used)
        self._writer.enqueue(
            "INSERT OR REPLACE INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            key,
            model,
            day,
            *msgspec.structs.astuple(row.used),
        )

    def list_rows(self) -> list[UsageRow]:
        """Return the usage of every key, model and day, in no particular order."""
        return list(self._rows.values())

    def delete_before(self, before: str, days: int) -> None:
        """Delete the usage of all days before the day `before` (such as `2026-01-31`).

        Delete nothing unless at least `days` later days have usage, counting `before` itself. Raise `StoreError` after
        a failed write.
        """
        old = [row for row in self._rows if row[2] < before]
        if not old or len({row[2] for row in self._rows if row[2] >= before}) < days:
            return
        for row in old:
            del self._rows[row]
        self._writer.enqueue("DELETE FROM usage WHERE day < ?", before)


class AuditLog(Sequence[AuditRow]):
    """Newest entries of the audit log, oldest first, at most `MAX_AUDIT_ENTRIES`."""

    def __init__(self, connection: sqlite3.Connection, writer: StoreWriter) -> None:
        rows = connection.execute("SELECT * FROM audit ORDER BY number")
        self._rows = deque((AuditRow(*row) for row in rows), maxlen=MAX_AUDIT_ENTRIES)
        self._writer = writer

    @overload
    def __getitem__(self, index: int) -> AuditRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[AuditRow]: ...
    def __getitem__(self, index: int | slice) -> AuditRow | Sequence[AuditRow]:
        return list(self._rows)[index] if isinstance(index, slice) else self._rows[index]

    def __iter__(self) -> Iterator[AuditRow]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, at: float, actor: str, action: str, subject: str, address: str = "") -> None:
        """Append an entry with the time `at` (Unix seconds) and the fields of `AuditRow`.

        Only the newest `MAX_AUDIT_ENTRIES` entries are kept. Raise `StoreError` after a failed write.
        """
        number = self._rows[-1].number + 1 if self._rows else 1
        self._rows.append(AuditRow(number, at, actor, action, subject, address))
        self._writer.enqueue("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?)", number, at, actor, action, subject, address)
        self._writer.enqueue("DELETE FROM audit WHERE number <= ?", number - MAX_AUDIT_ENTRIES)


class DenyList:
    """Nodes and certificates that may never link again."""

    def __init__(self, connection: sqlite3.Connection, writer: StoreWriter) -> None:
        self._subjects = {str(subject) for (subject,) in connection.execute("SELECT subject FROM denied")}
        self._writer = writer

    def add_node(self, node: NodeId, now: float, reason: str) -> None:
        """Deny a node permanently, with any certificate. `now` is in Unix seconds.

        `reason` is stored with the entry. Raise `StoreError` after a failed write.
        """
        self._add(f"node:{node}", now, reason)

    def add_serial(self, serial: str, now: float, reason: str) -> None:
        """Deny a certificate (serial in hex) permanently. `now` is in Unix seconds.

        `reason` is stored with the entry. Raise `StoreError` after a failed write.
        """
        self._add(f"serial:{serial}", now, reason)

    def is_denied(self, node: NodeId, serial: str) -> bool:
        """Return whether a node, or its certificate with this serial (hex), is denied."""
        return f"node:{node}" in self._subjects or f"serial:{serial}" in self._subjects

    def _add(self, subject: str, now: float, reason: str) -> None:
        self._subjects.add(subject)
        self._writer.enqueue("INSERT OR REPLACE INTO denied VALUES (?, ?, ?)", subject, now, reason)


def _parse_member_row(row: tuple[Any, ...]) -> MemberRow:
    node, name, machine, hardware, serial, joined, cordoned, removed, labels, video = row
    decoded = msgspec.json.decode(hardware, type=Hardware)
    return MemberRow(
        node=NodeId(node),
        name=name,
        machine=machine,
        hardware=decoded,
        serial=serial,
        joined=joined,
        cordoned=bool(cordoned),
        removed=removed,
        labels=tuple(labels.split()),
        video=bool(video),
    )


def _parse_token_row(row: tuple[Any, ...]) -> TokenRow:
    token, key, created, expires, uses_left, name, revoked = row
    return TokenRow(token, key, created, expires, uses_left, name, bool(revoked))


def _parse_key_row(row: tuple[Any, ...]) -> KeyRow:
    key, name, scopes, digest, created, expires, _, limits = row
    bounds = None if limits is None else msgspec.json.decode(limits, type=KeyLimits)
    return KeyRow(key, name, tuple(scopes.split()), digest, created, expires, bounds)

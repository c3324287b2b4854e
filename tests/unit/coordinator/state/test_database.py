import errno
import fcntl
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from coordinator.models.wishes import Wish
from coordinator.state import store_writer
from coordinator.state.database import Database
from coordinator.state.rows import AuditRow, KeyRow, MemberRow, TokenRow
from coordinator.state.schema import MIGRATIONS
from coordinator.state.sqlite_file import open_database
from coordinator.state.store_errors import StateLockedError, StoreError
from coordinator.video.store import MIGRATIONS as VIDEO_MIGRATIONS
from router.admission.rate_limits import KeyLimits
from router.admission.usage import UsageTotals
from wire.identity import NodeId
from wire.report import Hardware

RELEASED_SCRIPTS = [
    "f6d70f29d8f6",
    "d4b0af3b2837",
    "52b9f8a0ebc8",
    "ea614b716ae7",
    "98d2e21c56af",
    "15acf5b192a2",
    "0383766b7e22",
]
"""Digests of the scripts of the cluster's database, then of that of the videos."""
MEMBER = MemberRow(
    NodeId("n1"), "studio", "m1", Hardware("M4", 1 << 37), "ab12", 5.0, cordoned=True, labels=("lab", "big"), video=True
)
TOKEN = TokenRow("abcdefgh", b"k" * 32, 1.0, 2.0, 3, "lab")
WISH = Wish("tiny", 2, labels=("lab",), deny=(NodeId("n2"),), idle_unload_seconds=60.0, load_at_boot=False)
KEY = KeyRow("k1", "laptop", ("infer", "metrics"), b"d" * 32, 1.0, None, KeyLimits(models=("qwen*",), concurrency=2))


async def test_everything_survives_a_restart(tmp_path: Path) -> None:
    store = Database(tmp_path)
    store.create_cluster("c1", "lab")
    assert store.increment_epoch() == 1
    store.members.put(MEMBER)
    store.tokens.put(TOKEN)
    store.keys.put(KEY)
    store.keys.put(KeyRow("k2", "old", (), b"", 1.0, 9.0))
    assert store.keys.revoke("k2", 2.0)
    assert not store.keys.revoke("k3", 2.0)
    store.wishes.put(Wish("tiny", 1))
    store.wishes.put(WISH)
    store.deny_list.add_node(NodeId("n2"), 3.0, "removed")
    store.deny_list.add_serial("ff", 3.0, "joined again")
    assert (store.deny_list.is_denied(NodeId("n2"), "1"), store.deny_list.is_denied(NodeId("n1"), "ff")) == (
        True,
        True,
    ), "at once"
    for day in ("2026-01-01", "2026-01-02", "2026-01-02"):
        store.usage.add("k1", "tiny", day, UsageTotals(1, 0, 100, 50, 10))
    store.audit.add(7.0, "k1", "cordon", "n1")
    store.audit.add(8.0, "local", "remove", "n2")
    await store.flush()
    store.close()
    again = Database(tmp_path)
    assert [(row.day, row.used) for row in again.usage.list_rows()] == [
        ("2026-01-01", UsageTotals(1, 0, 100, 50, 10)),
        ("2026-01-02", UsageTotals(2, 0, 200, 100, 20)),
    ]
    assert list(again.audit) == [
        AuditRow(1, 7.0, "k1", "cordon", "n1"),
        AuditRow(2, 8.0, "local", "remove", "n2"),
    ]
    again.audit.add(9.0, "k1", "uncordon", "n1")
    assert again.audit[-1].number == 3
    again.usage.delete_before("2026-01-02", 1)
    assert (again.meta.cluster, again.meta.name, again.increment_epoch()) == ("c1", "lab", 2)
    assert again.members == {"n1": MEMBER}
    assert again.tokens == {TOKEN.id: TOKEN}
    assert again.keys == {"k1": KEY}
    assert (store.keys.was_empty, again.keys.was_empty) == (True, False)
    assert again.wishes == {"tiny": WISH}
    assert again.wishes.delete("tiny")
    assert not again.wishes.delete("tiny")
    assert again.deny_list.is_denied(NodeId("n2"), "1")
    assert again.deny_list.is_denied(NodeId("n1"), "ff")
    assert not again.deny_list.is_denied(NodeId("n1"), "ab12")
    again.tokens.delete(TOKEN.id)
    again.close()
    third = Database(tmp_path)
    assert not third.tokens
    assert not third.wishes
    assert [row.day for row in third.usage.list_rows()] == ["2026-01-02"]
    third.close()


@pytest.mark.slow
def test_flushed_writes_survive_a_kill(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from coordinator.state.database import Database\n"
        "from coordinator.state.rows import TokenRow\n"
        "store = Database(Path(sys.argv[1])); store.tokens.put(TokenRow('t', b'k', 1.0, 2.0, 1))\n"
        "asyncio.run(store.flush()); print('flushed', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout
        assert child.stdout.readline() == "flushed\n"
        with pytest.raises(StateLockedError, match=str(child.pid)):
            Database(tmp_path)
        os.kill(child.pid, signal.SIGKILL)
    store = Database(tmp_path)
    assert set(store.tokens) == {"t"}
    store.close()


def test_a_folder_in_use_is_a_clear_error(tmp_path: Path) -> None:
    store = Database(tmp_path)
    with pytest.raises(StateLockedError, match=rf"in use by process {os.getpid()}"):
        Database(tmp_path)
    store.close()
    Database(tmp_path).close()


def test_a_disk_without_locks_is_named_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match=f"cannot write to the state folder {tmp_path}: {os.strerror(errno.ENOLCK)}"):
        Database(tmp_path)


def test_files_and_folder_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    store = Database(folder)
    store.increment_epoch()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = list(folder.iterdir())
    assert {file.name for file in files} >= {"lock", "cluster.db", "cluster.db-wal"}
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    store.close()


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    Database(tmp_path).close()
    with sqlite3.connect(tmp_path / "cluster.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match=r"newer macpool \(schema 99"):
        Database(tmp_path)


def test_released_scripts_of_the_schemas_do_not_change() -> None:
    """Databases of users have run these scripts, so that a change of one has no effect there."""
    digests = [sha256(script.encode()).hexdigest()[:12] for script in (*MIGRATIONS[:6], *VIDEO_MIGRATIONS[:1])]
    assert digests == RELEASED_SCRIPTS, "append a script instead"


def test_a_database_of_the_first_schema_is_carried_over(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "cluster.db")
    connection.executescript(MIGRATIONS[0] + "PRAGMA user_version = 1;")
    connection.execute("INSERT INTO members VALUES ('n', 'a', 'm', '[]', '', 1.0, 0, NULL)")
    connection.execute("INSERT INTO keys VALUES ('k', 'laptop', 'infer', x'00', 1.0, NULL, NULL)")
    connection.commit()
    connection.close()
    store = Database(tmp_path)
    assert (store.members[NodeId("n")].labels, store.members[NodeId("n")].video) == ((), True)
    assert store.keys["k"].limits is None
    store.close()


def test_a_damaged_file_is_refused_and_the_lock_given_back(tmp_path: Path) -> None:
    (tmp_path / "cluster.db").write_bytes(b"not a database" * 1000)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"cluster\.db cannot be used"):
            Database(tmp_path)
    (tmp_path / "cluster.db").unlink()
    Database(tmp_path).close()


def test_a_row_that_cannot_be_read_is_a_clear_error(tmp_path: Path) -> None:
    Database(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "cluster.db")
    connection.execute("INSERT INTO members (node, name, hardware) VALUES ('n', 'a', 'junk')")
    connection.commit()
    connection.close()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"cluster\.db cannot be used"):
            Database(tmp_path)


def test_a_folder_that_cannot_be_written_is_a_clear_error() -> None:
    with pytest.raises(StoreError, match="cannot write to the state folder"):
        Database(Path("/dev/null/state"))


def rename_table(folder: Path, name: str, new: str) -> None:
    """Rename a table of the database: its changes fail, as on a full disk, until it has its name again."""
    with closing(sqlite3.connect(folder / "cluster.db")) as other:
        other.execute(f"ALTER TABLE {name} RENAME TO {new}")


@pytest.mark.parametrize("waits", [True, False])
async def test_changes_that_could_not_be_written_are_written_in_order_once_they_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    monkeypatch.setattr(store_writer, "RETRY_SECONDS", 0.01 if waits else 3600.0)
    store = Database(tmp_path)
    store.keys.put(KEY)
    await store.flush()
    rename_table(tmp_path, "tokens", "away")
    store.tokens.put(TOKEN)
    with pytest.raises(StoreError, match=r"could not be written \(no such table: tokens\): make room"):
        await store.flush()
    for change in (
        lambda: store.keys.put(replace(KEY, name="new")),
        lambda: store.keys.put(replace(KEY, name="newest")),
        lambda: store.tokens.delete(TOKEN.id),
        lambda: store.tokens.put(replace(TOKEN, id="t9")),
    ):
        with pytest.raises(StoreError):
            change()
    with pytest.raises(StoreError):
        await store.flush()
    assert store.count_unwritten() == 5
    assert store.keys == {"k1": replace(KEY, name="newest")}
    rename_table(tmp_path, "away", "tokens")
    while waits and store.count_unwritten():
        with suppress(StoreError):
            await store.flush()
    if waits:
        store.keys.put(replace(KEY, id="k2"))
        await store.flush()
    store.close()
    store = Database(tmp_path)
    assert [key.name for key in store.keys.values()] == ["newest", KEY.name][: 1 + waits]
    assert list(store.tokens) == ["t9"]
    store.close()


async def test_changes_that_are_never_written_are_an_error_at_the_end(tmp_path: Path) -> None:
    store = Database(tmp_path)
    rename_table(tmp_path, "tokens", "away")
    store.tokens.put(TOKEN)
    with pytest.raises(StoreError, match="could not be written"):
        store.close()


@pytest.mark.parametrize("cause", ["value", "number"])
async def test_a_value_that_cannot_be_held_or_too_many_changes_end_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    monkeypatch.setattr(store_writer, "MAX_UNWRITTEN", 2)
    store = Database(tmp_path)
    rename_table(tmp_path, "tokens", "away")
    with suppress(StoreError):
        if cause == "value":
            store.keys.put(replace(KEY, name="\ud800"))
        for _ in range(3):
            store.tokens.put(TOKEN)
    with suppress(StoreError):
        for _ in range(3):
            store.tokens.put(TOKEN)
    text = "restart the coordinator" if cause == "value" else "more than 2 changes of the state are not written"
    with pytest.raises(StoreError, match=text):
        await store.flush()
    rename_table(tmp_path, "away", "tokens")
    with pytest.raises(StoreError, match=text):
        store.tokens.put(TOKEN)
    assert store.count_unwritten() == 1
    with pytest.raises(StoreError, match=text):
        store.close()
    store = Database(tmp_path)
    assert dict(store.tokens) == {}
    store.close()


def test_every_field_of_a_row_survives_a_restart(tmp_path: Path) -> None:
    removed = replace(MEMBER, node=NodeId("n9"), cordoned=False, video=False, labels=(), removed=7.0)
    revoked = replace(TOKEN, id="revoked", uses_left=0, revoked=True)
    expires = replace(KEY, id="k9", expires=9.0, limits=None)
    store = Database(tmp_path)
    store.members.put(removed)
    store.tokens.put(revoked)
    store.keys.put(expires)
    store.audit.add(1.0, "k1", "cordon", "n1", "10.0.0.5")
    store.close()
    again = Database(tmp_path)
    assert (again.members, again.tokens, again.keys) == ({"n9": removed}, {"revoked": revoked}, {"k9": expires})
    assert list(again.audit) == [AuditRow(1, 1.0, "k1", "cordon", "n1", "10.0.0.5")]
    again.close()


def test_commit_is_on_the_disk_when_sqlite_returns(tmp_path: Path) -> None:
    connection = open_database(tmp_path / "x.db", MIGRATIONS)
    full, wal = 2, "wal"
    assert connection.execute("PRAGMA synchronous").fetchone() == (full,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == (wal,)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    connection.close()


def test_a_copy_before_a_migration_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "cluster.db")
    connection.executescript(MIGRATIONS[0] + "PRAGMA user_version = 1;")
    connection.close()
    (tmp_path / "cluster.db.schema-1.new").mkdir()
    with pytest.raises(StoreError, match="needs a newer schema, and its copy cannot be written"):
        Database(tmp_path)


def test_changes_are_in_memory_at_once(tmp_path: Path) -> None:
    store = Database(tmp_path)
    store.create_cluster("c1", "lab")
    assert (store.meta.cluster, store.meta.name) == ("c1", "lab")
    store.tokens.put(TOKEN)
    store.wishes.put(WISH)
    assert (dict(store.tokens), dict(store.wishes)) == ({TOKEN.id: TOKEN}, {WISH.model: WISH})
    store.tokens.delete(TOKEN.id)
    store.tokens.delete("unknown")
    assert (store.wishes.delete(WISH.model), store.wishes.delete(WISH.model)) == (True, False)
    assert (dict(store.tokens), dict(store.wishes)) == ({}, {})
    for number in range(1, 4):
        store.audit.add(float(number), "local", "cordon", f"n{number}")
    assert [row.subject for row in store.audit[1:]] == ["n2", "n3"]
    assert (store.audit[0].subject, store.audit[-1].number, len(store.audit)) == ("n1", 3, 3)
    store.close()

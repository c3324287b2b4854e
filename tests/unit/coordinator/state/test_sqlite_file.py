"""Migrations of a database, and the copy before each."""

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.state.sqlite_file import open_database
from coordinator.state.store_errors import StoreError

FIRST = "CREATE TABLE names (name TEXT)"
SECOND = "ALTER TABLE names ADD COLUMN age INTEGER"
THIRD = "ALTER TABLE names ADD COLUMN place TEXT"


def read(path: Path) -> tuple[int, list[tuple[object, ...]]]:
    """Return the schema version and the rows of a database."""
    with closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        return version, connection.execute("SELECT * FROM names").fetchall()


def create(path: Path, *migrations: str) -> None:
    with closing(open_database(path, migrations)) as connection:
        connection.execute("INSERT INTO names (name) VALUES ('ada')")


def test_a_migrated_database_has_a_complete_private_copy_of_its_former_schema(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    create(path, FIRST, SECOND)
    assert [file.name for file in tmp_path.glob("*schema*")] == [], "a new database needs no copy"
    for _ in range(2):
        open_database(path, (FIRST, SECOND, THIRD)).close()
        assert read(path) == (3, [("ada", None, None)])
    (copy,) = tmp_path.glob("*schema*")
    assert (copy.name, stat.S_IMODE(copy.stat().st_mode)) == ("x.db.schema-2", 0o600)
    assert read(copy) == (2, [("ada", None)])
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",), "the copy is one file"


def test_the_copy_of_an_interrupted_migration_is_kept_and_a_partial_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    create(path, FIRST)
    (tmp_path / "x.db.schema-1.new").write_bytes(b"a part")
    open_database(path, (FIRST, SECOND)).close()
    assert read(tmp_path / "x.db.schema-1") == (1, [("ada",)])
    assert not (tmp_path / "x.db.schema-1.new").exists()
    path.unlink()
    create(path, FIRST)
    create(path, FIRST)
    open_database(path, (FIRST, SECOND)).close()
    assert read(tmp_path / "x.db.schema-1") == (1, [("ada",)])


def test_a_failed_migration_changes_nothing_and_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    create(path, FIRST)
    with pytest.raises(StoreError, match="cannot be used"):
        open_database(path, (FIRST, SECOND, "ALTER TABLE unknown ADD COLUMN place TEXT"))
    assert read(path) == (2, [("ada", None)])
    open_database(path, (FIRST, SECOND, THIRD)).close()
    assert read(path) == (3, [("ada", None, None)])


def test_a_database_is_private_and_durable(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    path.touch(0o644)
    with closing(open_database(path, (FIRST,))) as connection:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        for name in ("fullfsync", "checkpoint_fullfsync"):
            assert connection.execute(f"PRAGMA {name}").fetchone() == (1,), "macOS writes to the medium"


def test_a_database_with_wrong_counts_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    create(path, FIRST)
    with path.open("r+b") as file:
        file.seek(36)  # the number of free pages
        file.write((5).to_bytes(4, "big"))
    with pytest.raises(StoreError, match=r"(?s)x\.db is damaged \(.*should be 5\): restore a backup or move it away"):
        open_database(path, (FIRST,))


def test_a_newer_schema_is_named_with_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    create(path, FIRST, SECOND)
    with pytest.raises(StoreError, match=r"schema 2, we know 1\): update macpool"):
        open_database(path, (FIRST,))
    assert read(path) == (2, [("ada", None)])

"""A restore, a backup and a schema change that are killed at any step leave the old state or the new one."""

import os
import shutil
import signal
import sqlite3
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.backup.atomic_swap import RESTORING
from coordinator.backup.backup import create_backup
from coordinator.backup.restore import inspect_backup, restore
from coordinator.state.schema import MIGRATIONS
from coordinator.state.sqlite_file import open_database
from tests.unit.coordinator.backup.test_backup import NOW, cluster, shows

_STEPS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "sqlite3.connect", "shutil.rmtree"}


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Run work in a child that is killed before file-system step number `step`, counted from 0.

    Return False if the work has no such step.
    """
    child = os.fork()
    if child == 0:
        left = step

        def watch(event: str, _: Any) -> None:
            nonlocal left
            if event in _STEPS:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        code = 1
        try:
            work()
            code = 0
        finally:
            left = sys.maxsize  # with `make coverage`, os._exit opens files and a database
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"step {step} ended with {code}"
    return code == -signal.SIGKILL


@pytest.mark.timeout(300)
def test_a_restore_that_is_killed_anywhere_leaves_the_old_state_or_the_new_one(tmp_path: Path) -> None:
    new = cluster(tmp_path / "new", video=False)
    file = create_backup(tmp_path / "new", tmp_path / "b").file
    old = cluster(tmp_path / "template", "lab")
    seen: list[str] = []
    step = 0
    while True:
        folder = tmp_path / f"s{step}"
        shutil.copytree(tmp_path / "template", folder)
        killed = killed_at(step, lambda: restore(file, folder, NOW, replace=True))  # noqa: B023  run at once
        found = shows(folder)
        assert found[0] in (old, new), step
        assert found[1:] == ((int(NOW) if found[0] == new else 0), {"n1"}, {"k1"})
        assert not (folder / RESTORING).exists(), "the next start cleans up or finishes the restore"
        assert (folder / "videos").exists() is (found[0] == old)
        seen.append(found[0])
        shutil.rmtree(folder)
        if not killed:
            break
        step += 1
    assert seen == sorted(seen, key=lambda one: one == new), "once it counts it counts"
    assert seen[0] == old
    assert seen[-1] == new
    assert step > 30


def test_a_backup_that_is_killed_anywhere_leaves_the_older_one_whole(tmp_path: Path) -> None:
    home, name = tmp_path / "home", cluster(tmp_path / "home")
    file = create_backup(home, tmp_path / "b").file
    before, step = inspect_backup(file).made, 0
    while killed_at(step, lambda: create_backup(home, file)):
        assert inspect_backup(file).cluster == name
        step += 1
    assert inspect_backup(file).made > before
    assert step > 10


def test_a_schema_change_that_is_killed_anywhere_leaves_a_usable_database(tmp_path: Path) -> None:

    template = tmp_path / "old.db"
    with sqlite3.connect(template) as connection:
        connection.executescript(MIGRATIONS[0] + "PRAGMA user_version = 1;")
        connection.execute("UPDATE meta SET cluster = 'c1', name = 'home', epoch = 7")
    connection.close()
    step, seen = 0, list[int]()
    while True:
        folder = tmp_path / f"s{step}"
        folder.mkdir()
        shutil.copy(template, folder / "cluster.db")
        killed = killed_in_database(step * 41, lambda: open_database(folder / "cluster.db", MIGRATIONS).close())  # noqa: B023
        with sqlite3.connect(folder / "cluster.db") as connection:
            seen.append(connection.execute("PRAGMA user_version").fetchone()[0])
        connection.close()
        opened = open_database(folder / "cluster.db", MIGRATIONS)
        assert opened.execute("SELECT cluster, epoch, generation FROM meta").fetchone() == ("c1", 7, 0)
        opened.close()
        kept = folder / "cluster.db.schema-1"
        if seen[-1] == 1:
            assert stat.S_IMODE(kept.stat().st_mode) == 0o600
            with sqlite3.connect(kept) as before:
                assert before.execute("SELECT epoch FROM meta").fetchone() == (7,)
            before.close()
        shutil.rmtree(folder)
        if not killed:
            break
        step += 1
    assert seen == sorted(seen)
    assert set(seen) == set(range(1, len(MIGRATIONS) + 1))


def killed_in_database(step: int, work: Callable[[], object]) -> bool:
    """Run work in a child that is killed at SQLite instruction number `step`, counted from 0.

    Return False if the work has no such instruction.
    """
    child = os.fork()
    if child == 0:
        left, connect = step, sqlite3.connect

        def watch() -> int:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return 0

        def watched(*given: Any, **named: Any) -> sqlite3.Connection:
            made = connect(*given, **named)
            made.set_progress_handler(watch, 1)
            return made

        sqlite3.connect = watched
        code = 1
        try:
            work()
            code = 0
        finally:
            left = sys.maxsize  # with `make coverage`, os._exit opens files and a database
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"step {step} ended with {code}"
    return code == -signal.SIGKILL

"""A restore, a backup and a schema change that are killed at any step leave the old state or the new one.

A kill leaves the files as they are at that step. Hence a child works once, and copies its folder before each step. A
child for each step would take several times the CPU time.
"""

import os
import shutil
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
_INSTRUCTIONS = 41
"""Instructions of SQLite between two copies of a database."""


def states_at_kills(
    folder: Path, work: Callable[[], object], watch: Callable[[Callable[[], None]], None]
) -> list[Path]:
    """Run work in a child, and return copies of the state that a kill before each step leaves in a folder.

    The last of them is the folder itself, after the work. `watch` gets a function, which it has to call before each
    step.
    """
    copies = folder.with_name(f"{folder.name}.copies")
    copies.mkdir()
    child = os.fork()
    if child == 0:
        count, is_watched = 0, True

        def copy() -> None:
            nonlocal count, is_watched
            if is_watched:
                is_watched = False  # the steps of the copy itself
                shutil.copytree(folder, copies / str(count))
                count += 1
                is_watched = True

        code = 1
        try:
            watch(copy)
            work()
            code = 0
        finally:
            is_watched = False  # with `make coverage`, os._exit opens files and a database
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return [*(copies / str(number) for number in range(len(list(copies.iterdir())))), folder]


def watch_files(notify: Callable[[], None]) -> None:
    """Call `notify` before each step in the file system, until the process ends."""
    sys.addaudithook(lambda event, _: notify() if event in _STEPS else None)


def watch_database(notify: Callable[[], None]) -> None:
    """Call `notify` before the first instruction of SQLite and before each that follows after `_INSTRUCTIONS`."""
    left, connect = 0, sqlite3.connect

    def count() -> int:
        nonlocal left
        if left == 0:
            notify()
            left = _INSTRUCTIONS
        left -= 1
        return 0

    def watched(*given: Any, **named: Any) -> sqlite3.Connection:
        made = connect(*given, **named)
        made.set_progress_handler(count, 1)
        return made

    sqlite3.connect = watched


@pytest.mark.timeout(300)
def test_a_restore_that_is_killed_anywhere_leaves_the_old_state_or_the_new_one(tmp_path: Path) -> None:
    new = cluster(tmp_path / "new", video=False)
    file = create_backup(tmp_path / "new", tmp_path / "b").file
    old = cluster(tmp_path / "old", "lab")
    seen: list[str] = []
    states = states_at_kills(tmp_path / "old", lambda: restore(file, tmp_path / "old", NOW, replace=True), watch_files)
    for step, folder in enumerate(states):
        found = shows(folder)
        assert found[0] in (old, new), step
        assert found[1:] == ((int(NOW) if found[0] == new else 0), {"n1"}, {"k1"})
        assert not (folder / RESTORING).exists(), "the next start cleans up or finishes the restore"
        assert (folder / "videos").exists() is (found[0] == old)
        seen.append(found[0])
    assert seen == sorted(seen, key=lambda one: one == new), "once it counts it counts"
    assert seen[0] == old
    assert seen[-1] == new
    assert len(states) > 31


def test_a_backup_that_is_killed_anywhere_leaves_the_older_one_whole(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    name = cluster(root / "home")
    before = inspect_backup(create_backup(root / "home", root / "b").file).made
    *killed, done = states_at_kills(root, lambda: create_backup(root / "home", root / "b"), watch_files)
    manifests = [inspect_backup(folder / "b") for folder in [*killed, done]]
    assert {manifest.cluster for manifest in manifests} == {name}
    made = [manifest.made for manifest in manifests]
    assert made == sorted(made)
    assert made[0] == before < made[-1]
    assert set(made) == {made[0], made[-1]}, "the older one or the new one"
    assert len(killed) > 10
    for folder in killed[::10]:  # the next backup, with the files that the kill left
        assert inspect_backup(create_backup(folder / "home", folder / "b").file).made > before


def test_a_schema_change_that_is_killed_anywhere_leaves_a_usable_database(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with sqlite3.connect(home / "cluster.db") as connection:
        connection.executescript(MIGRATIONS[0] + "PRAGMA user_version = 1;")
        connection.execute("UPDATE meta SET cluster = 'c1', name = 'home', epoch = 7")
    connection.close()
    seen = list[int]()
    for folder in states_at_kills(home, lambda: open_database(home / "cluster.db", MIGRATIONS).close(), watch_database):
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
    assert seen == sorted(seen)
    assert set(seen) == set(range(1, len(MIGRATIONS) + 1))

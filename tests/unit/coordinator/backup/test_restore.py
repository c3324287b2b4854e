"""A restore reads valid backups, refuses any other file with the reason, and completes after an interruption."""

import hashlib
import os
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.backup.archive import MAGIC, ArchiveMember, encode_header, read_manifest
from coordinator.backup.atomic_swap import finish_swap
from coordinator.backup.backup import create_backup
from coordinator.backup.restore import (
    ExistingState,
    RestoredCounts,
    RestoreError,
    find_existing_cluster,
    inspect_backup,
    restore,
)
from tests.unit.coordinator.backup.test_backup import NOW, cluster, shows


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a backup without videos of a cluster with the name home."""
    cluster(tmp_path / "home", video=False)
    return create_backup(tmp_path / "home", tmp_path / "saved").file


def rebuilt(file: Path, name: str, content: bytes) -> Path:
    """Make a backup in which the member of this name has another content, with a matching digest."""
    with file.open("rb") as opened:
        opened.seek(len(MAGIC))
        manifest = read_manifest(opened)
        contents = {one.name: opened.read(one.size) for one in manifest.members} | {name: content}
    members = tuple(ArchiveMember(one, len(held), hashlib.sha256(held).hexdigest()) for one, held in contents.items())
    made = file.with_name("rebuilt")
    made.write_bytes(MAGIC + encode_header(replace(manifest, members=members)) + b"".join(contents.values()))
    return made


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"macpool backup 2\n", "newer macpool: update"),
        (b"macpool sealed 2\n", "newer macpool: update"),
        (b"#!/bin/sh\n", "is not a macpool backup"),
        (b"", "is not a macpool backup"),
    ],
)
def test_restore_of_a_foreign_file_names_its_kind(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "b").write_bytes(content)
    for use in (inspect_backup, lambda file: restore(file, tmp_path / "state", NOW)):
        with pytest.raises(RestoreError, match=words):
            use(tmp_path / "b")


def test_files_that_cannot_be_read_or_written_are_named(saved: Path, tmp_path: Path) -> None:
    missing, taken = tmp_path / "missing", tmp_path / "file"
    taken.touch()
    with pytest.raises(RestoreError, match=f"{missing} cannot be read: No such file"):
        inspect_backup(missing)
    with pytest.raises(RestoreError, match=f"{missing}: No such file"):
        restore(missing, tmp_path / "state", NOW)
    with pytest.raises(RestoreError, match=f"{taken} cannot be written: "):
        restore(saved, taken, NOW)


def test_members_that_do_not_belong_together_are_not_used(saved: Path, tmp_path: Path) -> None:
    cluster(tmp_path / "lab", "lab", video=False)
    lab = create_backup(tmp_path / "lab", tmp_path / "lab.backup").file
    with lab.open("rb") as opened:
        opened.seek(len(MAGIC))
        theirs = {one.name: opened.read(one.size) for one in read_manifest(opened).members}
    for name, content, words in (
        ("cluster.db", b"garbage" * 1000, "cannot be restored: "),
        ("cluster.db", theirs["cluster.db"], "its cluster.db and its authority belong to different clusters"),
        ("authority/authority.pem", theirs["authority/authority.pem"], "its authority belongs to another cluster"),
    ):
        with pytest.raises(RestoreError, match=words):
            restore(rebuilt(saved, name, content), tmp_path / "state", NOW)
        assert not (tmp_path / "state" / "cluster.db").exists()


def test_half_of_a_cluster_is_one_that_is_present(saved: Path, tmp_path: Path) -> None:
    state, name = tmp_path / "home", shows(tmp_path / "home")[0]
    for file, changed in (("cluster.db", NOW - 60), ("authority/authority.pem", NOW - 3600)):
        os.utime(state / file, (changed, changed))
    assert find_existing_cluster(tmp_path / "empty") is None
    assert find_existing_cluster(state) == ExistingState(name, NOW - 60)
    shutil.copytree(state, tmp_path / "without-database")
    (tmp_path / "without-database" / "cluster.db").unlink()
    assert find_existing_cluster(tmp_path / "without-database") == ExistingState(name, NOW - 3600)
    shutil.rmtree(state / "authority")
    assert find_existing_cluster(state) == ExistingState("", NOW - 60)


def test_a_second_restore_names_the_last_change_and_the_time_of_the_backup(saved: Path, tmp_path: Path) -> None:
    """The epoch is no number of starts: a restore adds 1000 to it."""
    state = tmp_path / "state"
    restore(saved, state, NOW)
    for file in ("cluster.db", "authority/authority.pem"):
        os.utime(state / file, (NOW, NOW))
    changed, made = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) for when in (NOW, inspect_backup(saved).made)
    )
    with pytest.raises(RestoreError, match=f"last changed at {changed}; the backup was made at {made}\\. A restore"):
        restore(saved, state, NOW)


def test_restore_returns_counts_and_paths(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "home" / "config.toml").unlink()
    bare = create_backup(tmp_path / "home", tmp_path / "bare").file
    done = restore(bare, tmp_path / "state", NOW)
    assert (done.counts, done.aside, done.config) == (RestoredCounts(1, 1, 1, 0), None, "")
    assert not (tmp_path / "state" / "config.toml").exists()
    again = restore(saved, tmp_path / "state", NOW, replace=True)
    assert again.config == "config.toml"
    assert again.aside is not None
    assert (again.aside / "cluster.db").exists()


def test_a_restore_that_breaks_off_at_any_rename_is_finished_or_taken_back(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = shows(tmp_path / "home")[0], cluster(tmp_path / "lab", "lab")
    rename, finished, left = Path.rename, list[bool](), 0
    damaged = saved.with_name("damaged")
    damaged.write_bytes(saved.read_bytes()[:-1] + b"x")

    def counted(self: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    for renames in range(20):
        state, left = tmp_path / f"state-{renames}", renames
        shutil.copytree(tmp_path / "lab", state)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", counted)
            with suppress(RestoreError):
                restore(saved, state, NOW, replace=True)
        broken = left < 0
        if renames % 2:
            finish_swap(state)
        else:
            with pytest.raises(RestoreError, match=r"has (this|another) cluster"):
                restore(saved, state, NOW)
            with pytest.raises(RestoreError, match="is damaged"):
                restore(damaged, state, NOW, replace=True)
        found = shows(state)[0]
        assert found in (old, new)
        finished.append(found == new)
        if not broken:
            break
    assert finished == sorted(finished)
    assert finished[-1]
    assert len(finished) > 5


def test_videos_without_a_cluster_are_moved_aside(saved: Path, tmp_path: Path) -> None:
    clip = tmp_path / "state" / "videos" / "video_x" / "video.mp4"
    clip.parent.mkdir(parents=True)
    clip.write_bytes(b"of another cluster")
    done = restore(saved, tmp_path / "state", NOW)
    assert done.aside is not None
    assert (done.aside / "videos" / "video_x" / "video.mp4").read_bytes() == b"of another cluster"
    assert not (tmp_path / "state" / "videos").exists()


def test_a_database_without_its_row_belongs_to_no_cluster(saved: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "home" / "cluster.db")) as connection, connection:
        connection.execute("DELETE FROM meta")
    file = rebuilt(saved, "cluster.db", (tmp_path / "home" / "cluster.db").read_bytes())
    with pytest.raises(RestoreError, match="belong to different clusters"):
        restore(file, tmp_path / "elsewhere", NOW)

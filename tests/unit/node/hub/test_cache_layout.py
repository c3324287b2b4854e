"""The layout of a repository in the cache: nothing is written outside of its folder."""

import errno
import hashlib
import os
import threading
from pathlib import Path

import psutil
import pytest

from node.hub.cache_layout import RepositoryFolder
from node.hub.errors import ModelFileError
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelFile, ModelManifest

COMMIT = "c" * 40
CONTENT = b"{}"
ETAG = hashlib.sha256(CONTENT).hexdigest()
MANIFEST = ModelManifest("a/b", COMMIT, (ModelFile("config.json", 2, ETAG), ModelFile("x/y/z.json", 2, ETAG)))


@pytest.fixture
def folder(tmp_path: Path) -> RepositoryFolder:
    made = RepositoryFolder(tmp_path / "hub", "a/b")
    made.prepare()
    made.get_blob(ETAG).write_bytes(CONTENT)
    return made


def refuse_links(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "symlink", refuse)


def test_a_full_disk_is_not_taken_for_one_without_symbolic_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    refuse_links(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left") as caught:
        RepositoryFolder(tmp_path / "hub", "a/b").prepare()
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.EPERM])
def test_a_disk_without_symbolic_links_is_refused_before_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    refuse_links(monkeypatch, number)
    with pytest.raises(
        ModelFileError, match=r"has no symbolic links, as exFAT, .* set models\.huggingface_cache"
    ) as caught:
        RepositoryFolder(tmp_path / "hub", "a/b").prepare()
    assert caught.value.code is ModelOrderCode.INVALID
    monkeypatch.undo()
    RepositoryFolder(tmp_path / "hub", "a/b").prepare()
    assert list((tmp_path / "hub" / "models--a--b" / "blobs").iterdir()) == []


def test_create_snapshot_links_every_file(folder: RepositoryFolder):
    for _ in range(2):
        folder.create_snapshot(MANIFEST)
    for file in MANIFEST.files:
        link = folder.get_snapshot(COMMIT) / file.path
        assert link.resolve() == folder.get_blob(ETAG)
        assert not link.readlink().is_absolute()
        assert link.read_bytes() == CONTENT


def test_create_snapshot_replaces_files_and_links_without_following_them(folder: RepositoryFolder, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    snapshot = folder.get_snapshot(COMMIT)
    snapshot.mkdir()
    (snapshot / "config.json").symlink_to(outside)
    folder.create_snapshot(MANIFEST)
    assert (snapshot / "config.json").read_bytes() == CONTENT
    assert outside.read_text() == "kept"


@pytest.mark.parametrize("place", ["", "blobs", "snapshots", "refs"])
def test_prepare_refuses_folders_that_are_links(tmp_path: Path, place: str):
    folder = RepositoryFolder(tmp_path / "hub", "a/b")
    (tmp_path / "outside").mkdir()
    link = folder.root / place
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "outside")
    with pytest.raises(ModelFileError, match="link or a file") as caught:
        folder.prepare()
    assert caught.value.code == ModelOrderCode.INVALID
    assert list((tmp_path / "outside").iterdir()) == []


def test_prepare_refuses_a_file_in_place_of_a_folder(tmp_path: Path):
    folder = RepositoryFolder(tmp_path / "hub", "a/b")
    folder.root.parent.mkdir(parents=True)
    folder.root.write_text("kept")
    with pytest.raises(ModelFileError, match="link or a file"):
        folder.prepare()
    assert folder.root.read_text() == "kept"


@pytest.mark.parametrize("place", ["", "x", "x/y"])
def test_create_snapshot_refuses_folders_that_are_links(folder: RepositoryFolder, tmp_path: Path, place: str):
    (tmp_path / "outside").mkdir()
    link = folder.get_snapshot(COMMIT) / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "outside")
    with pytest.raises(ModelFileError):
        folder.create_snapshot(MANIFEST)
    assert list((tmp_path / "outside").iterdir()) == []


def test_write_references_replaces_each_and_follows_no_link(folder: RepositoryFolder, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (folder.refs / "main").symlink_to(outside)
    folder.write_references(COMMIT, ("main", "pr/1"))
    assert (folder.refs / "main").read_text() == (folder.refs / "pr" / "1").read_text() == COMMIT
    assert outside.read_text() == "kept"
    assert sorted(path.name for path in folder.refs.iterdir()) == ["main", "pr"]


def test_lock_excludes_a_second_holder(folder: RepositoryFolder):
    other = RepositoryFolder(folder.hub, "a/b")
    assert not other.is_locked()
    with folder.lock():
        assert other.is_locked()
        with pytest.raises(ModelFileError, match="another process works on a/b") as caught, other.lock():
            pass
        assert caught.value.code == ModelOrderCode.IN_USE
        with RepositoryFolder(folder.hub, "a/c").lock():
            pass
    with other.lock():
        pass


def test_a_lock_that_is_refused_leaves_no_open_file(folder: RepositoryFolder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.hub.cache_layout.LOCK_TIMEOUT_SECONDS", 0.0)
    with folder.lock():
        before = psutil.Process().num_fds()
        with pytest.raises(ModelFileError), folder.lock():
            pass
        assert folder.is_locked()
        assert psutil.Process().num_fds() == before


def test_remove_parts_leaves_files_of_other_tools(folder: RepositoryFolder):
    folder.get_part(ETAG).touch()
    folder.get_journal(ETAG).touch()
    (folder.blobs / f"{ETAG}.macpool-journal.macpool-new").touch()
    other = folder.blobs / f"{ETAG}.1a2b3c4d.incomplete"
    other.touch()
    folder.remove_parts()
    assert sorted(path.name for path in folder.blobs.iterdir()) == [ETAG, other.name]


def test_a_repository_is_locked_beside_the_locks_of_other_tools(folder: RepositoryFolder):
    other_tool = folder.hub / ".locks" / folder.root.name / f"{ETAG}.lock"
    other_tool.parent.mkdir(parents=True)
    other_tool.touch()
    with folder.lock():
        assert RepositoryFolder(folder.hub, "a/b").is_locked()
    assert other_tool.exists()


def test_is_locked_writes_nothing(folder: RepositoryFolder):
    assert not folder.is_locked()
    assert [path.name for path in folder.hub.iterdir()] == [folder.root.name]


def test_the_lock_is_never_opened_through_a_link(folder: RepositoryFolder, tmp_path: Path):
    folder.lock_file.parent.mkdir(parents=True)
    folder.lock_file.symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic links"), folder.lock():
        pass
    assert not (tmp_path / "outside").exists()


def test_lock_waits_for_a_holder_that_ends_soon(folder: RepositoryFolder):
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with folder.lock():
            held.set()
            free.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(20)
    threading.Timer(0.2, free.set).start()
    with RepositoryFolder(folder.hub, "a/b").lock():
        assert free.is_set()
    holder.join()


def test_prepare_creates_the_folders_of_a_new_cache(tmp_path: Path):
    folder = RepositoryFolder(tmp_path / "new" / "cache" / "hub", "a/b")
    for _ in range(2):
        folder.prepare()
    assert {path.name for path in folder.root.iterdir()} == {"blobs", "refs", "snapshots"}


def test_a_lock_that_was_released_is_not_locked(folder: RepositoryFolder):
    for _ in range(2):
        with folder.lock():
            assert folder.is_locked()
        assert not folder.is_locked()


def test_rests_of_an_interruption_are_replaced(folder: RepositoryFolder, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    snapshot = folder.get_snapshot(COMMIT)
    snapshot.mkdir()
    (snapshot / ".config.json.macpool-new").symlink_to(outside)
    (folder.refs / ".main.macpool-new").symlink_to(outside)
    folder.create_snapshot(MANIFEST)
    folder.write_references(COMMIT, ("main",))
    assert sorted(path.name for path in snapshot.iterdir()) == ["config.json", "x"]
    assert [path.name for path in folder.refs.iterdir()] == ["main"]
    assert outside.read_text() == "kept"

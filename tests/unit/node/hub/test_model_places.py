"""Places of models, and their removal: nothing outside of the model's own folder is deleted."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from node.hub.cache_layout import RepositoryFolder
from node.hub.errors import ModelFileError
from node.hub.model_places import locate_model, remove_model
from node.models.folders import find_snapshots
from node.settings import ModelSettings
from wire.frames.model_files import ModelOrderCode

COMMIT = "c" * 40
BLOCK = 8192


class Disk:
    """A model folder with `me/tiny`, and a cache with `hub/tiny` in two revisions."""

    def __init__(self, folder: Path) -> None:
        self.models, self.hub, self.outside = folder / "models", folder / "hub", folder / "outside"
        self.settings = ModelSettings(folders=(str(self.models),))
        self.environment = {"HF_HUB_CACHE": str(self.hub)}
        self.model = self.models / "me" / "tiny"
        self.model.mkdir(parents=True)
        self.outside.mkdir()
        (self.model / "config.json").write_bytes(bytes(BLOCK))
        (self.model / "model.safetensors").write_bytes(bytes(BLOCK))
        self.repository = RepositoryFolder(self.hub, "hub/tiny")
        self.repository.prepare()
        for commit in (COMMIT, "d" * 40):
            self.repository.get_snapshot(commit).mkdir()
            blob = self.repository.get_blob(commit)
            blob.write_bytes(bytes(BLOCK))
            (self.repository.get_snapshot(commit) / "config.json").symlink_to(f"../../blobs/{commit}")
        self.repository.write_references(COMMIT, ("main",))

    def remove(self, name: str) -> int:
        return remove_model(locate_model(self.settings, name, self.environment))

    def refuse(self, name: str, code: ModelOrderCode) -> str:
        with pytest.raises(ModelFileError) as caught:
            self.remove(name)
        assert caught.value.code == code
        return caught.value.message


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_locate_model_finds_both_kinds(disk: Disk):
    assert locate_model(disk.settings, "me/tiny", disk.environment).folder == disk.model
    found = locate_model(disk.settings, "hub/tiny", disk.environment)
    assert found.folder == disk.repository.get_snapshot(COMMIT)


def test_locate_model_finds_each_repository_of_the_cache(disk: Disk):
    for repo, commit in (("a/first", "a" * 40), ("z/last", "e" * 40)):
        repository = RepositoryFolder(disk.hub, repo)
        repository.prepare()
        repository.get_snapshot(commit).mkdir()
        (repository.get_snapshot(commit) / "config.json").write_text("{}")
        repository.write_references(commit, ("main",))
    for repo, commit in (("a/first", "a" * 40), ("hub/tiny", COMMIT), ("z/last", "e" * 40)):
        found = locate_model(disk.settings, repo, disk.environment)
        assert found.folder == RepositoryFolder(disk.hub, repo).get_snapshot(commit)


def test_locate_model_prefers_model_folders_as_the_catalogue_does(disk: Disk):
    other = disk.models / "hub" / "tiny"
    other.mkdir(parents=True)
    (other / "config.json").write_text("{}")
    assert locate_model(disk.settings, "hub/tiny", disk.environment).folder == other


def test_locate_model_ignores_a_cache_that_is_not_served(disk: Disk):
    settings = ModelSettings(use_huggingface_cache=False)
    with pytest.raises(ModelFileError, match="no model hub/tiny"):
        locate_model(settings, "hub/tiny", disk.environment)


def test_remove_model_deletes_a_folder_below_a_model_folder(disk: Disk):
    assert disk.remove("me/tiny") == 2 * BLOCK
    assert not disk.model.exists()
    assert disk.models.exists()


def test_remove_model_deletes_all_revisions_of_a_repository(disk: Disk):
    assert disk.remove("hub/tiny") >= 2 * BLOCK
    assert not disk.repository.root.exists()
    assert disk.hub.exists()


def test_remove_model_deletes_an_abandoned_download(disk: Disk):
    partial = RepositoryFolder(disk.hub, "hub/partial")
    partial.prepare()
    partial.get_part("a" * 64).write_bytes(bytes(BLOCK))
    assert disk.remove("hub/partial") == BLOCK
    assert not partial.root.exists()


def test_remove_model_leaves_targets_of_links(disk: Disk):
    (disk.outside / "shared").write_bytes(bytes(BLOCK))
    (disk.repository.blobs / "shared").symlink_to(disk.outside / "shared")
    (disk.model / "folder").symlink_to(disk.outside)
    disk.remove("me/tiny")
    disk.remove("hub/tiny")
    assert (disk.outside / "shared").read_bytes() == bytes(BLOCK)


def test_remove_model_counts_no_files_with_another_link(disk: Disk):
    os.link(disk.model / "model.safetensors", disk.outside / "kept")
    assert disk.remove("me/tiny") == BLOCK
    assert (disk.outside / "kept").exists()


def test_remove_model_counts_the_blocks_of_its_own_files(disk: Disk):
    (disk.outside / "shared").write_bytes(bytes(BLOCK))
    (disk.model / "shared").symlink_to(disk.outside / "shared")
    os.truncate(disk.model / "model.safetensors", 2**30)  # its blocks are as before
    assert 2 * BLOCK <= disk.remove("me/tiny") < 3 * BLOCK


@pytest.mark.parametrize("at", ["model", "publisher"])
def test_remove_model_refuses_a_folder_that_is_a_link(disk: Disk, at: str):
    link = disk.model if at == "model" else disk.model.parent
    target = disk.outside / "moved"
    link.rename(target)
    link.symlink_to(target)
    assert "is a link" in disk.refuse("me/tiny", ModelOrderCode.INVALID)
    assert list(target.rglob("config.json"))


def test_remove_model_accepts_a_model_folder_that_is_a_link(disk: Disk):
    link = disk.outside / "models"
    link.symlink_to(disk.models)
    disk.settings = ModelSettings(folders=(str(link),))
    assert disk.remove("me/tiny") == 2 * BLOCK
    assert not disk.model.exists()


def test_remove_model_refuses_a_repository_that_is_a_link(disk: Disk):
    target = disk.outside / "moved"
    disk.repository.root.rename(target)
    disk.repository.root.symlink_to(target)
    assert "is a link" in disk.refuse("hub/tiny", ModelOrderCode.INVALID)
    assert (target / "refs" / "main").exists()


def test_remove_model_refuses_a_folder_of_the_settings(disk: Disk):
    disk.settings = ModelSettings(folders=(str(disk.model),))
    assert "by hand" in disk.refuse("tiny", ModelOrderCode.INVALID)
    assert (disk.model / "config.json").exists()


def test_remove_model_refuses_a_repository_that_is_being_downloaded(disk: Disk):
    with disk.repository.lock():
        disk.refuse("hub/tiny", ModelOrderCode.IN_USE)
    assert (disk.repository.refs / "main").exists()


@pytest.mark.parametrize("name", ["none", "me/none", "..", "../outside", "me/../../outside", ""])
def test_locate_model_refuses_unknown_names(disk: Disk, name: str):
    disk.refuse(name, ModelOrderCode.NOT_FOUND)


def test_locate_model_refuses_the_embedded_model(disk: Disk):
    disk.refuse("macpool-tiny", ModelOrderCode.INVALID)


def refuse_path(refused: Path, delete: Callable[..., None]) -> Callable[..., None]:
    """Return `delete` on a disk that refuses to remove one path.

    An audit hook would do without the replacement of functions. But Python never removes a hook, and each later audit
    event of the process calls it.
    """

    def run(path: Path, *arguments: Any, **options: Any) -> None:
        if Path(path) == refused:
            raise OSError("the disk is gone")
        delete(path, *arguments, **options)

    return run


def interrupt(disk: Disk, name: str, folder: Path, decisive: set[str], at: int) -> None:
    """Interrupt the removal of a model at the first or last (-1) entry, which does not decide about its name."""
    names = [path.name for path in folder.iterdir()]
    while names[at] in decisive:  # ext4 lists names by their hashes, tmpfs the newest first
        (folder / names[at]).rename(folder / "aside")
        (folder / "aside").rename(folder / names[at])
        (folder / f"more-{len(names)}").write_bytes(b"x")
        names = [path.name for path in folder.iterdir()]
    with pytest.MonkeyPatch.context() as patch:
        for module, delete in ((os, "unlink"), (shutil, "rmtree")):
            patch.setattr(module, delete, refuse_path(folder / names[at], getattr(module, delete)))
        with pytest.raises(OSError, match="the disk is gone"):
            disk.remove(name)


def test_a_model_whose_removal_was_interrupted_is_removed_by_the_next(disk: Disk):
    interrupt(disk, "me/tiny", disk.model, {"config.json"}, -1)
    assert locate_model(disk.settings, "me/tiny", disk.environment).folder == disk.model
    disk.remove("me/tiny")
    assert not disk.model.exists()


def test_a_repository_whose_removal_was_interrupted_is_no_model_any_more(disk: Disk):
    interrupt(disk, "hub/tiny", disk.repository.root, {"refs", "snapshots"}, 0)
    assert list(find_snapshots(disk.hub)) == []
    disk.remove("hub/tiny")
    assert not disk.repository.root.exists()

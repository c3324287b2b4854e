"""Find the files of a model on the disk of this node by the model's name in the catalogue, and delete them.

Rules
- Only a model below a model folder of the settings, or in the Hugging Face cache, is removed.
- A link is never followed: a model whose folder, or a folder above it, is a link is refused.
- The file by which the catalogue finds a model in a model folder is deleted last. After an interruption, the catalogue
  therefore still finds the rest, and the removal can be repeated.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from host.private_files import resolve_home
from node.hub.cache_layout import RepositoryFolder
from node.hub.errors import ModelFileError
from node.models.catalogue import EMBEDDED
from node.models.folders import MODEL, find_model_folders, find_snapshots, get_hub_folder
from node.settings import ModelSettings
from wire.frames.model_files import ModelOrderCode


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Place of a model on this node's disk: in a model folder of the settings, or in the Hugging Face cache."""

    name: str
    """Name of the model in the catalogue."""
    folder: Path
    """Folder with the files of the model; for a model of the cache without a snapshot, the folder of its repository."""
    root: Path
    """Model folder of the settings, or the Hugging Face cache."""
    repository: RepositoryFolder | None = None
    """Repository of the cache; None for a model in a model folder."""


def locate_model(settings: ModelSettings, name: str, environment: Mapping[str, str]) -> ModelPlace:
    """Return the place of the first model with this name, in the order of the catalogue.

    `environment` are the variables that locate the Hugging Face cache. A repository of the cache is also found without
    a complete snapshot. Raise `ModelFileError` if this node has no such model, or if the model is the embedded one.
    """
    place = find_in_model_folders(settings, name)
    if place is not None:
        return place
    if settings.use_huggingface_cache:
        hub = Path(os.path.realpath(get_hub_folder(environment)))
        repository = RepositoryFolder(hub, name)
        if repository.root.is_dir():
            snapshot = next((folder for candidate, folder in find_snapshots(hub) if candidate == name), repository.root)
            return ModelPlace(name, snapshot, hub, repository)
    if name == EMBEDDED.name:
        raise ModelFileError(ModelOrderCode.INVALID, f"{name} is a part of Macpool and takes no further disk")
    raise ModelFileError(ModelOrderCode.NOT_FOUND, f"this node has no model {name} on its disk")


def find_in_model_folders(settings: ModelSettings, name: str) -> ModelPlace | None:
    """Return the first place of a model in the model folders of the settings; None if they have no such model.

    The depth of the search and the number of its folders are limited (`find_model_folders`).
    """
    for top in (resolve_home(folder) for folder in settings.folders):
        for candidate, folder in find_model_folders(top):
            if candidate == name:
                return ModelPlace(name, folder, top)
    return None


def remove_model(place: ModelPlace) -> int:
    """Delete a model, with all its revisions if it is in the cache. Return the freed bytes of disk.

    Files with a hard link elsewhere free no bytes. Raise `ModelFileError` for a link, for a model folder of the
    settings itself, and for a repository whose lock another process holds. Raise `OSError` if a file cannot be deleted.
    """
    if place.repository is not None:
        return _remove_repository(place.repository)
    if place.folder == place.root:
        raise ModelFileError(
            ModelOrderCode.INVALID, f"{place.folder} is a model folder of the settings: remove it by hand"
        )
    for folder in (place.folder, *place.folder.parents):
        if folder == place.root:
            break
        _refuse_link(folder, place.name)
    freed = _measure_disk(place.folder)
    for path in sorted(place.folder.iterdir(), key=lambda path: path.name == MODEL):
        _delete(path)
    place.folder.rmdir()
    return freed


def _remove_repository(repository: RepositoryFolder) -> int:
    """Delete a repository of the cache: the references and links first, because they make it a model."""
    _refuse_link(repository.root, repository.repo)
    with repository.lock():
        freed = _measure_disk(repository.root)
        first = (repository.refs.name, repository.snapshots.name)
        for path in sorted(repository.root.iterdir(), key=lambda path: path.name not in first):
            _delete(path)
        repository.root.rmdir()
        return freed


def _refuse_link(folder: Path, name: str) -> None:
    if folder.is_symlink():
        raise ModelFileError(
            ModelOrderCode.INVALID, f"{name} is a link to {os.readlink(folder)}: remove the link or its target by hand"
        )


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _measure_disk(folder: Path) -> int:
    """Return the bytes on the disk that a folder's removal frees: those of each file without a further hard link."""
    stats = {(stat.st_dev, stat.st_ino): stat.st_blocks * 512 for stat in _list_stats(folder) if stat.st_nlink == 1}
    return sum(stats.values())


def _list_stats(folder: Path) -> Iterator[os.stat_result]:
    for parent, _, names in os.walk(folder):
        for name in names:
            yield os.lstat(os.path.join(parent, name))

"""Atomic replacement of the state in a folder, even across a power failure.

    STATE/restoring/            the new state: complete, checked and on disk
    STATE/restoring/commit.json written last, in one step: from now on the new state is valid
    STATE/replaced-…/           the former state, kept until a person removes it

Before `commit.json` exists, the old state is valid and `restoring` is garbage. After that, the next holder of the
folder's lock (`Database`, `restore`) continues an interrupted swap. A file that has left `restoring` is in place; a
file that is still there is moved now. No code opens the databases before `finish_swap` has returned.
"""

import os
import shutil
from pathlib import Path

import msgspec

from host.private_files import create_private_folder, sync_path, write_private

RESTORING = "restoring"
COMMIT = "commit.json"


class FileMoves(msgspec.Struct, frozen=True):
    """Plan of a swap. All names are relative to the state folder, those in `install` also to the folder `restoring`."""

    install: tuple[str, ...]
    """Files and folders to move from `restoring` into the state folder. An old one at that place moves into `aside`."""
    remove: tuple[str, ...]
    """Files and folders to move into `aside`."""
    aside: str
    """Folder for replaced and removed files."""


def create_staging(folder: Path) -> Path:
    """Create an empty folder for the new state, and return it. Delete an uncommitted earlier one.

    Raise `OSError` if the folder cannot be created.
    """
    staged = folder / RESTORING
    if staged.is_symlink():
        staged.unlink()
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(mode=0o700)
    return create_private_folder(staged)


def commit(folder: Path, plan: FileMoves) -> None:
    """Commit the staged state and move it into place. Replaced and removed files move into `plan.aside`.

    The caller must hold the lock of the folder. Raise `OSError` if a file cannot be written or moved. Before
    `commit.json` is written, an error leaves the state unchanged; after that, the next `finish_swap` continues.
    """
    _sync(folder / RESTORING)
    write_private(folder / RESTORING / COMMIT, msgspec.json.encode(plan))
    finish_swap(folder)


def discard_staging(folder: Path) -> None:
    """Delete a staged state that is not committed, because it contains secrets. Keep a committed one.

    Errors of the deletion are ignored.
    """
    if not is_unsettled(folder):
        shutil.rmtree(folder / RESTORING, ignore_errors=True)


def is_unsettled(folder: Path) -> bool:
    """Return whether a staged state is committed but not completely in place."""
    return (folder / RESTORING / COMMIT).exists()


def finish_swap(folder: Path) -> bool:
    """Finish an interrupted swap, or delete an uncommitted state. Return whether a swap was finished.

    The caller must hold the lock. A state whose `commit.json` cannot be parsed counts as uncommitted. Raise `OSError`
    if a file cannot be moved; the next call continues.
    """
    staged = folder / RESTORING
    if not staged.exists():
        return False
    try:
        plan = msgspec.json.decode((staged / COMMIT).read_bytes(), type=FileMoves)
    except (FileNotFoundError, msgspec.MsgspecError):
        shutil.rmtree(staged, ignore_errors=True)
        return False
    aside = create_private_folder(folder / plan.aside)
    for name in plan.remove:
        _move_aside(folder / name, aside)
    for name in plan.install:
        if os.path.lexists(staged / name):
            _move_aside(folder / name, aside)
            (staged / name).rename(folder / name)
    _sync(folder)  # with `aside`
    (staged / COMMIT).unlink()
    shutil.rmtree(staged, ignore_errors=True)
    if not any(aside.iterdir()):
        aside.rmdir()
    return True


def _move_aside(place: Path, aside: Path) -> None:
    if os.path.lexists(place):
        place.rename(aside / place.name)


def _sync(folder: Path) -> None:
    """Sync the entries of a folder and of its subfolders to disk."""
    for root, _, _ in os.walk(folder):
        sync_path(Path(root))

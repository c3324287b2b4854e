"""Puts another state in the place of the one in a folder: all of it or nothing, whenever the power goes.

    STATE/restoring/            everything new, whole, checked and on the disk
    STATE/restoring/commit.json written last, in one step: from now on the new state counts
    STATE/replaced-…/           what was in its place before, kept until a person removes it

Before `commit.json` is there the old state counts, and `restoring` is rubbish. Once it is there, whoever next takes the
folder's lock (`Store`, `restore`) goes on from where it was broken off: a file that has left `restoring` is in place,
one that is still there is moved now. Nothing of ours opens the databases before `settle` has returned.
"""

import os
import shutil
from pathlib import Path

import msgspec

from host.private_files import private_folder, write_private

RESTORING = "restoring"
COMMIT = "commit.json"


class Plan(msgspec.Struct, frozen=True):
    """What is moved: `install` from `restoring` into the folder, each in place of what was there; `remove` only away;
    both into `aside`."""

    install: tuple[str, ...]
    remove: tuple[str, ...]
    aside: str


def staging(folder: Path) -> Path:
    """Give an empty folder for what is to be put in place."""
    staged = folder / RESTORING
    if staged.is_symlink():
        staged.unlink()
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(mode=0o700)
    return private_folder(staged)


def commit(folder: Path, plan: Plan) -> None:
    """Make the new state the one that counts, and put it in place."""
    _sync(folder / RESTORING)
    write_private(folder / RESTORING / COMMIT, msgspec.json.encode(plan))
    settle(folder)


def abandon(folder: Path) -> None:
    """Throw away what was not committed: it holds secrets."""
    if not unsettled(folder):
        shutil.rmtree(folder / RESTORING, ignore_errors=True)


def unsettled(folder: Path) -> bool:
    """Say whether a new state counts that is not all in place."""
    return (folder / RESTORING / COMMIT).exists()


def settle(folder: Path) -> bool:
    """Finish what was broken off, or throw it away; say whether a new state came into place. The lock is the caller's.

    OSError when a file cannot be moved: the next call goes on."""
    staged = folder / RESTORING
    if not staged.exists():
        return False
    try:
        plan = msgspec.json.decode((staged / COMMIT).read_bytes(), type=Plan)
    except (FileNotFoundError, msgspec.MsgspecError):
        shutil.rmtree(staged, ignore_errors=True)
        return False
    aside = private_folder(folder / plan.aside)
    for name in plan.remove:
        _away(folder / name, aside)
    for name in plan.install:
        if os.path.lexists(staged / name):
            _away(folder / name, aside)
            (staged / name).rename(folder / name)
    _sync(folder)
    _sync(aside)
    (staged / COMMIT).unlink()
    shutil.rmtree(staged, ignore_errors=True)
    if not any(aside.iterdir()):
        aside.rmdir()
    return True


def _away(place: Path, aside: Path) -> None:
    if os.path.lexists(place):
        place.rename(aside / place.name)


def _sync(folder: Path) -> None:
    """Put a folder's own entries, and those of the folders in it, on the disk."""
    for root, _, _ in os.walk(folder):
        descriptor = os.open(root, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""Record of syncs and renames: files that a power failure could damage after their rename."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from host import private_files


class SyncLog:
    """Syncs and renames of this process, in their order, from the construction to the end of the test.

    A file is safe if it was synced with its final size before it got its name. A name is safe if its folder was synced
    afterwards.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._synced: dict[tuple[int, int], int] = {}
        self._unsynced: list[Path] = []
        self._changed: list[Path] = []
        self._sync = os.fsync
        patch.setattr(private_files, "FULL_SYNC", None)
        patch.setattr(os, "fsync", self._record_sync)
        for name in ("rename", "replace"):
            patch.setattr(os, name, self._record_rename(getattr(os, name)))

    @property
    def unsynced_content(self) -> list[Path]:
        """Files and folders that got their names before they were synced, by their new names."""
        return self._unsynced

    @property
    def unsynced_folders(self) -> list[Path]:
        """Folders that were not synced after the last rename into them."""
        return self._changed

    def _record_sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self._synced[status.st_dev, status.st_ino] = status.st_size
        self._changed = [folder for folder in self._changed if not os.path.samestat(folder.stat(), status)]
        self._sync(descriptor)

    def _record_rename(self, rename: Callable[..., None]) -> Callable[..., None]:
        def record(source: Any, target: Any) -> None:
            moved, place = Path(source), Path(target)
            for path in (moved, *moved.rglob("*")):
                status = path.lstat()
                size = self._synced.get((status.st_dev, status.st_ino))
                if size is None or (path.is_file() and size != status.st_size):
                    self._unsynced.append(place / path.relative_to(moved))
            rename(source, target)
            self._changed = [*(folder for folder in self._changed if folder != place.parent), place.parent]

        return record

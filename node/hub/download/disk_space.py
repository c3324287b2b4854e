"""Check free disk space for downloads, with a reserve that stays free for the system."""

import shutil
from pathlib import Path

from node.hub.errors import ModelFileError
from wire.frames.model_files import ModelOrderCode
from wire.units import GIB, show_size

RESERVE_BYTES = 5 * GIB
RESERVE_SHARE = 0.05
"""Default reserve: `RESERVE_BYTES`, or this share of the disk if that is less."""


def compute_reserve(total: int, wanted: int) -> int:
    """Return the bytes that stay free on a disk with `total` bytes: `wanted`, or the default if that is negative."""
    return wanted if wanted >= 0 else min(RESERVE_BYTES, int(total * RESERVE_SHARE))


class DiskSpace:
    """Checker for the free space on the disk of a folder.

    `reserve` is the number of bytes that stay free; negative for the default (`compute_reserve`). `user` names the
    consumer of the space in error texts.
    """

    def __init__(self, folder: Path, reserve: int, user: str = "the download") -> None:
        self._folder = folder
        self._reserve = reserve
        self._user = user

    def check(self, needed: int) -> None:
        """Raise `ModelFileError` (`disk_full`) if `needed` more bytes do not fit without using the reserve.

        Raise `OSError` if the free space cannot be read.
        """
        if not self.has_room(needed):
            raise self.build_error(needed)

    def has_room(self, needed: int) -> bool:
        """Return whether `needed` more bytes fit without using the reserve.

        Raise `OSError` if the free space cannot be read.
        """
        usage = shutil.disk_usage(self._folder)
        return usage.free - compute_reserve(usage.total, self._reserve) >= needed

    def build_error(self, needed: int) -> ModelFileError:
        """Return the error `disk_full` with the current numbers, for `needed` more bytes that do not fit.

        Raise `OSError` if the free space cannot be read.
        """
        usage = shutil.disk_usage(self._folder)
        reserve = compute_reserve(usage.total, self._reserve)
        return ModelFileError(
            ModelOrderCode.DISK_FULL,
            f"the disk of {self._folder} has {show_size(usage.free)} free and keeps {show_size(reserve)}, "
            f"and {self._user} needs {show_size(needed)} more: remove files or models",
        )

"""Quota of the disk cache by the free space of the disk, and budget of the bytes that it writes per day.

Writes are limited to a share of the disk per day, because the disks of Macs are soldered in.
"""

import shutil
from pathlib import Path

import structlog

DAILY_DISK_SHARE = 0.07
"""Share of the disk that may be written per day: a disk of 1 TB lasts for 600 of its sizes in 23 years."""
SECONDS_PER_DAY = 86_400.0

log = structlog.get_logger("engine.disk_cache")


class WriteBudget:
    """Budget of written bytes: `daily` bytes per day, of which at most one day is saved up. `now` is monotonic."""

    def __init__(self, daily: float, now: float) -> None:
        self._daily = daily
        self._left = daily
        self._at = now

    def compute_left(self, now: float) -> float:
        """Return the bytes that are left at the monotonic time `now`."""
        return min(self._daily, self._left + (now - self._at) / SECONDS_PER_DAY * self._daily)

    def take(self, size: int, now: float) -> bool:
        """Take `size` bytes from the budget at the monotonic time `now`; return False if they are not left."""
        self._left, self._at = self.compute_left(now), now
        if size > self._left:
            return False
        self._left -= size
        return True


def compute_quota(setting: str | int, folder: Path, used: int) -> int:
    """Return the bytes that the files of the cache may have, of which `used` are there.

    `auto` is half of the space that would be free without the cache, at most a fifth of the disk. A twentieth of the
    disk is always left free. Return 0 if the disk cannot be read.
    """
    try:
        disk = shutil.disk_usage(folder)
    except OSError as error:
        log.warning("disk not readable", folder=str(folder), error=str(error))
        return 0
    most = max(0, disk.free + used - disk.total // 20)
    if isinstance(setting, int):
        return min(setting, most)
    return min(most, (disk.free + used) // 2, disk.total // 5)

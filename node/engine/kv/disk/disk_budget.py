"""Quota of the disk cache by the free space of the disk, budget of written bytes per day, and pauses between writes.

The bytes written per day are limited to a share of the disk, because writes wear out a disk. Disks of Macs cannot be
replaced.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from host.private_files import write_private
from wire.units import MIB

DAILY_DISK_SHARE = 0.07
"""Share of the disk that may be written per day: a disk that endures 600 times its size in writes lasts 23 years."""
SECONDS_PER_DAY = 86_400.0
FILE = "budget.json"
"""Name of the file with the remaining budget, in the folder of the cache."""
STORE_SHARE = 0.01
"""Share of the daily bytes after whose use the remaining budget is stored again."""
BUSY_WRITE_INTERVAL_SECONDS, BUSY_WRITE_SPEED = 1.0, 12 * MIB
"""Interval in seconds and speed in bytes per second of writing while requests run. The pause between two copied parts
is the bytes of a part divided by the speed, at most the interval."""
URGENT_WRITE_INTERVAL_SECONDS, URGENT_WRITE_SPEED = 0.25, 32 * MIB
"""Interval and speed in place of `BUSY_…` while memory has no room for another entry as large as the newest one. The
newest entry then usually reaches the disk before its eviction."""
URGENT_BURST_SECONDS = 0.05
"""Seconds of writing at `URGENT_WRITE_SPEED` for which one call may copy several small parts: about the time between
two calls."""

log = structlog.get_logger("engine.disk_cache")


class WriteBudget:
    """Budget of `daily` written bytes per day. Unused bytes accumulate to at most the bytes of one day.

    `now` is the monotonic time. The remaining budget is stored in `folder` for the next process; None: not stored.
    `wall()` returns Unix seconds.
    """

    def __init__(
        self, daily: float, now: float, folder: Path | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        self._daily = daily
        self._file = None if folder is None else folder / FILE
        self._wall = wall
        self._left = daily if self._file is None else _read_left(self._file, daily, wall())
        self._at = now
        self._unstored = 0

    def compute_left(self, now: float) -> float:
        """Return the bytes that may still be written at the monotonic time `now`."""
        return min(self._daily, self._left + (now - self._at) / SECONDS_PER_DAY * self._daily)

    def take(self, size: int, now: float) -> bool:
        """Take `size` bytes from the budget at the monotonic time `now`. If fewer are left, take nothing and return
        False. The file of the budget is written each time `STORE_SHARE` of the daily bytes has been taken."""
        self._left, self._at = self.compute_left(now), now
        if size > self._left:
            return False
        self._left -= size
        self._unstored += size
        if self._unstored >= STORE_SHARE * self._daily:
            self._store()
        return True

    def _store(self) -> None:
        """Store the remaining budget. A write error is logged."""
        self._unstored = 0
        if self._file is None:
            return
        try:
            write_private(self._file, msgspec.json.encode((self._left, self._wall())))
        except OSError as error:
            log.warning("write budget not stored", file=str(self._file), error=str(error))


def _read_left(file: Path, daily: float, now: float) -> float:
    """Return the bytes that are left of a stored budget at `now` (Unix seconds); `daily` if `file` cannot be read. If
    `now` is before the stored time, no time counts as passed."""
    try:
        left, at = msgspec.json.decode(file.read_bytes(), type=tuple[float, float])
    except (OSError, msgspec.DecodeError):
        return daily
    return min(daily, left + max(0.0, now - at) / SECONDS_PER_DAY * daily)


def compute_quota(setting: str | int, folder: Path, used: int) -> int:
    """Return the maximum bytes of all files of the disk cache in `folder`. `used` is the bytes of its current files.

    `setting` is `disk_cache_size`: bytes or `auto`. `auto` is half of the space that would be free without the cache,
    at most a fifth of the disk. A twentieth of the disk is always left free. Return 0 if the disk cannot be read.
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


def compute_pause_seconds(part_bytes: int, *, urgent: bool) -> float:
    """Return the pause in seconds between the copies of two parts of `part_bytes` bytes while requests run. `urgent`:
    the entry of the parts may soon be evicted from memory."""
    if urgent:
        return min(URGENT_WRITE_INTERVAL_SECONDS, part_bytes / URGENT_WRITE_SPEED)
    return min(BUSY_WRITE_INTERVAL_SECONDS, part_bytes / BUSY_WRITE_SPEED)

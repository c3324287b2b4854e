"""Size and free bytes of a disk, measured outside of the event loop, because a lost network disk blocks its reader."""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

from node.daemon_threads import start_call
from wire.machine import Disk

INTERVAL_SECONDS = 5.0
"""Minimum seconds between two measurements."""
FIRST_SECONDS = 1.0
"""Maximum seconds for which the start of a node waits for the first measurement."""
UNREADABLE_SECONDS = 30.0
"""Seconds after which a disk whose measurement has not ended is reported as unreadable."""


class DiskMeter:
    """Meter of the size and the free bytes of a folder's disk, which never blocks its reader.

    `measure(folder)` may block and runs in a daemon thread; by default `measure_disk`. `clock()` returns monotonic
    seconds. The constructor waits at most `FIRST_SECONDS` for the first measurement. While a measurement blocks, no
    other one begins.
    """

    def __init__(
        self, folder: Path, measure: Callable[[Path], Disk] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._measure = measure or measure_disk
        self._clock = clock
        self._latest = Disk(folder=str(folder))
        self._begun_at = clock()
        self._call = self._begin()
        wait((self._call,), FIRST_SECONDS)

    def read(self) -> Disk:
        """Return the latest measurement without waiting, and start another one if `INTERVAL_SECONDS` have passed.

        The numbers are 0 before the first measurement, and for a disk that is unreadable.
        """
        age = self._clock() - self._begun_at
        if not self._call.done():
            return self._latest if age < UNREADABLE_SECONDS else Disk(folder=str(self._folder))
        self._latest = self._call.result()
        if age >= INTERVAL_SECONDS:
            self._begun_at = self._clock()
            self._call = self._begin()
        return self._latest

    def _begin(self) -> Future[Disk]:
        return start_call(partial(self._measure, self._folder), "disk-meter")


def measure_disk(folder: Path) -> Disk:
    """Return the size and the free bytes of the disk of a folder, which may not exist yet. Both are 0 if unreadable.

    The call blocks while a network disk does not answer.
    """
    existing = next((parent for parent in (folder, *folder.parents) if os.path.exists(parent)), folder)
    try:
        usage = shutil.disk_usage(existing)
    except OSError:
        return Disk(folder=str(folder))
    return Disk(usage.free, usage.total, str(folder))

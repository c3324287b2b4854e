"""The last reserve: memory that this process holds only so that there is something to give up before anything else.

It is random, so that no system compresses it away, and every page of it was written, so that readings count it like
anything else. It is the first to go when something does not fit or a line is crossed, at once and for certain, where
all else that could be given back costs somebody work. It comes back when there has been room for it twice over for
some seconds.

    held ─► give ─► gone ─► looked at while the engine rests ─► roomy for 10 s ─► held
"""

import mmap
import os
from collections.abc import Callable

import structlog

from wire.report import Memory
from wire.units import MIB, parse_size, show_size

AUTO, OFF = "auto", "off"
MOST = 256 * MIB
SHARE = 0.01
"""Of the cap, where that is less than MOST."""
ROOMY = 10.0
"""Seconds for which there must have been room before it is taken."""
LOOK = 1.0
"""Seconds between two looks while there is room."""

log = structlog.get_logger("engine.canary")


def canary_size(setting: str | int, cap: int) -> int:
    """Give the bytes to hold under a cap, from `memory.canary`; 0: none."""
    if setting == AUTO:
        return min(MOST, int(cap * SHARE))
    return 0 if setting == OFF else parse_size(setting)


class Canary:
    """See the module. `memory()` reads now."""

    def __init__(self, setting: str | int, memory: Callable[[], Memory]) -> None:
        self._setting = setting
        self._memory = memory
        self._size = 0
        self._held: mmap.mmap | None = None
        self._roomy_since: float | None = None
        self._look_at = 0.0

    @property
    def held(self) -> mmap.mmap | None:
        """Mapping that holds the reserve; None without a reserve."""
        return self._held

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return 0 if self._held is None else len(self._held)

    def hold(self, cap: int) -> None:
        """Hold what is due under this cap (bytes) from now on; what is too much goes at once."""
        self._size = canary_size(self._setting, cap)
        if self.nbytes > self._size:
            self.give()

    def give(self) -> None:
        """Give it back now."""
        if self._held is None:
            return
        log.info("canary given up", size=show_size(self.nbytes))
        self._held.close()
        self._held, self._roomy_since, self._look_at = None, None, 0.0

    def due(self) -> float | None:
        """Say when to look whether it can be taken; None when it is held, or none is wanted."""
        return None if self._held is not None or not self._size else self._look_at

    def tend(self, now: float) -> None:
        """Take it where there has been room for it for long enough. To be called while the engine rests."""
        due = self.due()
        if due is None or now < due:
            return
        room = self._memory().headroom
        if room is None or room <= 2 * self._size:
            self._roomy_since, self._look_at = None, now + ROOMY
            return
        since = self._roomy_since = now if self._roomy_since is None else self._roomy_since
        self._look_at = now + LOOK
        if now - since >= ROOMY:
            self._take()

    def _take(self) -> None:
        held = mmap.mmap(-1, self._size)
        piece = os.urandom(min(MIB, self._size))
        for start in range(0, self._size, len(piece)):
            held[start : start + len(piece)] = piece[: self._size - start]
        self._held, self._roomy_since = held, None
        log.info("canary held", size=show_size(self._size))

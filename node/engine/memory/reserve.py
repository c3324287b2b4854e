"""Emergency reserve: memory that the engine allocates only to release it when memory is short.

The reserve contains random bytes, which the system cannot compress. Every page is written, so that readings count it.
The reserve is released before caches and models when work does not fit, or when new limits or an order of the agent
require memory. The release is immediate and certain, and discards no work. The engine allocates the reserve again after
some seconds with room for twice its size.

    held ─(release)─► released ─► checked while the engine is idle ─► room for 10 s ─► held
"""

import mmap
import os
from collections.abc import Callable

import structlog

from wire.report import Memory
from wire.units import MIB, parse_size, show_size

AUTO, OFF = "auto", "off"
"""Words of the setting `memory.reserve`."""
MAX_RESERVE_BYTES = 256 * MIB
"""Maximum bytes of the reserve with `auto`."""
RESERVE_CAP_SHARE = 0.01
"""Size of the reserve with `auto`, as a share of the cap; at most `MAX_RESERVE_BYTES`."""
HEADROOM_BEFORE_REFILL_SECONDS = 10.0
"""Seconds for which there must be room for twice the reserve before it is allocated again. Also the seconds between two
checks without room."""
CHECK_INTERVAL_SECONDS = 1.0
"""Seconds between two checks while there is room."""

log = structlog.get_logger("engine.reserve")


def compute_reserve_bytes(setting: str | int, cap: int) -> int:
    """Return the size of the reserve in bytes under a cap (bytes), from the setting `memory.reserve`; 0: no reserve.
    Raise `ValueError` if the setting cannot be parsed."""
    if setting == AUTO:
        return min(MAX_RESERVE_BYTES, int(cap * RESERVE_CAP_SHARE))
    return 0 if setting == OFF else parse_size(setting)


class EmergencyReserve:
    """Emergency reserve of the engine (see the module's docstring).

    `setting` is `memory.reserve`: `auto`, `off` or a size. `memory()` returns a current memory reading.
    """

    def __init__(self, setting: str | int, memory: Callable[[], Memory]) -> None:
        self._setting = setting
        self._memory = memory
        self._size = 0
        self._mapping: mmap.mmap | None = None
        self._fits_since: float | None = None
        self._check_at = 0.0

    @property
    def mapping(self) -> mmap.mmap | None:
        """Memory mapping of the reserve; None while no reserve is held."""
        return self._mapping

    @property
    def nbytes(self) -> int:
        """Size of the held reserve in bytes; 0 while none is held."""
        return 0 if self._mapping is None else len(self._mapping)

    def resize(self, cap: int) -> None:
        """Set the size of the reserve for this cap (bytes). Release a held reserve that is larger.

        Raise `ValueError` if the setting cannot be parsed.
        """
        self._size = compute_reserve_bytes(self._setting, cap)
        if self.nbytes > self._size:
            self.release()

    def release(self) -> None:
        """Release the reserve now, if it is held."""
        if self._mapping is None:
            return
        log.info("reserve released", size=show_size(self.nbytes))
        self._mapping.close()
        self._mapping, self._fits_since, self._check_at = None, None, 0.0

    def find_next_check(self) -> float | None:
        """Return the monotonic time of the next check; None if the reserve is held, switched off or has no size yet."""
        return None if self._mapping is not None or not self._size else self._check_at

    def maintain(self, now: float) -> None:
        """Check the memory if a check is due at the monotonic time `now`. Allocate the reserve if there has been room
        for twice its size for `HEADROOM_BEFORE_REFILL_SECONDS`. Must be called while the engine is idle."""
        due = self.find_next_check()
        if due is None or now < due:
            return
        headroom = self._memory().headroom
        if headroom is None or headroom <= 2 * self._size:
            self._fits_since, self._check_at = None, now + HEADROOM_BEFORE_REFILL_SECONDS
            return
        since = self._fits_since = now if self._fits_since is None else self._fits_since
        self._check_at = now + CHECK_INTERVAL_SECONDS
        if now - since >= HEADROOM_BEFORE_REFILL_SECONDS:
            try:
                self._allocate()
            except OSError as error:  # no memory from the system: the engine works without a reserve
                log.warning("reserve not allocated", size=show_size(self._size), error=str(error))
                self._fits_since, self._check_at = None, now + HEADROOM_BEFORE_REFILL_SECONDS

    def _allocate(self) -> None:
        mapping = mmap.mmap(-1, self._size)
        piece = os.urandom(min(MIB, self._size))
        for start in range(0, self._size, len(piece)):
            mapping[start : start + len(piece)] = piece[: self._size - start]
        self._mapping, self._fits_since = mapping, None
        log.info("reserve allocated", size=show_size(self._size))

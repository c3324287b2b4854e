"""Trailing bytes: bytes that MLX has released and that the footprint still contains, because macOS removes them later.

After Metal buffers are released, `phys_footprint` falls only after 0.25 s to some seconds
(https://github.com/jundot/omlx/issues/1833, https://github.com/ml-explore/mlx/issues/3896). MLX's own counters fall at
once. The difference is the trailing bytes.
"""

from typing import NamedTuple

TRAILING_SECONDS = 4.0
"""Seconds after a release within which the footprint is expected to fall."""
PERIOD_SECONDS = 0.5
"""Length of a period in seconds. Of each period, only the reading with the most MLX memory is kept."""
RETURNED_SHARE = 7 / 8
"""Share of the released bytes that must have left the footprint before all of them count as returned. It is below 1,
because other memory of the process changes at the same time."""


class _Reading(NamedTuple):
    """Reading with the most MLX memory of a period. `at` is the monotonic start of the period in seconds. `counted` is
    MLX's bytes. `other` is the bytes of the footprint that are neither MLX's nor trailing."""

    at: float
    counted: int
    other: int


class TrailingFootprint:
    """Estimator of the trailing bytes of a process, from its readings."""

    def __init__(self) -> None:
        self._readings: list[_Reading] = []
        self._peak = 0

    def update(self, phys: int, counted: int, peak: int, now: float) -> int:
        """Record a reading and return the trailing bytes in it.

        `phys` is the footprint, `counted` MLX's active memory and free buffers, and `peak` MLX's peak since its last
        reset, all in bytes. Only the peak shows memory that a forward takes and frees between two readings. `now` is
        the monotonic time in seconds.
        """
        self._readings = [reading for reading in self._readings if now - reading.at < TRAILING_SECONDS]
        if peak != self._peak and self._readings:
            self._add(_Reading(now, peak, self._readings[-1].other))
        self._peak = peak
        highest = max(self._readings, key=lambda reading: reading.counted, default=None)
        trailing = 0
        if highest is not None and counted < highest.counted:
            released = highest.counted - counted
            trailing = min(released, phys - counted - highest.other)
            if trailing <= released * (1 - RETURNED_SHARE):
                trailing = 0
        self._add(_Reading(now, counted, phys - counted - trailing))
        return trailing

    def _add(self, reading: _Reading) -> None:
        """Add a reading as that of a new period, or in place of a lower one of the same period."""
        last = self._readings[-1] if self._readings else None
        if last is None or reading.at - last.at >= PERIOD_SECONDS:
            self._readings.append(reading)
        elif reading.counted >= last.counted:
            self._readings[-1] = reading._replace(at=last.at)

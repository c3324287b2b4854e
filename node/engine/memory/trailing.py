"""Bytes that MLX has released and the footprint still contains, because macOS takes them out of it later.

After Metal buffers are released, `phys_footprint` stays as it was, and falls within 0.25 s to some seconds
(https://github.com/jundot/omlx/issues/1833, https://github.com/ml-explore/mlx/issues/3896). MLX's own counters fall at
once. The difference between them shows how much is outstanding.
"""

from typing import NamedTuple

TRAILING_SECONDS = 4.0
"""Maximum seconds after a release for which the footprint is expected to fall."""
PERIOD_SECONDS = 0.5
"""Seconds of each period of which only the reading with most MLX memory is kept."""
RETURNED_SHARE = 7 / 8
"""Share of the released bytes from which they count as returned, because other memory of the process changes."""


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

    def update(self, phys: int, counted: int, now: float) -> int:
        """Record a reading and return the trailing bytes in it.

        `phys` is the footprint and `counted` MLX's active memory and free buffers, in bytes. `now` is the monotonic
        time in seconds.
        """
        readings = [reading for reading in self._readings if now - reading.at < TRAILING_SECONDS]
        highest = max(readings, key=lambda reading: reading.counted, default=None)
        trailing = 0
        if highest is not None and counted < highest.counted:
            released = highest.counted - counted
            trailing = min(released, phys - counted - highest.other)
            if trailing <= released * (1 - RETURNED_SHARE):
                trailing = 0
        if not readings or now - readings[-1].at >= PERIOD_SECONDS:
            readings.append(_Reading(now, counted, phys - counted - trailing))
        elif counted >= readings[-1].counted:
            readings[-1] = _Reading(readings[-1].at, counted, phys - counted - trailing)
        self._readings = readings
        return trailing

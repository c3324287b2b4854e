"""Data classes of memory readings, and the recent peak of a process.

An unreadable footprint is None, never 0, because no request may start while the footprint is unknown. Readings are
taken between forwards. The margin and the estimate of a request cover the peak inside a forward
(`wire.capacity.arithmetic`). A reading during a forward would count the peak twice.
"""

from dataclasses import dataclass

RECENT_POLLS = 5
"""Maximum number of periods of `POLL_PERIOD_SECONDS` in the window of `RecentPeak`."""
POLL_PERIOD_SECONDS = 1.0
"""Seconds between polls of an idle engine with a model, and length of the periods of `RecentPeak`.

The enforcer waits one period for the answer to an order.
"""
RECENT_PEAK_SECONDS = RECENT_POLLS * POLL_PERIOD_SECONDS
"""Seconds in the window of `RecentPeak`."""
PHYS_FOOTPRINT = "phys_footprint"
"""Name of the source of readings on macOS: the physical footprint of a process."""
STALE_AFTER_SECONDS = 5.0
"""Maximum age in seconds of a reading that is used."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Reading of the footprint of a process."""

    phys: int | None
    """Footprint in bytes; None if unreadable."""
    source: str
    """Name of the source: `statm` (Linux), `phys_footprint` (macOS), `scripted`, or `no engine` without a process.

    Empty before the first reading.
    """
    at: float
    """Monotonic time of the reading in seconds."""

    def is_live(self, now: float) -> bool:
        """Return whether the reading has a value and is at most `STALE_AFTER_SECONDS` old.

        `now` is in monotonic seconds.
        """
        return self.phys is not None and now - self.at <= STALE_AFTER_SECONDS


@dataclass(slots=True)
class LastGood:
    """Last good value of a reading that can fail. It replaces failed readings for `STALE_AFTER_SECONDS`."""

    value: int | None = None
    """Last good value; None before the first."""
    at: float = 0.0
    """Time of `value` in monotonic seconds."""

    def update(self, value: int | None, now: float) -> int | None:
        """Store and return `value`. If `value` is None, return the last good value instead.

        Return None if there is no last good value, or if it is older than `STALE_AFTER_SECONDS` at `now` (monotonic
        seconds).
        """
        if value is not None:
            self.value, self.at = value, now
        return self.value if now - self.at <= STALE_AFTER_SECONDS else None


@dataclass(frozen=True, slots=True)
class HighWaterMarks:
    """High-water marks of a process's footprint in bytes, measured by the kernel; None if unknown.

    The marks include the transients of forwards. They serve to calibrate margin and estimates, and do not count as
    memory in use (`wire.capacity.arithmetic.compute_current`).
    """

    lifetime: int | None = None
    """Maximum since the start of the process."""
    interval: int | None = None
    """Maximum since the last reset (`Sensor.begin_interval`)."""


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Reading of the memory that the system has available."""

    available: int | None
    """Bytes that can be allocated without displacing other programs; None if unknown."""
    pressure: str
    """Memory pressure: `normal`, `warn` or `critical`; empty if unknown."""
    source: str
    """Name of the source: `psutil`, or `pretended` for a simulated machine."""
    at: float
    """Monotonic time of the reading in seconds."""


@dataclass(frozen=True, slots=True)
class RecentPeak:
    """Recent peak of a process: the highest reading of each of the last periods of `POLL_PERIOD_SECONDS`.

    `polls` are pairs of a period's start (monotonic seconds) and its highest reading (bytes), newest last. A period
    expires `RECENT_PEAK_SECONDS` after its start, so that an old peak expires even without new readings.
    """

    polls: tuple[tuple[float, int], ...] = ()

    def with_reading(self, phys: int, now: float) -> "RecentPeak":
        """Return the recent peak with a further reading of `phys` bytes at `now`, without expired periods."""
        polls = self._list_polls_within(now)
        if polls and now - polls[-1][0] < POLL_PERIOD_SECONDS:
            start, height = polls[-1]
            return RecentPeak((*polls[:-1], (start, max(height, phys))))
        return RecentPeak((*polls, (now, phys))[-RECENT_POLLS:])

    def find_highest(self, now: float) -> int:
        """Return the highest reading in the window that ends at `now`, in bytes; 0 without readings."""
        return max((height for _, height in self._list_polls_within(now)), default=0)

    def compute_peak_expiry(self, floor: int, now: float) -> float | None:
        """Return the monotonic time at which the highest reading expires.

        Return None if no reading is above `floor` bytes.
        """
        polls = self._list_polls_within(now)
        top = max((height for _, height in polls), default=None)
        if top is None or top <= floor:
            return None
        return max(start for start, height in polls if height == top) + RECENT_PEAK_SECONDS

    def _list_polls_within(self, now: float) -> tuple[tuple[float, int], ...]:
        return tuple(poll for poll in self.polls if now - poll[0] < RECENT_PEAK_SECONDS)

"""One reading of a process's footprint, and the highest of the last polls.

A footprint that cannot be read is None, never 0: unknown means that nothing more is started. Readings are taken
between forwards; the peak inside a forward belongs to margin and estimate (wire/verdict) and never gets in here, or
it would be counted twice.
"""

from dataclasses import dataclass

POLLS = 5
"""Polls that `recent` looks back (seed of the project: a deque of five)."""
PERIOD = 1.0
"""Seconds of one poll; readings within it are one poll, of which the highest counts."""
WINDOW = POLLS * PERIOD
"""Seconds that `recent` looks back."""
STALE = 5.0
"""Seconds after which a reading says nothing about now."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the kernel charges a process: bytes (None: unreadable), the name of the source, the time it was taken."""

    phys: int | None
    source: str
    at: float

    def live(self, now: float) -> bool:
        """Whether this was readable, and not too long ago to judge by."""
        return self.phys is not None and now - self.at <= STALE


@dataclass(slots=True)
class LastGood:
    """The last value of a reading that fails now and then."""

    value: int | None = None
    at: float = 0.0

    def take(self, value: int | None, now: float) -> int | None:
        """Return the value, or where it could not be read (None) the last good one for STALE seconds, then None."""
        if value is not None:
            self.value, self.at = value, now
        return self.value if now - self.at <= STALE else None


@dataclass(frozen=True, slots=True)
class Highs:
    """The kernel's high-water marks of a process in bytes, None where they are not told: ever, and since the last
    reset. They contain the spikes inside forwards, so they calibrate margin and estimate and are in no `current`."""

    lifetime: int | None = None
    interval: int | None = None


@dataclass(frozen=True, slots=True)
class Spare:
    """What the system has left: bytes to be had without pushing anyone out, its own word for its pressure ("" is not
    told), the name of the source, the time it was taken."""

    available: int | None
    pressure: str
    source: str
    at: float


@dataclass(frozen=True, slots=True)
class Recent:
    """The highest reading of each of the last polls, newest last: `(start of the poll, bytes)`.

    It decays by time alone, so a process that nobody polls while it rests does not keep an old height.
    """

    polls: tuple[tuple[float, int], ...] = ()

    def observed(self, phys: int, now: float) -> "Recent":
        """Give the window with one more reading in it."""
        polls = self._within(now)
        if polls and now - polls[-1][0] < PERIOD:
            start, height = polls[-1]
            return Recent((*polls[:-1], (start, max(height, phys))))
        return Recent((*polls, (now, phys))[-POLLS:])

    def highest(self, now: float) -> int:
        """Give the highest reading within the window in bytes, 0 when there is none."""
        return max((height for _, height in self._within(now)), default=0)

    def falls_at(self, floor: int, now: float) -> float | None:
        """Say when `highest` next falls, if it is still above `floor` bytes; None when it is not."""
        polls = self._within(now)
        top = max((height for _, height in polls), default=0)
        if top <= floor:
            return None
        return max(start for start, height in polls if height == top) + WINDOW

    def _within(self, now: float) -> tuple[tuple[float, int], ...]:
        return tuple(poll for poll in self.polls if now - poll[0] < WINDOW)

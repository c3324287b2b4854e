"""Sensors whose readings fail by script or fall late, over real ones, and a monotonic clock that can be set forward."""

import time

from node.memory.reading import PHYS_FOOTPRINT, HighWaterMarks
from node.memory.sensor import FootprintSource, Sensor


class FailingSource:
    """A source with the readings of `below`, and without readings while `fails` is set."""

    def __init__(self, below: FootprintSource, *, fails: bool = False) -> None:
        self._below = below
        self.source = below.source
        self.fails = fails

    def read_footprint(self) -> int | None:
        """Return the reading, or None while `fails` is set."""
        return None if self.fails else self._below.read_footprint()

    def read_high_water_marks(self) -> HighWaterMarks:
        """Return the marks, empty while `fails` is set."""
        return HighWaterMarks() if self.fails else self._below.read_high_water_marks()

    def begin_interval(self) -> bool:
        """Start the interval's mark again."""
        return self._below.begin_interval()

    def close(self) -> None:
        """Close the source below."""
        self._below.close()


def failing(sensor: Sensor) -> FailingSource:
    """Insert a source that can fail between a sensor and its source."""
    made = FailingSource(sensor.source)
    sensor.source = made
    return made


class TrailingSource(FailingSource):
    """A source whose readings fall later than those of `below`, as the footprint does on macOS. A lower reading is
    returned only `seconds` after it was first seen."""

    def __init__(self, below: FootprintSource, seconds: float) -> None:
        super().__init__(below)
        self.source = PHYS_FOOTPRINT
        self._seconds = seconds
        self._held = 0
        self._falls_at: float | None = None

    def read_footprint(self) -> int | None:
        """Return the reading below, or the former one for a while if that was higher."""
        now, phys = time.monotonic(), super().read_footprint()
        if phys is None:
            return None
        if phys < self._held and self._falls_at is None:
            self._falls_at = now + self._seconds
        if phys >= self._held or (self._falls_at is not None and now >= self._falls_at):
            self._held, self._falls_at = phys, None
        return self._held


def trailing(sensor: Sensor, seconds: float) -> TrailingSource:
    """Delay the fall of the readings of a sensor by `seconds`."""
    made = TrailingSource(sensor.source, seconds)
    sensor.source = made
    return made


class Later:
    """A monotonic clock that is `by` seconds ahead of the real one, and `leap` seconds further after each call."""

    def __init__(self) -> None:
        self._monotonic, self.by, self.leap = time.monotonic, 0.0, 0.0

    def __call__(self) -> float:
        self.by += self.leap
        return self._monotonic() + self.by

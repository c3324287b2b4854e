"""Detect wired memory that ended processes leave behind. Pure.

The kernel can keep the memory of a killed process wired until the Mac restarts (oMLX#2184: 414 GiB after a kill, 5 GiB
after an orderly end). Counters of the process cannot show the leak: `ri_wired_size` does not include Metal's residency
sets (llama.cpp#26082), and the process has ended. This module compares two bounds from the counter of the system:

    after − before     wired now and not wired before the start of the process
    weights − fall     wired by the process at most, minus the memory unwired at its end

The lower value is the leak. The second value excludes memory that other programs wired meanwhile, because a busy engine
unwires all of its weights at an orderly end. An idle engine may have had no wired memory. Then `fall` is 0, and memory
that another program wired can look like a leak. Leaked memory never returns. Memory that returns later was therefore
not leaked (`WiredLeaks.update`).
"""

from dataclasses import dataclass

from wire.units import GIB, show_size

LEAK_SHARE = 0.5
"""Share of the weights up to which wired memory is not a leak, because other programs wire memory as well.

Leaks are reset when less than this share of their bytes is still wired.
"""
MIN_LEAK_BYTES = GIB
"""Bytes up to which wired memory is not a leak, because other programs wire memory as well."""


@dataclass(slots=True)
class WiredReadings:
    """Wired bytes of the system before and during the lifetime of a process, to detect a leak at its end."""

    before: int | None
    """Wired bytes before the start of the process; None if unreadable."""
    last: int | None = None
    """Wired bytes at the last reading during its lifetime; None if unreadable."""
    weights: int = 0
    """Highest bytes of weights that the process has held."""

    def observe(self, wired: int | None) -> None:
        """Record a reading of the system during the lifetime of the process, in bytes; None if unreadable."""
        self.last = wired

    def observe_weights(self, weights: int) -> None:
        """Record the bytes of weights that the process holds now."""
        self.weights = max(self.weights, weights)

    def compute_leaked_bytes(self, after: int | None) -> int:
        """Return the wired bytes that the ended process leaked; 0 for no leak, or if a reading is missing.

        At most `MIN_LEAK_BYTES`, or `LEAK_SHARE` of the weights, do not count as a leak. `after` is a reading of the
        system after the end, in bytes; None if unreadable.
        """
        if self.before is None or after is None:
            return 0
        fall = 0 if self.last is None else max(0, self.last - after)
        missing = min(after - self.before, self.weights - fall)
        return missing if missing > max(MIN_LEAK_BYTES, LEAK_SHARE * self.weights) else 0


@dataclass(slots=True)
class WiredLeaks:
    """Count and sum of the leaks of ended processes."""

    count: int = 0
    """Number of processes that leaked."""
    missing: int = 0
    """Leaked bytes in total."""
    first: int = 0
    """Wired bytes of the system before the start of the first process with a leak."""
    before: int = 0
    """Wired bytes of the system before the start of the last process with a leak."""
    after: int = 0
    """Wired bytes of the system after the end of the last process with a leak."""

    def add(self, wired: WiredReadings, after: int | None) -> int:
        """Record the leak of an ended process. Return its bytes (`WiredReadings.compute_leaked_bytes`); 0 for no leak.

        `after` is a reading of the system after the end, in bytes; None if unreadable.
        """
        missing = wired.compute_leaked_bytes(after)
        if missing and wired.before is not None and after is not None:
            self.first = self.first if self.count else wired.before
            self.count, self.missing = self.count + 1, self.missing + missing
            self.before, self.after = wired.before, after
        return missing

    def update(self, wired: int | None) -> None:
        """Reset the leaks if more than half of the leaked memory has returned.

        `wired` are the wired bytes of the system now; None if unreadable.
        """
        if wired is not None and wired < self.first + LEAK_SHARE * self.missing:
            self.count = self.missing = 0

    def describe_leak(self) -> str:
        """Return a warning with the numbers and the remedy; empty without a leak."""
        if not self.count:
            return ""
        return (
            f"{show_size(self.missing)} of ended engines stayed wired (this Mac had {show_size(self.before)} wired "
            f"before the last one started and has {show_size(self.after)} now): restart this Mac to free the memory"
        )

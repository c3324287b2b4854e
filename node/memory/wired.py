"""Whether a process that ended gave its wired memory back. Pure.

A process with a large wired model that is killed can leave the memory wired in the kernel until the Mac restarts
(oMLX#2184: 414 GiB after a kill, 5 GiB after an orderly end). Nothing says so of a process: `ri_wired_size` does not
count Metal's residency sets (llama.cpp#26082), and the process is gone. So the system's own count is compared:

    after − before     what is wired now and was not before it started
    weights − fall     what it may have wired, less what was unwired at its end

The lower of the two is missing. The second keeps apart what other programs have wired meanwhile: an engine that was at
work falls by all of its weights at an orderly end. An engine at rest may have had nothing wired any more; then the
first alone judges, and another program that wired as much may be taken for a leak. Memory that is lost does not come
back: so what does, because that program ended, disproves it (`Leaks.look`).
"""

from dataclasses import dataclass

from wire.units import GIB, show_size

SHARE = 0.5
LEAST = GIB
"""A leak is more than so much of the weights, and more than so many bytes: other programs wire memory, too."""


@dataclass(slots=True)
class Wired:
    """The system's wired bytes `before` a process started and when they were `last` read while it lived (None: they
    cannot be read), and the most bytes of weights that it had at once."""

    before: int | None
    last: int | None = None
    weights: int = 0

    def missing(self, after: int | None) -> int:
        """Return the bytes that did not come back, by a reading after the end; 0 where that is little or unknown."""
        if self.before is None or after is None:
            return 0
        fall = 0 if self.last is None else max(0, self.last - after)
        missing = min(after - self.before, self.weights - fall)
        return missing if missing > max(LEAST, SHARE * self.weights) else 0


@dataclass(slots=True)
class Leaks:
    """What ended processes left wired: how often, how many bytes, and what was wired before the first and last."""

    count: int = 0
    missing: int = 0
    first: int = 0
    before: int = 0
    after: int = 0

    def add(self, wired: Wired, after: int | None) -> int:
        """Record what did not come back after an end, if that is more than little; return its bytes."""
        missing = wired.missing(after)
        if missing and wired.before is not None and after is not None:
            self.first = self.first if self.count else wired.before
            self.count, self.missing = self.count + 1, self.missing + missing
            self.before, self.after = wired.before, after
        return missing

    def look(self, wired: int | None) -> None:
        """Forget all of it once a reading shows that most came back."""
        if wired is not None and wired < self.first + SHARE * self.missing:
            self.count = self.missing = 0

    def warning(self) -> str:
        """Return what to do about it, with the numbers; empty where nothing is missing."""
        if not self.count:
            return ""
        return (
            f"{show_size(self.missing)} of ended engines stayed wired (this Mac had {show_size(self.before)} wired "
            f"before the last one started and has {show_size(self.after)} now): restart this Mac to get the memory back"
        )

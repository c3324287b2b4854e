"""Leak detection: check that the memory of unloaded models was returned. Pure.

A process does not always return freed memory to the system. An allocator keeps a page for one live byte on it, a
library keeps a cache, or a reference was forgotten. Only a new process frees this memory. When no model is left in
memory, the footprint is therefore compared with the footprint before the first load. Unreturned bytes are reported, and
`node.engine_process.lifecycle` decides whether the agent replaces the process.

    unloaded ─(last model, SETTLE_SECONDS)─► compare: footprint − base ─► returned, or unreturned until the next load
"""

from dataclasses import dataclass

from wire.units import MIB

SETTLE_SECONDS = 1.0
"""Seconds from an unload or an aborted load to the comparison, because some memory is returned with a delay."""
TOLERATED_BYTES = 64 * MIB
"""Bytes not returned that are always tolerated."""
TOLERATED_SHARE = 0.1
"""Share of the bytes of released weights, 0 to 1, that need not be returned, because tokenizers and compiled kernels
stay in memory. `TOLERATED_BYTES` applies if it is more."""


@dataclass(slots=True, eq=False)
class LeakCheck:
    """State of leak detection: the weights released since the last comparison of footprints, and its result."""

    weights: int = 0
    """Bytes of weights released since the last comparison, by unloads and aborted loads."""
    next_check_at: float | None = None
    """Monotonic time of the next comparison in seconds; None: none is scheduled."""
    unreturned: int = 0
    """Bytes that had not been returned at the last comparison; 0 if they were tolerated, before the first comparison,
    or after a load."""

    def on_unload(self, weights: int, now: float) -> None:
        """Record that `weights` bytes of a model were released, by an unload or an aborted load, and schedule a
        comparison. `now` is the monotonic time."""
        self.weights += weights
        self.next_check_at = now + SETTLE_SECONDS

    def on_load(self) -> None:
        """Cancel the comparison and clear `unreturned`, because a model was loaded, and new weights and leaked memory
        look alike."""
        self.next_check_at, self.unreturned = None, 0

    def check(self, phys: int | None, base: int) -> int:
        """Compare `phys`, the footprint of an engine without models, with `base`, the footprint before the first load.
        Set `unreturned`, and clear `next_check_at` and `weights`.

        Both are in bytes; `phys` is None if the footprint cannot be read. Return the bytes that were not returned to
        the system; 0 if they are tolerated or `phys` is None.
        """
        missing = 0 if phys is None else phys - base
        self.unreturned = missing if missing > max(TOLERATED_BYTES, TOLERATED_SHARE * self.weights) else 0
        self.next_check_at, self.weights = None, 0
        return self.unreturned

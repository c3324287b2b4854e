"""Whether the memory of unloaded models is really back. Pure.

A process does not always give back what it was given: an allocator keeps a page for one live byte on it, a library
keeps a cache, a reference was forgotten. Nothing but a new process helps against that. So once the last model is gone,
the footprint is compared with what it was before the first: what is missing then is told, and the agent, which alone
can, puts a new process in this one's place (`node.engine_process.supervisor`).

    gone ─(last model, SETTLES)─► look: the footprint − base ─► back, or unreturned until a model comes
"""

from dataclasses import dataclass

from wire.units import MIB

SETTLES = 1.0
"""Seconds from an unload to the look: some memory is given back behind the scenes."""
LEAST = 64 * MIB
SHARE = 0.1
"""Of the weights that went: with this, or LEAST if it is more, an engine may have grown for good. Tokenizers stay, and
compiled kernels."""


@dataclass(slots=True, eq=False)
class Returns:
    """`weights` are the bytes that went since the engine was last without a model, `at` is when to look (None: there
    is nothing to look for), `unreturned` the bytes that were missed at the last look."""

    weights: int = 0
    at: float | None = None
    unreturned: int = 0

    def gone(self, weights: int, now: float) -> None:
        """Take in that a model went."""
        self.weights += weights
        self.at = now + SETTLES

    def came(self) -> None:
        """Take in that a model came: what it takes cannot be told from what was not given back."""
        self.at, self.unreturned = None, 0

    def look(self, phys: int | None, base: int) -> int:
        """Compare the footprint of an engine without models with what it was before the first; None: unreadable. Give
        the bytes that are missing, 0 where that is little."""
        missing = 0 if phys is None else phys - base
        self.unreturned = missing if missing > max(LEAST, SHARE * self.weights) else 0
        self.at, self.weights = None, 0
        return self.unreturned

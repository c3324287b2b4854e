"""Distributions as counts of buckets, and what a node measures of its gate beyond what its report says.

A histogram's bounds are closed upwards (`value <= bound`), as Prometheus has them, with one bucket more for what is
above the last. The bounds of what crosses the wire stand here, because both ends must mean the same.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from wire.bounds import MAX_ITEMS, Natural, Real, Seconds, Size, Word
from wire.report import Part
from wire.units import MIB

PREDICTED_BOUNDS = (0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.25)
"""Predicted peak / ceiling: caps differ from Mac to Mac, shares do not. Fine where it is decided."""
TRANSIENT_BOUNDS = tuple(float(size * MIB) for size in (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))
"""Bytes that a prefill or a join took for a moment."""


class Tally(Part, frozen=True, array_like=True, gc=False):
    """A histogram at one moment: how many values fell into each bucket, and their sum."""

    counts: Annotated[tuple[Natural, ...], Meta(max_length=MAX_ITEMS)] = ()
    total: Real = 0.0


class GateMeasures(Part, frozen=True, array_like=True, gc=False):
    """What the gate did since its engine started: checks by site, refusals by code, the peaks that it predicted as
    shares of the ceiling, and by how many bytes MLX rose in the prefills and joins that followed."""

    checks: Annotated[tuple[tuple[Word, Natural], ...], Meta(max_length=MAX_ITEMS)] = ()
    refusals: Annotated[tuple[tuple[Word, Natural], ...], Meta(max_length=MAX_ITEMS)] = ()
    predicted: Tally = Tally()
    transient: Tally = Tally()


class NodeMeasures(Part, frozen=True, array_like=True, gc=False):
    """A node's answer to `Ask("metrics")`: its engine's gate, and the agent's own process (CPU in seconds since its
    start, footprint in bytes)."""

    gate: GateMeasures = GateMeasures()
    agent_cpu: Seconds = 0.0
    agent_phys: Size = 0


class Buckets:
    """A histogram that counts. One owner, one thread."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, so many times. Costs a quarter of a microsecond."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def tally(self) -> Tally:
        """Give what was counted up to now."""
        return Tally(tuple(self.counts), self.total)

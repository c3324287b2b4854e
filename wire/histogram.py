"""Histograms, and the measurements of a node that its report does not contain.

Bounds are inclusive (`value <= bound`), as in Prometheus; one more bucket counts values above the last bound. Bounds
of histograms that nodes send are defined here because both sides must use the same.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from wire.bounds import MAX_ITEMS, Natural, Real, Seconds, Size, Word
from wire.report import WireStruct
from wire.units import MIB

PREDICTED_BOUNDS = (0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.25)
"""Bounds of predicted peak divided by ceiling. Caps differ between Macs, ratios do not; bounds are dense near 1."""
TRANSIENT_BOUNDS = tuple(float(size * MIB) for size in (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))
"""Bounds of the transient bytes of a prefill or a join."""


class HistogramSnapshot(WireStruct, frozen=True, array_like=True, gc=False):
    """State of a histogram, as a node sends it.

    `counts` has one value per bucket, not cumulative; the last bucket has the values above all bounds. `total` is the
    sum of all values.
    """

    counts: Annotated[tuple[Natural, ...], Meta(max_length=MAX_ITEMS)] = ()
    total: Real = 0.0


class GateMeasures(WireStruct, frozen=True, array_like=True, gc=False):
    """Counts and histograms of a memory gate since its engine started."""

    checks: Annotated[tuple[tuple[Word, Natural], ...], Meta(max_length=MAX_ITEMS)] = ()
    """Number of checks by the gate, by the place in the engine that requested them."""
    refusals: Annotated[tuple[tuple[Word, Natural], ...], Meta(max_length=MAX_ITEMS)] = ()
    """Number of refusals by the gate, by `RefusalCode`."""
    predicted: HistogramSnapshot = HistogramSnapshot()
    """Histogram of predicted peaks, each divided by the ceiling at the check."""
    transient: HistogramSnapshot = HistogramSnapshot()
    """Histogram of the bytes by which MLX's active memory rose during prefills and joins."""


class NodeMeasures(WireStruct, frozen=True, array_like=True, gc=False):
    """Answer of a node to `FetchRequest("metrics")`."""

    gate: GateMeasures = GateMeasures()
    agent_cpu: Seconds = 0.0
    """CPU seconds of the agent's process since its start."""
    agent_phys: Size = 0
    """Footprint of the agent's process in bytes; 0 if unreadable."""


class Histogram:
    """Histogram that counts values in buckets. Not thread-safe.

    `bounds` are the inclusive upper bounds of the buckets, ascending. `counts` has one value per bucket, not
    cumulative, and a last one for the values above all bounds. `total` is the sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def tally(self) -> HistogramSnapshot:
        """Return a snapshot of the counts and of the total, for a frame."""
        return HistogramSnapshot(tuple(self.counts), self.total)

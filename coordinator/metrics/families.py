"""Metric families: name, meaning, and a function that reads the series from a snapshot.

Invariants
- A label value is from a closed set, a name (of a member, model, upstream or valid API key), or a version.
  A text that a node sends is limited by `labels`.
- At most `MAX_MODELS_PER_NODE` models of a node have series.
- No request, no id or secret of a key, no address and no error text is ever a label.
- A value that is not finite is omitted: a node with invalid values loses its own series, never the scrape.
- All series of one scrape come from one snapshot, because sums and differences over them must be consistent.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from wire.histogram import Histogram, HistogramSnapshot

PREFIX = "macpool_"
MAX_MODELS_PER_NODE = 32
"""Maximum models of a node that get their own series until the coordinator restarts.

Also the maximum models in `cluster_model_fingerprints`.
"""
OTHER = "other"
"""Label value for every value outside a closed set."""

P = TypeVar("P")


class MetricKind(StrEnum):
    """Metric types of Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class HistogramValue(NamedTuple):
    """Value of a histogram: the upper bounds of its buckets without the infinite one, and a tally.

    The tally has the count of each bucket, not cumulative, and the sum of all values.
    """

    bounds: Sequence[float]
    tally: HistogramSnapshot


Value = float | HistogramValue
Row = tuple[tuple[str, ...], Value]
"""One series: the values of its labels in order, and its value."""


@dataclass(frozen=True, slots=True)
class MetricFamily(Generic[P]):
    """Metric family whose series are read from a snapshot of type `P`."""

    name: str
    """Name without the prefix `PREFIX` and without `_total`."""
    kind: MetricKind
    meaning: str
    """Help text in the exposition format and in the manual."""
    read: Callable[[P], Iterable[Row]]
    """Function that returns the series of a snapshot."""
    labels: tuple[tuple[str, str], ...] = ()
    """Name and description of each label."""
    when: str = ""
    """Condition under which the family has a series, for the manual; empty for always."""

    @property
    def full_name(self) -> str:
        """Name with prefix and `_total`, as in the exposition format and in queries."""
        return PREFIX + self.name + ("_total" if self.kind is MetricKind.COUNTER else "")

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels, in order."""
        return tuple(name for name, _ in self.labels)


class CollectedFamily(NamedTuple, Generic[P]):
    """Metric family with its series at one moment."""

    family: MetricFamily[P]
    rows: list[Row]


def collect_families(families: Iterable[MetricFamily[P]], snapshot: P) -> list[CollectedFamily[P]]:
    """Return each family with its series in one snapshot. Omit values that are not finite."""
    return [
        CollectedFamily(family, [row for row in family.read(snapshot) if _is_finite(row[1])]) for family in families
    ]


def _is_finite(value: Value) -> bool:
    return math.isfinite(value.tally.total) if isinstance(value, HistogramValue) else math.isfinite(value)


def to_histogram_value(buckets: Histogram) -> HistogramValue:
    """Return the current counts of a histogram as a metric value."""
    return HistogramValue(buckets.bounds, buckets.tally())


def build_single_row(value: float | HistogramValue | None) -> list[Row]:
    """Return the row of a family without labels; an empty list if `value` is None."""
    return [] if value is None else [((), value)]


def create_gauge(name: str, meaning: str, read: Callable[[P], float | None], when: str = "") -> MetricFamily[P]:
    """Return a gauge without labels, which has no series while `read` returns None. `when` is `MetricFamily.when`."""
    return MetricFamily(name, MetricKind.GAUGE, meaning, lambda snapshot: build_single_row(read(snapshot)), when=when)


def create_counter(name: str, meaning: str, read: Callable[[P], float | None]) -> MetricFamily[P]:
    """Return a counter without labels, which has no series while `read` returns None."""
    return MetricFamily(name, MetricKind.COUNTER, meaning, lambda snapshot: build_single_row(read(snapshot)))


def join_quoted(values: Iterable[str]) -> str:
    """Return label values as one text for the manual: each in backquotes, separated by commas."""
    return ", ".join(f"`{value}`" for value in values)


def limit_to_known(value: str, known: Collection[str]) -> str:
    """Return a label value, or `OTHER` if the value is not in the closed set `known`."""
    return value if value in known else OTHER


def build_state_row(present: str, known: Collection[str]) -> list[Row]:
    """Return the row of a state metric: 1 for the state `present`, or for `OTHER` if it is not in `known`."""
    return [((limit_to_known(present, known),), 1.0)]

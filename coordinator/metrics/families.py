"""What a metric family is: a name, its meaning, and how its series are read from a picture of one moment.

Rules that nobody may break
- Every label value is from a closed set, or the name of a member, of an API key in force, or of a model that some
  member has, and of models at most MOST_MODELS. No request, id or secret of a key, address or text of an error is ever
  a label.
- A value that is not finite is left out: a lying node costs its own series, never the scrape.
- All series of one scrape are read from one picture, so that sums and differences over them mean something.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from wire.histogram import Buckets, Tally

PREFIX = "macpool_"
MOST_MODELS = 32
"""Most models of a node with their own series over the coordinator's run."""
OTHER = "other"
"""Label value for every value outside a closed set."""

P = TypeVar("P")


class Kind(StrEnum):
    """Prometheus' types."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Histogram(NamedTuple):
    """Value of a histogram: bounds without the infinite one, and the counts."""

    bounds: Sequence[float]
    tally: Tally


Value = float | Histogram
Row = tuple[tuple[str, ...], Value]


@dataclass(frozen=True, slots=True)
class Family(Generic[P]):
    """One family over pictures `P`. `name` is without prefix and `_total`; `labels` names each label and says what it
    holds; `when` says when there is a series, if not always."""

    name: str
    kind: Kind
    meaning: str
    read: Callable[[P], Iterable[Row]]
    labels: tuple[tuple[str, str], ...] = ()
    when: str = ""

    @property
    def full_name(self) -> str:
        """The name as it is scraped and asked for."""
        return PREFIX + self.name + ("_total" if self.kind is Kind.COUNTER else "")

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels' names."""
        return tuple(name for name, _ in self.labels)


class Collected(NamedTuple, Generic[P]):
    """A family with its series at one moment."""

    family: Family[P]
    rows: list[Row]


def collect(families: Iterable[Family[P]], picture: P) -> list[Collected[P]]:
    """Read every family of one picture, without what cannot be told."""
    return [Collected(one, [row for row in one.read(picture) if _tellable(row[1])]) for one in families]


def _tellable(value: Value) -> bool:
    return math.isfinite(value.tally.total) if isinstance(value, Histogram) else math.isfinite(value)


def histogram(buckets: Buckets) -> Histogram:
    """Give what a histogram has counted up to now."""
    return Histogram(buckets.bounds, buckets.tally())


def one(value: float | Histogram | None) -> list[Row]:
    """Give the series of a family without labels; none for what is not known."""
    return [] if value is None else [((), value)]


def closed(value: str, known: Collection[str]) -> str:
    """Give a label's value, OTHER where it is none of those that are known."""
    return value if value in known else OTHER


def state(present: str, known: Collection[str]) -> list[Row]:
    """Give the series of the state that something is in."""
    return [((closed(present, known),), 1.0)]

"""Rendering of collected families in the formats of Prometheus, with prometheus-client."""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from coordinator.metrics.families import PREFIX, CollectedFamily, HistogramValue, MetricKind

MAX_LABEL_CHARS = 200
"""Maximum characters of a label value. A longer value is truncated."""


class SnapshotCollector(Collector):
    """Collector for prometheus-client with families that were collected before."""

    def __init__(self, collected: Iterable[CollectedFamily[Any]]) -> None:
        self._collected = collected

    def collect(self) -> Iterator[Metric]:
        """Yield the families as metrics of prometheus-client."""
        return (_to_metric(collector) for collector in self._collected)

    def describe(self) -> list[Metric]:
        """Return an empty list, because the families are unknown before a scrape."""
        return []


def render_metrics(collected: Iterable[CollectedFamily[Any]], accept: str) -> tuple[bytes, str]:
    """Render metrics in the format that an Accept header requests. Return the bytes and their content type.

    A header whose version is not a number is treated as empty.
    """
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(collected))
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # it compares parts of the version with numbers
        encode, content_type = choose_encoder("")
    return encode(registry), content_type


def _to_metric(collected: CollectedFamily[Any]) -> Metric:
    family, labels = collected.family, collected.family.label_names
    name, meaning = PREFIX + family.name, family.meaning
    if family.kind is MetricKind.HISTOGRAM:
        metric = HistogramMetricFamily(name, meaning, labels=labels)
        for values, value in collected.rows:
            assert isinstance(value, HistogramValue)  # noqa: S101  its kind says so
            metric.add_metric(_truncate_labels(values), *_accumulate_buckets(value))
        return metric
    kind = CounterMetricFamily if family.kind is MetricKind.COUNTER else GaugeMetricFamily
    metric = kind(name, meaning, labels=labels)
    for values, value in collected.rows:
        assert not isinstance(value, HistogramValue)  # noqa: S101  its kind says so
        metric.add_metric(_truncate_labels(values), float(value))
    return metric


def _truncate_labels(values: Iterable[str]) -> list[str]:
    """Limit the length of label values. prometheus-client escapes quotes and line ends."""
    return [value[:MAX_LABEL_CHARS] for value in values]


def _accumulate_buckets(value: HistogramValue) -> tuple[list[tuple[str, float]], float]:
    counts = list(accumulate(value.tally.counts))
    bounds = [*(_format_bound(bound) for bound in value.bounds), "+Inf"]
    return list(zip(bounds, map(float, counts), strict=True)), value.tally.total


def _format_bound(bound: float) -> str:
    return repr(float(bound))

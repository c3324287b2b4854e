"""Text of a scrape: its format, long labels, and buckets of histograms."""

import pytest

from coordinator.metrics.exposition import MAX_LABEL_CHARS, render_metrics
from coordinator.metrics.families import CollectedFamily, HistogramValue, MetricFamily, MetricKind
from wire.histogram import HistogramSnapshot

PLAIN, OPEN = "text/plain; version=0.0.4", "application/openmetrics-text; version=1.0.0"


def collect(kind: MetricKind, *rows: tuple[tuple[str, ...], float | HistogramValue]) -> CollectedFamily[None]:
    labels = (("model", "a name"),) if rows[0][0] else ()
    return CollectedFamily(MetricFamily("things", kind, "Things.", lambda _: list(rows), labels), list(rows))


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", PLAIN),
        ("text/plain", PLAIN),
        ("application/openmetrics-text; version=1.0.0", OPEN),
        ("application/openmetrics-text; version=x.y", PLAIN),
        ("text/plain; version=1.x", PLAIN),
    ],
)
def test_the_format_is_the_accepted_one_and_plain_text_for_an_unusable_header(accept: str, content_type: str):
    text, chosen = render_metrics([collect(MetricKind.GAUGE, ((), 1.5))], accept)
    assert b"macpool_things 1.5\n" in text
    assert chosen.startswith(content_type)
    assert text.endswith(b"# EOF\n") is (content_type == OPEN)


@pytest.mark.parametrize(
    ("kind", "value", "line"),
    [
        (MetricKind.GAUGE, 2, 'macpool_things{{model="{}"}} 2.0'),
        (MetricKind.COUNTER, 2.5, 'macpool_things_total{{model="{}"}} 2.5'),
        (
            MetricKind.HISTOGRAM,
            HistogramValue((1.0,), HistogramSnapshot((1, 2), 7.5)),
            'macpool_things_sum{{model="{}"}} 7.5',
        ),
    ],
)
def test_long_label_values_are_cut(kind: MetricKind, value: float | HistogramValue, line: str):
    text = render_metrics([collect(kind, (("m" * (MAX_LABEL_CHARS + 1),), value))], "")[0].decode()
    assert line.format("m" * MAX_LABEL_CHARS) in text.splitlines()
    assert "m" * (MAX_LABEL_CHARS + 1) not in text


def test_buckets_are_cumulative_and_the_last_has_all_values():
    value = HistogramValue((0.5, 1, 20), HistogramSnapshot((1, 2, 0, 4), 90.25))
    lines = render_metrics([collect(MetricKind.HISTOGRAM, ((), value))], "")[0].decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'macpool_things_bucket{le="0.5"} 1.0',
        'macpool_things_bucket{le="1.0"} 3.0',
        'macpool_things_bucket{le="20.0"} 3.0',
        'macpool_things_bucket{le="+Inf"} 7.0',
        "macpool_things_count 7.0",
        "macpool_things_sum 90.25",
    ]

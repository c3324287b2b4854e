"""Metrics of one node at one moment, and the check of the node's own measurements.

`router.placement.sanitize_report` has removed impossible numbers from reports. `sanitize_measures` removes them from
measurements.
"""

from dataclasses import dataclass
from math import isfinite

from router.placement.cluster_view import NodeView
from wire.histogram import PREDICTED_BOUNDS, TRANSIENT_BOUNDS, GateMeasures, HistogramSnapshot, NodeMeasures
from wire.report import Model

MAX_COUNT = 2**53
"""Largest count that is exact as a float64."""


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """Metrics of one node at one moment. Times are in Unix seconds."""

    view: NodeView
    """View of the node, from its newest report."""
    reported_at: float
    """Arrival of the node's newest report, in Unix seconds."""
    wall: float
    """Current time in Unix seconds."""
    host: tuple[str, str, str] = ("", "", "")
    """Chip, operating system and version of Macpool."""
    models: tuple[Model, ...] = ()
    """Models that have their own series."""
    measures: NodeMeasures | None = None
    """Measurements of the node; None if they were not requested or are invalid."""


def sanitize_measures(measures: NodeMeasures) -> NodeMeasures:
    """Return a node's measurements with impossible numbers replaced.

    Negative counts become 0, and counts above `MAX_COUNT` become `MAX_COUNT`. An impossible CPU time becomes 0, an
    invalid histogram empty. Only the first 64 checks and refusals are kept.
    """
    gate = measures.gate
    return NodeMeasures(
        GateMeasures(
            tuple((site, _limit_count(count)) for site, count in gate.checks[:64]),
            tuple((reason, _limit_count(count)) for reason, count in gate.refusals[:64]),
            _sanitize_tally(gate.predicted, len(PREDICTED_BOUNDS)),
            _sanitize_tally(gate.transient, len(TRANSIENT_BOUNDS)),
        ),
        measures.agent_cpu if 0 <= measures.agent_cpu < MAX_COUNT else 0.0,
        _limit_count(measures.agent_phys),
    )


def _limit_count(count: int) -> int:
    return min(max(0, count), MAX_COUNT)


def _sanitize_tally(tally: HistogramSnapshot, bounds: int) -> HistogramSnapshot:
    if len(tally.counts) != bounds + 1 or not isfinite(tally.total) or tally.total < 0:
        return HistogramSnapshot((0,) * (bounds + 1))
    return HistogramSnapshot(tuple(map(_limit_count, tally.counts)), tally.total)


def sort_by_priority(view: NodeView) -> list[Model]:
    """Return a node's models in the order in which they get series: loaded and loading ones first, then by name."""
    return sorted(view.models.values(), key=lambda model: (not (model.loaded or model.loading), model.name))

"""The kinds of panels that the dashboards are made of, over grafana-foundation-sdk.

The kit leaves some things out that Grafana needs: ids of panels, `refId` of targets, what a stat panel reduces by, the
range of a heatmap. They are set here, so that no dashboard can forget them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from grafana_foundation_sdk.builders import common as parts
from grafana_foundation_sdk.builders import heatmap, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
TALL, SMALL = 8, 4
HALF, THIRD, SIXTH = 12, 8, 4
"""Widths, of 24."""
QUANTILES = (0.5, 0.9, 0.99)
BYTES, SECONDS, SHARE, PER_SECOND, REQUESTS, COUNT = "bytes", "s", "percentunit", "ops", "reqps", "none"
"""Units as Grafana names them."""


class Kind(Enum):
    """How a panel draws."""

    LINES = "lines"
    FIGURE = "figure"
    HEAT = "heat"
    STATES = "states"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `queries` are (PromQL, legend); a figure is red from `bad` on, or up to it if that is `below`."""

    title: str
    about: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: Kind = Kind.LINES
    width: int = HALF
    bad: float | None = None
    below: bool = False


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard: rows of panels, and the variables (name, label, PromQL of their values)."""

    uid: str
    title: str
    about: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    variables: tuple[tuple[str, str, str], ...] = ()

    def panels(self) -> list[Panel]:
        """Give all panels in order."""
        return [panel for _, row in self.rows for panel in row]


def lines(title: str, about: str, unit: str, *queries: tuple[str, str], width: int = HALF) -> Panel:
    """Draw values over time."""
    return Panel(title, about, unit, queries, width=width)


def figure(
    title: str, about: str, unit: str, query: str, *, bad: float | None = None, below: bool = False, width: int = SIXTH
) -> Panel:
    """Show one number of now."""
    return Panel(title, about, unit, ((query, ""),), Kind.FIGURE, width, bad, below)


def heat(title: str, about: str, unit: str, bucket: str, width: int = HALF) -> Panel:
    """Show how a histogram's values lie over time."""
    query = f"sum by (le) (increase({bucket}[$__rate_interval]))"
    return Panel(title, about, unit, ((query, "{{le}}"),), Kind.HEAT, width)


def states(title: str, about: str, query: str, legend: str, width: int = HALF) -> Panel:
    """Show which state something was in when."""
    return Panel(title, about, COUNT, ((query, legend),), Kind.STATES, width)


def listing(title: str, about: str, query: str, width: int = 24) -> Panel:
    """List the labels of series."""
    return Panel(title, about, COUNT, ((query, ""),), Kind.TABLE, width)


def quantiles(
    title: str, about: str, unit: str, bucket: str, by: str = "", width: int = HALF, over: str = "$__rate_interval"
) -> Panel:
    """Draw the median, and what one in ten and one in a hundred exceed; of what is rare, `over` a longer time."""
    also = f", {by}" if by else ""
    named = f" {{{{{by}}}}}" if by else ""
    return lines(
        title, about, unit,
        *((f"histogram_quantile({q}, sum by (le{also}) (rate({bucket}[{over}])))", f"p{q * 100:g}{named}")
          for q in QUANTILES),
        width=width,
    )  # fmt: skip


def write(board: Board) -> str:
    """Give a dashboard's JSON."""
    made = (
        Dashboard(board.title)
        .uid(board.uid)
        .description(board.about)
        .tags(["macpool"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(DatasourceVariable("datasource").type("prometheus").label("Data source"))
    )
    for name, label, values in board.variables:
        made.with_variable(
            QueryVariable(name).label(label).query(values).datasource(SOURCE).multi(True).include_all(True)
            .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        )  # fmt: skip
    number = 0
    for title, row in board.rows:
        made.with_row(Row(title))
        for panel in row:
            number += 1
            made.with_panel(_build(panel).id(number))
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


_Built = timeseries.Panel | stat.Panel | heatmap.Panel | statetimeline.Panel | table.Panel


def _build(panel: Panel) -> _Built:
    made = _empty(panel)
    made.title(panel.title).description(panel.about).unit(panel.unit).datasource(SOURCE).span(panel.width)
    made.height(SMALL if panel.kind is Kind.FIGURE else TALL)
    for target in _targets(panel):
        made.with_target(target)
    return made


def _empty(panel: Panel) -> _Built:
    match panel.kind:
        case Kind.LINES:
            return timeseries.Panel().fill_opacity(8).show_points(common.VisibilityMode.NEVER)
        case Kind.FIGURE:
            reduced = parts.ReduceDataOptions().calcs(["lastNotNull"])
            return stat.Panel().reduce_options(reduced).thresholds(_thresholds(panel))
        case Kind.HEAT:
            return heatmap.Panel()
        case Kind.STATES:
            return statetimeline.Panel()
        case Kind.TABLE:
            return table.Panel()


def _thresholds(panel: Panel) -> ThresholdsConfig:
    first, second = ("red", "green") if panel.below else ("green", "red")
    steps = [dashboard.Threshold(value=None, color="green" if panel.bad is None else first)]
    if panel.bad is not None:
        steps.append(dashboard.Threshold(value=panel.bad, color=second))
    return ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def _targets(panel: Panel) -> Sequence[Dataquery]:
    return [_target(panel, query, legend, chr(ord("A") + at)) for at, (query, legend) in enumerate(panel.queries)]


def _target(panel: Panel, query: str, legend: str, reference: str) -> Dataquery:
    target = Dataquery().expr(query).legend_format(legend or "__auto").ref_id(reference)
    if panel.kind in (Kind.FIGURE, Kind.TABLE):
        target.instant()
    else:
        target.range()
    if panel.kind is Kind.HEAT:
        target.format(PromQueryFormat.HEATMAP)
    elif panel.kind is Kind.TABLE:
        target.format(PromQueryFormat.TABLE)
    return target

"""Kinds of panels of the dashboards, built with grafana-foundation-sdk.

This module sets values that Grafana needs and that the SDK omits. These are the ids of panels, `refId` of targets, the
reduction of a stat panel, and the range of a heatmap. In all functions, `about` is the description of a panel, and
`width` its width in columns, of which a row has 24.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from grafana_foundation_sdk.builders import common as parts
from grafana_foundation_sdk.builders import heatmap, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
TALL, SMALL = 8, 4
"""Heights of panels, in Grafana's grid units."""
HALF, THIRD, SIXTH = 12, 8, 4
"""Widths of panels in columns, of which a row has 24."""
QUANTILES = (0.5, 0.9, 0.99)
BYTES, SECONDS, SHARE, PER_SECOND, REQUESTS, COUNT = "bytes", "s", "percentunit", "ops", "reqps", "none"
"""Units by their names in Grafana."""


MAX_OPEN_PANELS = 12
"""Maximum panels in the first row of a board, which is open.

All other rows are collapsed, and send no queries until they are opened.
"""
MEMORY_OF = ("Memory of this Mac", "/d/macpool-memory?var-node=${__field.labels.node}&${__url_time_range}")
REQUESTS_OF = ("Requests of this model", "/d/macpool-requests?var-model=${__field.labels.model}&${__url_time_range}")
"""Links from a series to the dashboard of its Mac and of its model: title and address."""
_NODE_CELL = "/d/macpool-memory?var-node=${__value.text}&${__url_time_range}"
_BEFORE = "max by (node, version) (macpool_node_info offset 10m)"
ANNOTATIONS = (
    ("Lost Macs", "red", 'macpool_cluster_node_state{state="lost"} == 1', "{{node}} is lost"),
    ("Conditions", "orange", "macpool_condition_active == 1", "{{condition}}"),
    (
        "Upgrades of Macs",
        "blue",
        f"max by (node, version) (macpool_node_info) and on (node) {_BEFORE} unless on (node, version) {_BEFORE}",
        "{{node}} runs {{version}}",
    ),
    (
        "Upgrades of the coordinator",
        "purple",
        "macpool_build_info and on (job) macpool_build_info offset 10m "
        "unless on (version) macpool_build_info offset 10m",
        "the coordinator runs {{version}}",
    ),
)
"""Annotations on every panel over time: name, colour, PromQL, and text.

An annotation is shown while its PromQL has a series.
"""


class Kind(Enum):
    """Kind of a Grafana panel: time series, stat, heatmap, state timeline or table."""

    LINES = "lines"
    FIGURE = "figure"
    HEAT = "heat"
    STATES = "states"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a dashboard."""

    title: str
    description: str
    """Description, which Grafana shows next to the title."""
    unit: str
    """Unit of the values, as Grafana names it."""
    queries: tuple[tuple[str, str], ...]
    """PromQL and legend of each query."""
    kind: Kind = Kind.LINES
    width: int = HALF
    """Width of the panel in columns, of which a row has 24."""
    bad: float | None = None
    """Value from which a figure is red; None if it is never red."""
    below: bool = False
    """Whether a figure is red below `bad` instead of from `bad` upwards."""
    columns: tuple[tuple[str, str], ...] = ()
    """For a table with one row per Mac: title and unit of each query's column."""


@dataclass(frozen=True, slots=True)
class Board:
    """Grafana dashboard: rows of panels, and variables that select their series."""

    uid: str
    """Id in Grafana, which is part of links."""
    title: str
    description: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    """Title and panels of each row. Initially only the first row is open."""
    variables: tuple[tuple[str, str, str], ...] = ()
    """Name, label, and PromQL of the possible values of each variable."""

    def list_panels(self) -> list[Panel]:
        """Return the panels of all rows, in order."""
        return [panel for _, row in self.rows for panel in row]

    def list_open_panels(self) -> tuple[Panel, ...]:
        """Return the panels of the first row, the only row that is not collapsed."""
        return self.rows[0][1]


def create_line_panel(title: str, about: str, unit: str, *queries: tuple[str, str], width: int = HALF) -> Panel:
    """Return a panel that draws the values of queries, each a pair of PromQL and legend, over time."""
    return Panel(title, about, unit, queries, width=width)


def create_stat_panel(
    title: str, about: str, unit: str, query: str, *, bad: float | None = None, below: bool = False, width: int = SIXTH
) -> Panel:
    """Return a panel that shows the current value of a PromQL query.

    The value is red from `bad` upwards, or, with `below`, under `bad`. If `bad` is None, it is never red.
    """
    return Panel(title, about, unit, ((query, ""),), Kind.FIGURE, width, bad, below)


def create_count_panel(title: str, about: str, *queries: tuple[str, str], bad: float | None = None) -> Panel:
    """Return a panel that shows the current values of queries, each a pair of PromQL and legend.

    A value is red below `bad`. If `bad` is None, no value is red.
    """
    return Panel(title, about, COUNT, queries, Kind.FIGURE, SIXTH, bad, below=True)


def create_heatmap(title: str, about: str, unit: str, bucket: str, width: int = HALF) -> Panel:
    """Return a panel that shows the distribution of a histogram over time.

    `bucket` is the PromQL selector of the histogram's buckets.
    """
    query = f"sum by (le) (increase({bucket}[$__rate_interval]))"
    return Panel(title, about, unit, ((query, "{{le}}"),), Kind.HEAT, width)


def create_state_timeline(title: str, about: str, query: str, legend: str, width: int = HALF) -> Panel:
    """Return a panel that shows the states of a query's series over time. `legend` names each series."""
    return Panel(title, about, COUNT, ((query, legend),), Kind.STATES, width)


def create_label_table(title: str, about: str, query: str, width: int = 24) -> Panel:
    """Return a panel that lists the labels of a query's series as a table, with one row per series."""
    return Panel(title, about, COUNT, ((query, ""),), Kind.TABLE, width)


def create_node_table(title: str, about: str, *columns: tuple[str, str, str]) -> Panel:
    """Return a table panel with one row per Mac.

    A column consists of a title, a unit, and PromQL with one series per Mac. A column with an empty title only adds its
    labels.
    """
    queries = tuple((query, "") for _, _, query in columns)
    named = tuple((name, unit) for name, unit, _ in columns)
    return Panel(title, about, COUNT, queries, Kind.TABLE, 24, columns=named)


def create_quantile_panel(
    title: str, about: str, unit: str, bucket: str, by: str = "", width: int = HALF, window: str = "$__rate_interval"
) -> Panel:
    """Return a panel that draws median, p90 and p99 of a histogram over time.

    `bucket` is the PromQL selector of the histogram's buckets. `by` is a label, and each of its values gets separate
    quantiles. `window` is the window of the rate, longer for rare events.
    """
    also = f", {by}" if by else ""
    named = f" {{{{{by}}}}}" if by else ""
    return create_line_panel(
        title,
        about,
        unit,
        *(
            (f"histogram_quantile({q}, sum by (le{also}) (rate({bucket}[{window}])))", f"p{q * 100:g}{named}")
            for q in QUANTILES
        ),
        width=width,
    )


def render_board(board: Board) -> str:
    """Return the JSON of a dashboard, in the form that Grafana imports."""
    made = (
        Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["macpool"])
        .refresh("30s")
        .time("now-6h", "now")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(_link_other_boards())
        .with_variable(DatasourceVariable("datasource").type("prometheus").label("Data source"))
    )
    for name, colour, query, text in ANNOTATIONS:
        made.annotation(
            AnnotationQuery()
            .name(name)
            .datasource(SOURCE)
            .enable(True)
            .icon_color(colour)
            .expr(query)
            .title_format(text)
            .step("60s")
        )
    for name, label, values in board.variables:
        made.with_variable(
            QueryVariable(name)
            .label(label)
            .query(values)
            .datasource(SOURCE)
            .multi(True)
            .include_all(True)
            .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
    number = 0
    for at, (title, panels) in enumerate(board.rows):
        row = Row(title)
        built: list[_Built] = []
        for panel in panels:
            number += 1
            built.append(_build_panel(panel).id(number))
        if at:
            for one in built:
                row.with_panel(one)  # collapses the row
        made.with_row(row)
        if not at:
            for one in built:
                made.with_panel(one)
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


def _link_other_boards() -> DashboardLink:
    link = DashboardLink("Macpool").type(dashboard.DashboardLinkType.DASHBOARDS).tags(["macpool"])
    return link.as_dropdown(False).include_vars(False).keep_time(True)


_Built = timeseries.Panel | stat.Panel | heatmap.Panel | statetimeline.Panel | table.Panel


def _build_panel(panel: Panel) -> _Built:
    made = _create_empty_panel(panel)
    made.title(panel.title).description(panel.description).unit(panel.unit).datasource(SOURCE).span(panel.width)
    made.height(SMALL if panel.kind is Kind.FIGURE else TALL)
    for target in _create_targets(panel):
        made.with_target(target)
    if panel.columns:
        _arrange_columns(made, panel)
    elif links := _create_links(panel):
        made.data_links(links)
    return made


def _create_links(panel: Panel) -> list[Builder[dashboard.DashboardLink]]:
    """Return the links from a value to the board of its Mac or its model."""
    named = "".join(legend for _, legend in panel.queries)
    targets = [MEMORY_OF] * ("{{node}}" in named) + [REQUESTS_OF] * ("{{model}}" in named)
    return [DashboardLink(title).url(url) for title, url in targets]


def _arrange_columns(made: _Built, panel: Panel) -> None:
    """Join the queries of a table by Mac, and set titles and units. The name of a Mac links to its memory."""
    made.with_transformation(
        dashboard.DataTransformerConfig("joinByField", options={"byField": "node", "mode": "outer"})
    )
    values = [f"Value #{chr(ord('A') + at)}" for at in range(len(panel.columns))]
    hidden = {name: True for at in range(1, len(panel.columns) + 1) for name in ("Time", f"Time {at}")}
    titles = {"node": "Mac", "state": "State", "version": "Version"}
    shown = {value: title for value, (title, _) in zip(values, panel.columns, strict=True) if title}
    hidden |= {value: True for value, (title, _) in zip(values, panel.columns, strict=True) if not title}
    made.with_transformation(
        dashboard.DataTransformerConfig("organize", options={"excludeByName": hidden, "renameByName": titles | shown})
    )
    for title, unit in panel.columns:
        if title:
            made.override_by_name(title, [dashboard.DynamicConfigValue("unit", unit)])
    link = {"title": MEMORY_OF[0], "url": _NODE_CELL}
    made.override_by_name("Mac", [dashboard.DynamicConfigValue("links", [link])])


def _create_empty_panel(panel: Panel) -> _Built:
    match panel.kind:
        case Kind.LINES:
            return timeseries.Panel().fill_opacity(8).show_points(common.VisibilityMode.NEVER)
        case Kind.FIGURE:
            reduced = parts.ReduceDataOptions().calcs(["lastNotNull"])
            return stat.Panel().reduce_options(reduced).thresholds(_create_thresholds(panel))
        case Kind.HEAT:
            return heatmap.Panel()
        case Kind.STATES:
            return statetimeline.Panel()
        case Kind.TABLE:
            return table.Panel()


def _create_thresholds(panel: Panel) -> ThresholdsConfig:
    first, second = ("red", "green") if panel.below else ("green", "red")
    steps = [dashboard.Threshold(value=None, color="green" if panel.bad is None else first)]
    if panel.bad is not None:
        steps.append(dashboard.Threshold(value=panel.bad, color=second))
    return ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def _create_targets(panel: Panel) -> Sequence[Dataquery]:
    return [
        _create_target(panel, query, legend, chr(ord("A") + at)) for at, (query, legend) in enumerate(panel.queries)
    ]


def _create_target(panel: Panel, query: str, legend: str, reference: str) -> Dataquery:
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

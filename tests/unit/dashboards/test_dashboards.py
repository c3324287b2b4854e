"""The committed dashboards equal their source, describe their panels, and query only metrics that exist."""

import json
import re
from typing import Any

import pytest

from coordinator.metrics.families import MetricKind
from coordinator.metrics.node_families import NODE
from coordinator.metrics.pool_families import POOL
from dashboards.generate import BOARDS, HERE
from dashboards.panels import ANNOTATIONS, MAX_OPEN_PANELS, Board, render_board

FAMILIES = {family.full_name: family for family in (*POOL, *NODE)}
ASKED = re.compile(r"macpool_\w+")
SUFFIXES = re.compile(r"_(?:bucket|count|sum)$")


def board_of(name: str) -> dict[str, Any]:
    return json.loads((HERE / name).read_text())


def panels(name: str, *, closed: bool = True) -> list[dict[str, Any]]:
    found = board_of(name)["panels"]
    inside = [panel for row in found for panel in row.get("panels", ()) if closed]
    return [panel for panel in found if panel["type"] != "row"] + inside


def asked(text: str) -> set[str]:
    found = set(ASKED.findall(text))
    return {base if (base := SUFFIXES.sub("", name)) in FAMILIES else name for name in found}


@pytest.mark.parametrize("name", BOARDS)
def test_the_committed_json_is_what_the_source_gives(name: str):
    assert (HERE / name).read_text() == render_board(BOARDS[name]), f"dashboards/{name} is old: run `make docs`"


def test_there_is_no_other_json():
    assert {file.name for file in HERE.glob("*.json")} == set(BOARDS)
    assert len({board.uid for board in BOARDS.values()}) == len(BOARDS)


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_has_a_title_description_and_unit(name: str):
    for panel in panels(name):
        assert panel["title"], panel
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFG")[: len(panel["targets"])]
        if panel["type"] == "stat":
            assert panel["options"]["reduceOptions"]["calcs"] == ["lastNotNull"]


@pytest.mark.parametrize("name", BOARDS)
def test_no_two_panels_have_one_id_or_one_place(name: str):
    found = panels(name)
    assert len({panel["id"] for panel in found}) == len(found)
    taken: set[tuple[int, int]] = set()
    for panel in found:
        place = panel["gridPos"]
        x, y = place.get("x", 0), place.get("y", 0)
        cells = {(x + dx, y + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert x + place["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells


@pytest.mark.parametrize("name", BOARDS)
def test_a_dozen_panels_are_open_and_all_others_in_collapsed_rows(name: str):
    rows = [panel for panel in board_of(name)["panels"] if panel["type"] == "row"]
    assert 1 <= len(panels(name, closed=False)) <= MAX_OPEN_PANELS
    assert [row["collapsed"] for row in rows] == [False, *[True] * (len(rows) - 1)]
    assert len(panels(name)) == len(BOARDS[name].list_panels())
    assert all(row["panels"] for row in rows[1:])


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_shows_six_hours_links_to_the_others_and_marks_events(name: str):
    board = board_of(name)
    assert board["time"] == {"from": "now-6h", "to": "now"}
    (link,) = board["links"]
    assert (link["type"], link["tags"], link["keepTime"]) == ("dashboards", ["macpool"], True)
    assert board["tags"] == ["macpool"]
    marked = board["annotations"]["list"]
    assert [one["name"] for one in marked] == [one[0] for one in ANNOTATIONS]
    for one in marked:
        assert one["enable"]
        assert asked(one["expr"]) <= set(FAMILIES)


@pytest.mark.parametrize("name", BOARDS)
def test_values_of_a_mac_or_a_model_link_to_its_dashboard(name: str):
    uids = {board.uid for board in BOARDS.values()}
    for panel in panels(name):
        links = panel["fieldConfig"]["defaults"].get("links", [])
        legends = "".join(target.get("legendFormat", "") for target in panel["targets"])
        assert len(links) == ("{{node}}" in legends) + ("{{model}}" in legends), panel["title"]
        for link in links:
            uid, _, query = link["url"].removeprefix("/d/").partition("?")
            assert uid in uids
            assert f"var-{BOARDS[uid.removeprefix('macpool-') + '.json'].variables[0][0]}=" in query


def test_the_pool_has_one_row_for_each_mac():
    (table,) = [panel for panel in panels("pool.json", closed=False) if panel["type"] == "table"]
    join, arrange = table["transformations"]
    assert (join["id"], join["options"]) == ("joinByField", {"byField": "node", "mode": "outer"})
    names = arrange["options"]["renameByName"]
    assert set(names.values()) == {"Mac", "State", "Version", "Headroom", "Tokens/s", "In flight", "Models loaded"}
    shown = {f"Value #{target['refId']}" for target in table["targets"]} - set(arrange["options"]["excludeByName"])
    assert shown == {name for name in names if name.startswith("Value")}
    assert all(target["instant"] and target["format"] == "table" for target in table["targets"])


@pytest.mark.parametrize("board", BOARDS.values(), ids=lambda board: board.uid)
def test_panels_ask_for_metrics_and_labels_that_exist(board: Board):
    known = {"le", "node", "instance", "job", "__name__"}
    for panel in board.list_panels():
        for query, legend in panel.queries:
            names = asked(query)
            assert names, query
            assert names <= set(FAMILIES), query
            labels = known | {label for name in names for label in FAMILIES[name].label_names}
            assert set(re.findall(r"{{(\w+)}}", legend)) <= labels, (panel.title, legend)
            assert {one for by in re.findall(r"by \(([^)]+)\)", query) for one in by.split(", ")} <= labels, query
            for name in names:
                if FAMILIES[name].kind is MetricKind.COUNTER:
                    assert re.search(rf"(?:rate|increase)\({name}\b", query), f"a total is shown as it is: {query}"


def test_every_metric_is_shown_somewhere():
    shown = {
        name
        for board in BOARDS.values()
        for panel in board.list_panels()
        for query, _ in panel.queries
        for name in asked(query)
    }
    assert (
        set(FAMILIES)
        - shown
        - {"macpool_tls_issued_timestamp_seconds", "macpool_cluster_node_certificate_issued_timestamp_seconds"}
        == set()
    )

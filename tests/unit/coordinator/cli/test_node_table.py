"""Cells of a node's row in the tables of the command."""

from typing import Any

import pytest

from coordinator.cli.memory_breakdown import describe_breaker, format_age
from coordinator.cli.node_table import (
    WIDE,
    build_wide_row,
    describe_video,
    format_headroom,
    format_memory,
    format_model_count,
    format_state,
    render_bar,
)
from tests.unit.coordinator.cli.test_tables import a_node
from wire.node_state import NodeState
from wire.units import GIB, MIB

OPEN = {"state": "open", "until": 0.0, "why": "it crashed"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (-5000.0, "0s"),
        (0.4, "0s"),
        (59.4, "59s"),
        (60.0, "1m"),
        (3599.0, "60m"),
        (3600.0, "1h"),
        (86400.0, "1d"),
    ],
)
def test_an_age_is_in_its_largest_unit(seconds: float | None, text: str):
    assert format_age(seconds) == text


@pytest.mark.parametrize(
    ("state", "changes", "text"),
    [
        (NodeState.READY, {}, "ready"),
        (NodeState.READY, {"engine": {"state": ""}}, "ready"),
        (NodeState.READY, {"engine": {"state": "starting"}}, "starting"),
        (NodeState.PAUSED, {"engine": {"state": "starting"}}, "paused"),
        (NodeState.LOST, {}, "lost 5m"),
        (NodeState.SUSPECT, {"heard_seconds": 4.0}, "suspect 4s"),
        (NodeState.LOST, {"heard_seconds": None}, "lost"),
        (NodeState.READY, {"cordoned": True, "breaker": OPEN}, "ready, cordoned, failing"),
        (NodeState.READY, {"guard": False}, "ready, guard OFF"),
        (NodeState.READY, {"margin": 0}, "ready, no margin"),
        (NodeState.READY, {"gate_armed": False}, "ready, not armed"),
        (NodeState.READY, {"gate_armed": False, "cordoned": True}, "ready, cordoned"),
    ],
)
def test_a_state_names_the_facts_that_need_attention(state: NodeState, changes: dict[str, Any], text: str):
    assert format_state(a_node("studio", 1, state) | changes) == text


@pytest.mark.parametrize(
    ("breaker", "words"),
    [
        ({"state": "closed"}, ""),
        ({"state": "open", "until": 130.0, "why": "it crashed"}, "for 30 s, then one request is tried"),
        ({"state": "open", "until": 90.0, "why": "it crashed"}, "for 0 s, then one request is tried"),
        ({"state": "probing", "until": 90.0, "why": "it crashed"}, "except the one that is being tried"),
        ({"state": "half open", "until": 90.0, "why": "it crashed"}, "except the next, which is tried"),
    ],
)
def test_a_breaker_names_the_next_request(breaker: dict[str, Any], words: str):
    text = describe_breaker({"breaker": breaker}, 100.0)
    assert words in text
    assert text.endswith("last failure: it crashed") is bool(words)
    assert describe_breaker({}, 100.0) == ""


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"current": 12 * GIB, "ceiling": GIB * 24}, "12.0/24.0 GiB"),
        ({"current": GIB // 2, "ceiling": GIB}, "0.5/1.0 GiB"),
        ({"current": 100 * MIB, "ceiling": 1000 * MIB}, "100.0/1000.0 MiB"),
        ({"current": None, "ceiling": GIB}, "-"),
        ({"current": GIB, "ceiling": 0}, "-"),
        ({"current": GIB, "ceiling": None}, "-"),
        ({"current": GIB, "ceiling": GIB, "state": "lost"}, "-"),
    ],
)
def test_memory_is_current_of_the_ceiling(changes: dict[str, Any], text: str):
    assert format_memory({"state": "ready"} | changes) == text


def test_only_loaded_models_are_counted_as_loaded():
    models = [{"model": state} for state in ("loaded", "loading", "available")]
    assert format_model_count({"models": models}) == "1 of 3"


def test_headroom_and_models_are_dashes_without_a_value():
    node = a_node("studio", 3)
    assert (format_headroom(node), format_model_count(node)) == ("62.6 GiB", "2 of 3")
    assert format_headroom(node | {"state": "lost"}) == "-"
    assert format_model_count(node | {"models": []}) == "-"


def a_video(**changes: Any) -> dict[str, Any]:
    return {"packages": [{}], "leases": [], "allowed": True, "ready": True, "ray": "10.0.0.1:1"} | changes


@pytest.mark.parametrize(
    ("video", "text"),
    [
        (None, "-"),
        (a_video(packages=[]), "-"),
        (a_video(), "ready"),
        (a_video(ready=False), "not ready"),
        (a_video(ray=""), "not ready"),
        (a_video(allowed=False), "not allowed"),
        (
            a_video(allowed=False, leases=[{"size": GIB, "phase": "decode", "progress": 40}]),
            "leases 1.0 GiB, decode 40 %",
        ),
        (a_video(leases=[{"size": 0, "phase": "ended", "progress": 100}]), "ready"),
    ],
)
def test_video_is_a_lease_or_a_state(video: dict[str, Any] | None, text: str):
    assert describe_video(video) == text


@pytest.mark.parametrize(
    ("changes", "bar"),
    [
        ({}, "█████▒▒░··"),
        ({"current": 20, "reserved": 5}, "██████████"),
        ({"current": -1}, "▒▒░·······"),
        ({"ceiling": 0}, "??????????"),
        ({"ceiling": None}, "??????????"),
        ({"current": None}, "??????????"),
        ({"state": "lost"}, "??????????"),
    ],
)
def test_a_bar_has_one_character_for_a_tenth_of_the_ceiling(changes: dict[str, Any], bar: str):
    node = {"ceiling": 10, "current": 5, "reserved": 2, "margin": 1, "state": "ready"}
    assert render_bar(node | changes, 10) == bar


def test_a_wide_row_has_a_cell_for_each_column():
    node = a_node("studio", 3, cordoned=True) | {"cap_bound_by": "static", "bound_by": "dynamic", "phys": 20 * GIB}
    cells = dict(zip(WIDE, build_wide_row(node), strict=True))
    assert (cells["NAME"], cells["STATE"], cells["CHIP"]) == ("studio", "ready, cordoned", "Apple M4 Max")
    assert (cells["CAP"], cells["PHYS"], cells["MARGIN"]) == ("96.0 GiB", "20.0 GiB", "12.0 GiB")
    assert (cells["HEADROOM"], cells["GUARD"], cells["LIMITED BY"]) == ("62.6 GiB", "armed", "static")
    assert (cells["IN FLIGHT"], cells["VIDEO"], cells["LAST REPORT"], cells["VERSION"]) == ("3", "-", "5m", "0.1.0")
    assert cells["MODELS"].count("Qwen3") == 3
    unknown = build_wide_row(node | {"cap": 0, "phys": None, "margin": 0, "cap_bound_by": "", "models": []})
    cells = dict(zip(WIDE, unknown, strict=True))
    assert [cells[name] for name in ("CAP", "PHYS", "MARGIN", "LIMITED BY", "MODELS", "GUARD")] == ["-"] * 6

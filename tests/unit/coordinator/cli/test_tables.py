"""Tables on a terminal of 80, 120 and 200 columns, with 2, 12 and 40 models: complete names and states, no
truncation."""

import itertools
import os
import re
import sys
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from coordinator.cli.commands import logs_and_top, nodes
from coordinator.cli.commands.models import print_models
from coordinator.cli.node_table import NARROW, format_memory
from coordinator.cli.request_table import print_requests
from coordinator.cluster.member_state import Member
from coordinator.observe.node_rows import NodeFacts, build_node_row
from coordinator.state.rows import MemberRow
from router.placement.sanitize_report import build_node_view
from tests.support.cluster.cluster_port import a_report
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.identity import NodeId
from wire.node_state import NodeState
from wire.report import EngineState, Hardware
from wire.units import GIB, MIB

NAMES = ("macbook-pro-anna", "studio", "mini-wohnzimmer")
SIZES = [(80, 2), (80, 12), (80, 40), (120, 2), (120, 12), (120, 40), (200, 2), (200, 12), (200, 40)]


def a_node(name: str, models: int, state: NodeState = NodeState.READY, **changes: Any) -> dict[str, Any]:
    """Return an API row of a node with this number of models, of which two are loaded."""
    held = tuple(a_model(f"mlx-community/Qwen3-{number}B-4bit", loaded=number < 2) for number in range(models))
    memory = a_memory(
        ceiling=96 * GIB, cap=96 * GIB, current=int(21.4 * GIB), headroom=int(62.6 * GIB), margin=12 * GIB
    )
    report = replace(a_report(), models=held, memory=memory, engine=EngineState("mlx", "ready"))
    view = build_node_view(
        report,
        node=NodeId(name),
        name=name,
        state=state,
        reported_at=0.0,
        cordoned=False,
        epoch=1,
        labels=frozenset(),
        video_allowed=False,
    )
    row = MemberRow(NodeId(name), name, "m", Hardware("Apple M4 Max", 128 << 30, 16, "macOS 26", "3.13"), "1", 0.0)
    told = NodeFacts(reported=True, version="0.1.0", protocol=2, in_flight=3, reported_seconds_ago=312.0)
    return (
        build_node_row(view, Member(NodeId(name), state, 0.0), row, told) | {"breaker": {"state": "closed"}} | changes
    )


def a_pool(models: int) -> dict[str, Any]:
    return {
        "nodes": [
            a_node(NAMES[0], models),
            a_node(NAMES[1], models, NodeState.LOST),
            a_node(NAMES[2], models, cordoned=True),
        ]
    }


def a_catalogue(models: int) -> dict[str, Any]:
    rows = [
        {
            "name": name,
            "id": name,
            "state": "ready",
            "model": "loaded" if name == "studio" else "known",
            "cause": "",
            "progress": 0.0,
        }
        for name in NAMES
    ]
    return {
        "models": [
            {
                "name": f"mlx-community/Qwen3-{number}B-4bit",
                "nodes": rows,
                "weights": 17 * GIB,
                "context": 131072,
                "conflict": False,
            }
            for number in range(models)
        ]
    }


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that prints on a terminal of a width and returns the lines."""

    def lines(width: int, show: Any) -> list[str]:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
        show()
        text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
        if os.environ.get("SHOW"):
            with capsys.disabled():
                print(f"\n{width}:\n{text}")
        return text.splitlines()

    return lines


@pytest.mark.parametrize(("width", "models"), SIZES)
def test_nodes_fit_with_whole_names_and_states(screen: Any, width: int, models: int):
    lines = screen(width, lambda: nodes.print_nodes(a_pool(models)))
    assert len(NARROW) == 7, "and without VIDEO where no node has a package for it"
    assert "VIDEO" not in lines[0]
    assert len(lines) == 4, "a header and a line for each node: no advice without a problem"
    assert max(map(len, lines)) <= width
    for line, name, state in zip(lines[1:], NAMES, ("ready", "lost 5m", "ready, cordoned"), strict=True):
        assert line.startswith(name)
        assert state in line
        assert f"2 of {models}" in line
    assert "21.4/96.0 GiB" in lines[1]
    assert "62.6 GiB" in lines[1]
    assert "GiB" not in lines[2], "a lost node has no numbers of the past"


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_long_name_is_folded_and_not_cut(screen: Any, width: int):
    long = "the-mac-studio-in-the-basement-next-to-the-washing-machine-63ch"
    lines = screen(width, lambda: nodes.print_nodes({"nodes": [a_node(long, 12, cordoned=True)]}))
    column = lines[0].index("STATE")
    assert "".join(line[:column].strip() for line in lines[1:]) == long
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= width


def test_wide_shows_every_column_on_one_line(screen: Any):
    lines = screen(80, lambda: nodes.print_nodes(a_pool(12), wide=True))
    assert len(lines) == 4
    assert all(name in lines[0] for name in ("CHIP", "CAP", "LIMITED BY", "GUARD", "VERSION"))
    assert "mlx-community/Qwen3-11B-4bit (not loaded)" in lines[1]


@pytest.mark.parametrize(("width", "models"), SIZES)
def test_models_fit_with_whole_names(screen: Any, width: int, models: int):
    lines = screen(width, lambda: print_models(a_catalogue(models), wide=False))
    assert max(map(len, lines)) <= width
    assert len(lines) == models + 1
    assert all(line.startswith("mlx-community/Qwen3-") and "studio" in line for line in lines[1:])


@pytest.mark.parametrize(("width", "models"), SIZES)
def test_the_live_view_fits(width: int, models: int):
    console = Console(width=width, record=True, file=open(os.devnull, "w"), color_system=None)  # noqa: SIM115
    console.print(logs_and_top.render_node_table(a_pool(models)["nodes"], width))
    lines = console.export_text().splitlines()
    if os.environ.get("SHOW"):
        print("\n".join(lines))
    assert len(lines) == 4
    assert max(len(line.rstrip()) for line in lines) <= width
    assert all(line.startswith(name) for line, name in zip(lines[1:], NAMES, strict=True))
    assert "ready, cordoned" in lines[3]


@pytest.mark.parametrize(
    ("current", "ceiling", "text"),
    [
        (int(12.34 * GIB), 24 * GIB, "12.3/24.0 GiB"),
        (92 * MIB, 260 * MIB, "92.0/260.0 MiB"),
        (92 * MIB, 2 * GIB, "0.1/2.0 GiB"),
    ],
)
def test_memory_is_shown_in_the_unit_of_the_ceiling(current: int, ceiling: int, text: str):
    assert format_memory({"state": "ready", "current": current, "ceiling": ceiling}) == text


@pytest.mark.parametrize("width", [80, 120])
def test_ids_of_requests_are_whole_beside_long_names(screen: Any, width: int):
    request = {
        "request_id": "93500412a2ad000000000003",
        "model": "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit",
        "key": "z7cz4puo",
        "seconds": 123.456,
        "outcome": "context_length_exceeded",
        "message": "",
        "prompt_tokens": 200014,
        "cached_tokens": 0,
        "completion_tokens": 4096,
        "steps": [{"at": 0.0, "what": "sent", "node": "studio-in-the-basement"}],
    }
    lines = screen(width, lambda: print_requests({"requests": [request]}))
    assert max(map(len, lines)) <= width
    assert lines[1].startswith(f"{request['request_id']}  ")
    place = lines[0].index("MODEL"), lines[0].index("NODE"), lines[0].index("OUTCOME")
    texts = ["".join(line[start:end].strip() for line in lines[1:]) for start, end in itertools.pairwise(place)]
    assert texts == [request["model"], "studio-in-the-basement"]
    assert "123.46" in lines[1]
    assert lines[1].endswith("200014    4096")

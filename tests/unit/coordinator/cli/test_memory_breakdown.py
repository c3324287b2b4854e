"""The printed memory of a node, computed by the registry from a report."""

import io
import time
from typing import Any

import pytest
from rich.console import Console

from coordinator.cli.commands import nodes as verbs
from coordinator.cli.memory_breakdown import describe_breaker, format_age, get_guard_state, render_breakdown
from coordinator.client import api_client
from coordinator.observe.node_rows import build_enforcement_row, list_dangers
from router.placement.cluster_view import NodeView
from wire.enforcer_report import Enforcement
from wire.identity import NodeId
from wire.report import Memory, MemoryLevel
from wire.units import GIB, MIB


def node(**changes: Any) -> dict[str, Any]:
    """Return an API row of a node: a cap of 96 GiB limited by Metal, a margin of 12, 60 in use, 4 reserved."""
    enforcement = build_enforcement_row(
        Enforcement(MemoryLevel.OVER_SOFT, 59 * GIB, 70 * GIB, 66 * GIB, over_caps=2, kills=1)
    )
    return {
        "name": "studio",
        "cap": 96 * GIB,
        "ceiling": 90 * GIB,
        "margin": 12 * GIB,
        "phys": 58 * GIB,
        "active": 57 * GIB,
        "recent": 60 * GIB,
        "current": 60 * GIB,
        "reserved": 4 * GIB,
        "headroom": 14 * GIB,
        "leases": 6 * GIB,
        "base": 300 * MIB,
        "cache": 256 * MIB,
        "peak": 61 * GIB,
        "reserve": 256 * MIB,
        "cap_bound_by": "metal",
        "bound_by": "leases",
        "tier": "balanced",
        "remedy": "wait for the video job",
        "source": "phys_footprint",
        "age": 0.25,
        "guard": True,
        "gate_armed": True,
        "enforcement": enforcement,
        "system_memory": {
            "available": 31 * GIB,
            "pressure": "warn",
            "worker": 5 * GIB,
            "source": "vm_statistics64",
            "age": 0.5,
        },
        "engine": {
            "restarts": 3,
            "wired": 54 * GIB,
            "counts": {"checks": 10, "refusals": 4, "sheds": 2, "evictions": 1},
        },
    } | changes


def test_memory_breakdown_lists_terms_limit_and_remedy():
    assert render_breakdown(node()) == [
        "cap       96.0 GiB, limited by metal, tier balanced",
        "ceiling   90.0 GiB, limited by leases; leases 6.0 GiB",
        "remedy    wait for the video job",
        "current   60.0 GiB = highest of phys 58.0 GiB, active 57.0 GiB, recent 60.0 GiB; phys_footprint, 0.2 s old",
        "headroom  14.0 GiB = ceiling 90.0 GiB − margin 12.0 GiB − current 60.0 GiB − reserved 4.0 GiB",
        "guard     armed; level over soft; engine seen by the agent 59.0 GiB, highest 70.0 GiB",
        "mlx       base 300.0 MiB, free buffers 256.0 MiB, peak 61.0 GiB; last reserve 256.0 MiB; wired 54.0 GiB",
        "system    available 31.0 GiB, pressure warn, video worker 5.0 GiB; vm_statistics64, 0.5 s old",
        "counts    10 checks, 4 refusals, 2 sheds, 1 evicted model, 2 times over the cap, 1 engine kill, 3 restarts",
    ]


def test_memory_breakdown_prints_unknown_for_missing_values():
    lines = render_breakdown(node(phys=None, current=None, headroom=None, source=""))
    assert any("phys -" in line and "no source" in line for line in lines)
    assert any(line.startswith("headroom  - =") for line in lines)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (-3.0, "0s"),
        (59.4, "59s"),
        (60.0, "1m"),
        (3599.0, "60m"),
        (3600.0, "1h"),
        (86399.0, "24h"),
        (86400.0, "1d"),
        (3 * 86400.0, "3d"),
    ],
)
def test_format_age_uses_the_largest_unit(seconds: float | None, text: str):
    assert format_age(seconds) == text


def test_describe_breaker_counts_from_the_current_time():
    breaker = {"state": "open", "until": time.time() + 30.0, "why": "it crashed"}
    text = describe_breaker({"breaker": breaker})
    assert text in (
        f"its engine keeps failing: the node gets no requests for {seconds} s, then one request is tried; "
        "last failure: it crashed"
        for seconds in range(25, 31)
    )


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "armed"),
        ({"guard": False}, "OFF"),
        ({"margin": 0}, "no margin"),
        ({"gate_armed": False}, "not armed"),
        ({"cap": 0}, "-"),
    ],
)
def test_get_guard_state_of_each_kind_of_guard(changes: dict[str, Any], word: str):
    assert get_guard_state(node(**changes)) == word


def view(memory: Memory, enforcement: Enforcement) -> NodeView:
    return NodeView(NodeId("n1"), "studio", "ready", memory=memory, enforcement=enforcement)


def test_weakened_guard_has_the_warning_of_the_node_or_one_from_its_values():
    off = Memory(cap=8 * GIB, guard=False, margin=0)
    told = ("memory.guard is off: it may panic", "memory.margin is 0: a spike", "the cap is above the Metal limit")
    assert list_dangers(view(off, Enforcement(warnings=told))) == list(told)
    silent = list_dangers(view(off, Enforcement()))
    assert [text.split(":")[0] for text in silent] == ["memory.guard is off", "memory.margin is 0"]
    others = list_dangers(view(off, Enforcement(warnings=("the cap is above the Metal limit",))))
    assert others == ["the cap is above the Metal limit", *silent]
    assert list_dangers(view(Memory(cap=8 * GIB, margin=GIB), Enforcement())) == []
    assert list_dangers(view(Memory(), Enforcement())) == [], "a node has sent no report yet"


def test_a_node_over_its_cap_is_a_danger():
    (text,) = list_dangers(view(Memory(cap=8 * GIB, margin=GIB), Enforcement(MemoryLevel.OVER_HARD)))
    assert "over its cap of 8.0 GiB" in text


def status(**fields: Any) -> dict[str, Any]:
    return {
        "cluster": {"name": "home", "id": "c"},
        "uptime_seconds": 1.0,
        "base_url": "u",
        "nodes": {},
        "models": [],
        "in_flight": 0,
        "queued": 0,
        "warnings": ["far: it is slow", "near: memory.guard is off"],
        **fields,
    }


def test_status_shows_dangers_in_red_and_other_warnings_in_yellow(monkeypatch: pytest.MonkeyPatch):
    lines: list[tuple[str, str | None]] = []
    monkeypatch.setattr("click.secho", lambda text, fg=None: lines.append((text, fg)))
    verbs.print_status(status(dangers=["near: memory.guard is off"]))
    assert lines == [("warning   far: it is slow", "yellow"), ("warning   near: memory.guard is off", "red")]


def test_alarming_cells_of_a_table_are_red(monkeypatch: pytest.MonkeyPatch):
    out = io.StringIO()
    colours = Console(file=out, force_terminal=True, color_system="standard", width=80)
    monkeypatch.setattr("rich.console.Console", lambda **_: colours)
    api_client.print_table(("GUARD",), [("OFF",), ("armed",)], alarming={"OFF"})
    assert "\x1b[1;31mOFF" in out.getvalue()
    assert "31marmed" not in out.getvalue()

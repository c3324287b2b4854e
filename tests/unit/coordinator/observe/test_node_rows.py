"""Conditions under which a node can answer a request, and those that are shown as warnings."""

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.cluster.member_state import Member
from coordinator.observe.node_rows import (
    NodeFacts,
    build_node_row,
    can_answer,
    get_measured_memory,
    get_model_state,
    get_speeds,
    list_dangers,
    list_warnings,
)
from coordinator.state.rows import MemberRow
from router.placement.cluster_view import NodeView
from router.placement.sanitize_report import build_node_view
from tests.support.cluster.cluster_port import a_report
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.support.pictures import DISTINCT
from wire.enforcer_report import Enforcement
from wire.identity import NodeId
from wire.node_state import NodeState
from wire.report import EngineState, Hardware, MemoryLevel, Sharing
from wire.units import GIB


def a_view(
    state: NodeState = NodeState.READY,
    *,
    engine: str = "ready",
    armed: bool = True,
    guard: bool = True,
    models: bool = True,
) -> NodeView:
    report = a_report()
    report = replace(
        report,
        engine=EngineState("mlx", engine),
        memory=replace(a_memory(), armed=armed, guard=guard),
        models=report.models if models else (),
    )
    return build_node_view(
        report,
        node=NodeId("a"),
        name="a",
        state=state,
        reported_at=0.0,
        cordoned=False,
        epoch=1,
        labels=frozenset(),
        video_allowed=False,
    )


def test_a_node_answers_only_when_everything_of_it_is_ready():
    assert can_answer(a_view())
    assert not can_answer(a_view(NodeState.LOST))
    assert not can_answer(a_view(engine="starting"))
    assert not can_answer(a_view(armed=False))
    assert can_answer(a_view(armed=False, guard=False))
    assert not can_answer(a_view(models=False))
    damaged, intact = a_model("a", loaded=False, cause="its files are damaged"), a_model("b", loaded=False)
    for models, expected in (((damaged,), False), ((damaged, intact), True)):
        view = dataclasses.replace(a_view(), models={model.name: model for model in models})
        assert can_answer(view) is expected


@pytest.mark.parametrize(("engine", "warns"), [("starting", False), ("ready", True), ("hung", True)])
def test_an_engine_that_starts_is_no_warning(engine: str, *, warns: bool):
    found = list_warnings(a_view(engine=engine, armed=False))
    assert any("its gate is not armed" in text for text in found) is warns


def warned(**changes: Any) -> list[str]:
    return list_warnings(dataclasses.replace(a_view(), **changes))


def test_a_node_that_is_well_has_no_warnings():
    assert warned() == []


def test_a_cap_that_leaves_nothing_is_a_warning_with_its_numbers():
    memory = a_memory(cap=12 * GIB, margin=4 * GIB, base=8 * GIB)
    (text,) = warned(memory=memory)
    assert text == (
        "its cap of 12.0 GiB leaves no memory after the engine itself and the margin of 4.0 GiB: raise memory.cap or "
        "lower memory.margin"
    )
    assert warned(memory=replace(memory, base=8 * GIB - 1)) == []
    assert warned(memory=replace(memory, guard=False)) == []


@pytest.mark.parametrize("state", ["failed", "restarting", "hung"])
def test_an_engine_in_trouble_is_a_warning_with_its_cause(state: str):
    assert warned(engine=EngineState("mlx", state, "signal 6")) == [f"its engine is {state}: signal 6"]


@pytest.mark.parametrize("state", [NodeState.SUSPECT, NodeState.LOST, NodeState.PAUSED, NodeState.DRAINING])
def test_list_warnings_reports_an_unarmed_gate_of_ready_nodes_only(state: NodeState):
    assert list_warnings(a_view(state, armed=False)) == []


def test_list_dangers_puts_own_warnings_first_without_duplicates():
    off = dataclasses.replace(
        a_view(), memory=a_memory(guard=False, margin=0, cap=24 * GIB), enforcement=Enforcement(MemoryLevel.OVER_HARD)
    )
    assert list_dangers(off) == [
        "memory.guard is off: its memory can exceed the cap",
        "memory.margin is 0: no memory is kept for short-lived buffers",
        "it is over its cap of 24.0 GiB minus leases",
    ]
    said = Enforcement(MemoryLevel.OVER_SOFT, warnings=("memory.margin is 0: a spike may panic",))
    assert list_dangers(dataclasses.replace(off, enforcement=said)) == [
        "memory.margin is 0: a spike may panic",
        "memory.guard is off: its memory can exceed the cap",
    ]
    said = Enforcement(MemoryLevel.OVER_SOFT, warnings=("memory.guard is off: no request is refused",))
    assert list_dangers(dataclasses.replace(off, enforcement=said)) == [
        "memory.guard is off: no request is refused",
        "memory.margin is 0: no memory is kept for short-lived buffers",
    ]
    unknown = dataclasses.replace(a_view(), memory=a_memory(margin=0, cap=0))
    assert list_dangers(unknown) == [], "a node without limits yet"


def test_a_row_of_a_node_has_every_value_in_its_place():
    """Every number of the report differs, because a swap of two fields must fail."""
    pause = Sharing("idle", paused=True, why="in use", until=123.0, by_hand=True)
    cache = replace(DISTINCT.engine.cache, evicted=(b"\x01\xab", b"\xff"))
    report = replace(DISTINCT, sharing=pause, engine=replace(DISTINCT.engine, cache=cache))
    seen = build_node_view(report, node=NodeId("n1"), name="a", state="ready", reported_at=0.0)
    member = Member(NodeId("n1"), NodeState.PAUSED, 0.0, cordoned=True, reason="paused by hand")
    hardware = Hardware("M4 Max", 7001, 16, "macOS 26", "3.13")
    row = MemberRow(NodeId("n1"), "studio", "m1", hardware, "ab", 7002.0, labels=("fast",))
    found = build_node_row(seen, member, row, NodeFacts(True, "1.2.3", 5, 7003, 7004.5))
    models, video = found.pop("models"), found.pop("video")
    assert found == {
        "id": "n1",
        "name": "studio",
        "state": "paused",
        "reason": "paused by hand",
        "cordoned": True,
        "sharing": {"when": "idle", "paused": True, "why": "in use", "until": 123.0, "by_hand": True},
        "labels": ["fast"],
        "chip": "M4 Max",
        "memory": 7001,
        "system": "macOS 26",
        "version": "1.2.3",
        "protocol": 5,
        "disk": {"free": 0, "total": 0, "folder": ""},
        "cap": 1001,
        "ceiling": 1002,
        "margin": 1003,
        "phys": 1004,
        "active": 1005,
        "recent": 1006,
        "current": 1007,
        "reserved": 1008,
        "headroom": -1009,
        "reusable": 1000,
        "leases": 1010,
        "bound_by": "dynamic",
        "gate_armed": True,
        "guard": True,
        "source": "phys_footprint",
        "age": 0.25,
        "base": 1012,
        "cache": 1013,
        "peak": 1014,
        "reserve": 1015,
        "cap_bound_by": "",
        "remedy": "",
        "tier": "safe",
        "system_memory": {"available": 4001, "pressure": "warn", "source": "meminfo", "age": 0.75, "worker": 4002},
        "enforcement": {
            "level": "over_soft",
            "phys": 5001,
            "highest": 5002,
            "interval": 5003,
            "polls": 5004,
            "over_caps": 5005,
            "kills": 5006,
            "warnings": [],
        },
        "in_flight": 7003,
        "running": 2002,
        "waiting": 2003,
        "heard_seconds": 7004.5,
        "joined": 7002.0,
        "engine": {
            "kind": "mlx",
            "state": "hung",
            "cause": "stuck",
            "restarts": 2001,
            "rows": 2023,
            "recycles": 2022,
            "wired": 2024,
            "leaked": 2025,
            "counts": {
                "checks": 2005,
                "refusals": 2006,
                "forwards": 2007,
                "steps": 2008,
                "failures": 2009,
                "sheds": 2010,
                "evictions": 2011,
                "shrinks": 2012,
                "preemptions": 2013,
                "overs": 2014,
                "departures": 2015,
                "prefill_tokens": 2111,
                "returned_tokens": 2112,
                "recomputed_tokens": 2113,
            },
            "cache": {
                "nbytes": 2016,
                "entries": 2017,
                "hits": 2018,
                "hit_tokens": 2019,
                "stores": 2020,
                "evictions": 2021,
                "evicted": ["01ab", "ff"],
                "disk_bytes": 2101,
                "disk_files": 2102,
                "disk_hits": 2103,
                "disk_hit_tokens": 2104,
                "disk_read_bytes": 2105,
                "disk_saves": 2106,
                "disk_persisted": 2107,
                "disk_drops": 2108,
                "disk_errors": 2109,
                "disk_evictions": 2110,
                "store": "s",
                "disk_waiting": 2112,
                "disk_quota": 2113,
                "disk_budget": 2114,
                "models": [
                    {
                        "model": "m",
                        "nbytes": 2115,
                        "entries": 2116,
                        "hits": 2117,
                        "disk_bytes": 2118,
                        "disk_files": 2119,
                        "disk_hits": 2120,
                    }
                ],
            },
        },
    }
    assert (video["ready"], video["allowed"]) == (False, False)
    assert {one["name"]: (one["model"], one["cause"], one["progress"]) for one in models} == {
        "read": ("loaded", "", 1.0),
        "reading": ("loading", "", 0.375),
        "broken": ("failed", "no such file", 0.0),
        "first": ("known", "", 0.0),
        "second": ("known", "", 0.0),
    }
    (read,) = [one for one in models if one["name"] == "read"]
    assert read == {
        "name": "read",
        "loaded": True,
        "model": "loaded",
        "cause": "",
        "progress": 1.0,
        "weights": 3001,
        "context": 4096,
        "prefill_speed": 1000.0,
        "decode_speed": 50.0,
        "measured": None,
    }


@pytest.mark.parametrize(("armed", "guard"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_gate_is_armed_only_with_its_guard_on(*, armed: bool, guard: bool):
    view = dataclasses.replace(a_view(), memory=replace(a_memory(), armed=armed, guard=guard))
    row = MemberRow(NodeId("n1"), "studio", "m1", Hardware(), "ab", 0.0)
    found = build_node_row(view, Member(NodeId("n1"), NodeState.READY, 0.0), row, NodeFacts(True, "", 0, 0, None))
    assert (found["gate_armed"], found["guard"]) == (armed and guard, guard)


def test_a_node_that_never_reported_shows_no_numbers_of_its_memory():
    row = MemberRow(NodeId("n1"), "studio", "m1", Hardware(), "ab", 0.0)
    found = build_node_row(
        a_view(), Member(NodeId("n1"), NodeState.JOINING, 0.0), row, NodeFacts(False, "", 0, 0, None)
    )
    empty = (found["phys"], found["current"], found["headroom"], found["heard_seconds"], found["engine"]["state"])
    assert empty == (None, None, None, None, "")


def test_a_loaded_model_is_loaded_although_its_files_have_changed():
    changed = a_model(loaded=True, cause="the files have changed")
    assert get_model_state(changed) == {"model": "loaded", "cause": "", "progress": 1.0}


def test_get_measured_memory_returns_every_field():
    model = a_model(profiled=True, max_context=1, max_batch=2, kv_per_token=3, observed=4, residual=5, covered=6)
    assert get_measured_memory(model) == {
        "max_context": 1,
        "max_batch": 2,
        "kv_per_token": 3,
        "transient": 4,
        "residual": 5,
        "covered": 6,
    }
    assert get_measured_memory(replace(model, profiled=False)) is None


def test_speeds_have_one_decimal():
    speeds = get_speeds(a_model(prefill_speed=1234.56, decode_speed=9.87))
    assert speeds == {"prefill_speed": 1234.6, "decode_speed": 9.9}

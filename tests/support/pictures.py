"""Pictures of pools from which metrics are read: honest ones of any size, and the worst that a node can report."""

import math
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as changed

from coordinator.metrics.node_snapshot import NodeSnapshot, sort_by_priority
from coordinator.metrics.pool_snapshot import LinkCounts, PoolSnapshot, ProcessMetrics
from coordinator.models.wish_counters import ActionOutcome, WishCounters, WishSnapshot
from coordinator.video.metrics import VideoCounters, VideoSnapshot
from router.dispatch.counters import Counters
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.sanitize_report import build_node_view
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.enforcer_report import Enforcement
from wire.frames import Report
from wire.histogram import PREDICTED_BOUNDS, TRANSIENT_BOUNDS, GateMeasures, HistogramSnapshot, NodeMeasures
from wire.identity import NodeId
from wire.machine import SystemMemory
from wire.report import CacheState, EngineCounters, EngineState, Memory, MemoryLevel, Model, ModelCache
from wire.units import GIB

NOW = 1000.0
WALL = 1_800_000_000.0
HUGE = 2**63 - 1
MEASURES = NodeMeasures(
    GateMeasures(
        (("prefill", 3), ("join", 3)),
        (("no_headroom", 1),),
        HistogramSnapshot((1,) * (len(PREDICTED_BOUNDS) + 1), 8.0),
        HistogramSnapshot((1,) * (len(TRANSIENT_BOUNDS) + 1), 8e9),
    ),
    1.5,
    50_000_000,
)

DISTINCT = Report(
    1,
    Memory(
        cap=1001,
        ceiling=1002,
        margin=1003,
        phys=1004,
        active=1005,
        recent=1006,
        current=1007,
        reserved=1008,
        headroom=-1009,
        leases=1010,
        bound_by="dynamic",
        armed=True,
        source="phys_footprint",
        age=0.25,
        total=1011,
        base=1012,
        reusable=1000,
        cache=1013,
        peak=1014,
        reserve=1015,
    ),
    EngineState(
        "mlx",
        "hung",
        "stuck",
        restarts=2001,
        running=2002,
        waiting=2003,
        queued_tokens=2004,
        counts=EngineCounters(
            checks=2005,
            refusals=2006,
            forwards=2007,
            steps=2008,
            failures=2009,
            sheds=2010,
            evictions=2011,
            shrinks=2012,
            preemptions=2013,
            overs=2014,
            departures=2015,
            prefill_tokens=2111,
            returned_tokens=2112,
            recomputed_tokens=2113,
        ),
        cache=CacheState(
            *(2016, 2017, 2018, 2019, 2020, 2021, (), 2101, 2102, 2103, 2104, 2105, 2106, 2107, 2108, 2109, 2110, "s"),
            disk_waiting=2112,
            disk_quota=2113,
            disk_budget=2114,
            models=(ModelCache("m", 2115, 2116, 2117, 2118, 2119, 2120),),
        ),
        recycles=2022,
        rows=2023,
        wired=2024,
        leaked=2025,
    ),
    (
        a_model("read", loaded=True, weights=3001),
        a_model("reading", loaded=False, loading=True, progress=0.375, weights=3002),
        a_model("broken", loaded=False, cause="no such file", weights=3003),
        a_model("first", loaded=False, weights=3004),
        a_model("second", loaded=False, weights=3005),
    ),
    system=SystemMemory(4001, "warn", "meminfo", 0.75, 4002),
    enforcement=Enforcement(
        MemoryLevel.OVER_SOFT,
        phys=5001,
        highest=5002,
        interval=5003,
        tier="safe",
        polls=5004,
        over_caps=5005,
        kills=5006,
    ),
    illegal_events=6003,
)
"""A report in which every field has a different number, to detect a swap of two."""


def view(name: str = "a", models: int = 1, report: Report | None = None, **changes: Any) -> NodeView:
    """Return a node's view from an honest report, or from a given one."""
    honest = Report(
        1,
        a_memory(total=64 * GIB, source="statm", base=GIB),
        EngineState("mlx", "ready", counts=EngineCounters(6, 1, 6, 100)),
        tuple(a_model(f"model-{number}", profiled=True, max_context=4096) for number in range(models)),
        system=SystemMemory(8 * GIB, "normal", "meminfo", 0.5),
        enforcement=Enforcement(MemoryLevel.OK, 4 * GIB, 5 * GIB, 5 * GIB),
    )
    facts: dict[str, Any] = {"state": "ready", "reported_at": NOW - 1} | changes
    return build_node_view(report or honest, node=NodeId(name), name=name, **facts)


def lying(models: tuple[Model, ...] = ()) -> Report:
    """Return a report with values that no machine can have."""
    memory = changed(
        a_memory(),
        cap=HUGE,
        ceiling=-1,
        margin=-HUGE,
        phys=-1,
        active=HUGE,
        recent=-5,
        current=HUGE,
        reserved=HUGE,
        headroom=HUGE,
        age=math.nan,
        source='x"\n\\',
        bound_by="\x1b[31m",
        total=-1,
        base=HUGE,
        reserve=-HUGE,
    )
    engine = EngineState(
        '"}\n evil 1',
        "exploded\n",
        restarts=HUGE,
        running=-3,
        queued_tokens=HUGE,
        counts=EngineCounters(-1, HUGE, -1, HUGE),
        cache=CacheState(-1, HUGE, -1, HUGE),
    )
    system = SystemMemory(-1, 'a"b', "x", math.inf, -5)
    return Report(
        -1,
        memory,
        engine,
        models,
        -5,
        system=system,
        enforcement=Enforcement(77, -1, HUGE, None, "x", "y", '"\n', ("z",), HUGE, HUGE, HUGE),
    )


def node_picture(seen: NodeView, measures: NodeMeasures | None = MEASURES) -> NodeSnapshot:
    """Return the picture of a node."""
    about = ("Apple M3 Max", "macOS 15.1", "0.1.0")
    return NodeSnapshot(seen, WALL - 1, WALL, about, tuple(sort_by_priority(seen)), measures)


def busy_counters(models: int, nodes: int) -> Counters:
    """Return counters in which everything was counted."""
    counters = Counters()
    for number in range(models):
        name = f"model-{number}"
        for outcome in ("ok", "cancelled", "no_headroom", "node_lost"):
            counters.count_end(outcome, name, 1.0)
        counters.count_first_token(NodeId("n0"), name, 10, 0.2)
        counters.add_key_tokens("k1", name, 20)
        for at in (1.0, 1.02):
            counters.record_decode_step(NodeId("n0"), name, 1, 2, at)
    for number in range(nodes):
        counters.count_attempt(NodeId(f"n{number}"), first=True, resumed=False)
        counters.count_generated(NodeId(f"n{number}"), 10)
    for status in (200, 400, 401, 404, 429, 499, 503):
        counters.count_answer(status)
    counters.count_queue_exit(0.5)
    counters.count_upstream("office", "ok", 10, 5)
    counters.placement.observe(0.00003)
    return counters


def busy_wishes(models: int) -> WishSnapshot:
    """Make the metrics of a wish for every model."""
    names = [f"model-{at}" for at in range(models)]
    ended = {(name, ActionOutcome.DONE): 3 for name in names}
    return WishSnapshot(WishCounters(ended, dict(ended)), dict.fromkeys(names, (2, 1)))


def busy_video() -> VideoSnapshot:
    """Return the picture of videos with every event."""
    counters = VideoCounters({"completed": 2, "failed": 1, "cancelled": 1}, {"worker_lost": 1}, 10.0)
    for buckets in (counters.queue_seconds, counters.run_seconds, counters.confirm_seconds):
        buckets.observe(0.1)
    states = {"queued": 1, "leasing": 0, "in_progress": 1, "finalizing": 0}
    return VideoSnapshot(counters, states, 3.0, 1_000_000, {NodeId("n0"): 0.5}, used=True)


def pool_picture(nodes: int = 3, models: int = 2, **changes: Any) -> PoolSnapshot:
    """Return the picture of a pool with every event."""
    seen = ClusterView(tuple(view(f"n{number}", models) for number in range(nodes)))
    members = [node.id for node in seen.nodes]
    lives: dict[str, tuple[float, float]] = dict.fromkeys(
        ("authority", "coordinator", "endpoint"), (WALL - 86400.0, WALL + 86400.0 * 89)
    )
    picture = PoolSnapshot(
        version="0.1.0",
        python="3.11.7",
        wall=WALL,
        now=NOW,
        view=seen,
        states={"ready": nodes},
        self_suspect=False,
        unwritten=0,
        counters=busy_counters(models, nodes),
        keys={"k1": "laptop"},
        in_flight=dict.fromkeys(members, 2),
        unacknowledged=dict.fromkeys(members, GIB),
        leaks=0,
        barred=frozenset(),
        opened_breakers=0,
        waiting=1,
        queue_limit=64,
        oldest_wait_seconds=0.5,
        keys_refused=0,
        certificates=lives,
        node_certificates=dict.fromkeys(members, (WALL - 86400.0, WALL + 86400.0 * 89)),
        links=LinkCounts(nodes, 0, nodes, 0),
        conditions={"GateInert": False},
        process=ProcessMetrics(WALL - 60, 1.0, 100_000_000, 30, 8192),
        video=busy_video(),
        wishes=busy_wishes(models),
    )
    return replace(picture, **changes)

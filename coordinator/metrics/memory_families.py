"""Metric families of a node's memory and of its gate."""

from collections.abc import Callable, Iterable

from coordinator.metrics.families import (
    HistogramValue,
    MetricFamily,
    MetricKind,
    Row,
    build_single_row,
    build_state_row,
    create_counter,
    create_gauge,
    join_quoted,
    limit_to_known,
)
from coordinator.metrics.node_snapshot import NodeSnapshot
from wire.histogram import PREDICTED_BOUNDS, TRANSIENT_BOUNDS, GateMeasures, HistogramSnapshot
from wire.refusals import RefusalCode

SITES = ("preflight", "prefill", "join", "grow", "load", "embed", "probe", "restore")
"""Places in the engine at which the gate checks, as label values; any other place becomes `families.OTHER`."""
TERMS = ("static", "setting", "metal", "container", "dynamic", "leases", "unreadable")
"""Terms that can limit the ceiling, as label values; any other term becomes `families.OTHER`."""
SOURCES = ("phys_footprint", "statm", "scripted")
"""Sources of the footprint, as label values; any other source becomes `families.OTHER`."""
PRESSURES = ("normal", "warn", "critical")
"""Memory pressures of the system, as label values; any other pressure becomes `families.OTHER`."""
REASONS = (
    RefusalCode.NO_ROOM.value,
    RefusalCode.TOO_LARGE.value,
    RefusalCode.UNREADABLE.value,
    RefusalCode.NOT_READY.value,
)
"""Reasons of the gate's refusals, as label values; any other reason becomes `families.OTHER`."""
_G, _C = MetricKind.GAUGE, MetricKind.COUNTER
_READABLE = "while the footprint can be read"
_WHILE_REPORTED = "while the system reports the value"


def _count_known(pairs: Iterable[tuple[str, int]], known: tuple[str, ...]) -> list[Row]:
    """Return a row for each value of a closed set, and a row for the sum of all other values, if any."""
    sums = dict.fromkeys(known, 0)
    for name, count in pairs:
        name = limit_to_known(name, known)
        sums[name] = sums.get(name, 0) + count
    return [((name,), count) for name, count in sums.items()]


def _build_check_rows(snapshot: NodeSnapshot) -> list[Row]:
    """Return checks by site, or the total of the report if the node sent no measurements."""
    if snapshot.measures is not None:
        return _count_known(snapshot.measures.gate.checks, SITES)
    return [(("all",), snapshot.view.engine.counts.checks)]


def _build_refusal_rows(snapshot: NodeSnapshot) -> list[Row]:
    if snapshot.measures is not None:
        return _count_known(snapshot.measures.gate.refusals, REASONS)
    return [(("all",), snapshot.view.engine.counts.refusals)]


def _read_distribution(
    bounds: tuple[float, ...], read: Callable[[GateMeasures], HistogramSnapshot]
) -> Callable[[NodeSnapshot], list[Row]]:
    def rows(snapshot: NodeSnapshot) -> list[Row]:
        return (
            [] if snapshot.measures is None else build_single_row(HistogramValue(bounds, read(snapshot.measures.gate)))
        )

    return rows


MEMORY: tuple[MetricFamily[NodeSnapshot], ...] = (
    create_gauge("node_memory_total_bytes", "RAM of the machine.", lambda p: p.view.memory.total),
    create_gauge("node_memory_cap_bytes", "Memory that the engine may use.", lambda p: p.view.memory.cap),
    create_gauge(
        "node_memory_ceiling_bytes",
        "Cap minus leases, or the memory that the system can spare, whichever is lower.",
        lambda p: p.view.memory.ceiling,
    ),
    MetricFamily(
        "node_memory_ceiling_bound",
        _G,
        "Term that limits the ceiling; always 1.",
        lambda p: build_state_row(p.view.memory.bound_by, TERMS),
        (("term", join_quoted(TERMS)),),
    ),
    create_gauge(
        "node_memory_margin_bytes", "Memory kept free for short-lived buffers.", lambda p: p.view.memory.margin
    ),
    create_gauge(
        "node_memory_phys_bytes",
        "Memory that the kernel charges to the engine.",
        lambda p: p.view.memory.phys,
        _READABLE,
    ),
    create_gauge("node_memory_active_bytes", "Active memory, counted by MLX.", lambda p: p.view.memory.active),
    create_gauge("node_memory_recent_peak_bytes", "Highest reading of the last polls.", lambda p: p.view.memory.recent),
    create_gauge(
        "node_memory_current_bytes",
        "Highest of active, phys and recent peak; the gate compares this value.",
        lambda p: p.view.memory.current,
        _READABLE,
    ),
    create_gauge(
        "node_memory_reserved_bytes",
        "Reserved for accepted requests and not used yet.",
        lambda p: p.view.memory.reserved,
    ),
    create_gauge(
        "node_memory_headroom_bytes",
        "Ceiling minus margin, current and reserved; may be negative.",
        lambda p: p.view.memory.headroom,
        _READABLE,
    ),
    create_gauge(
        "node_memory_reusable_bytes",
        "Part of current that is freed before a request is refused.",
        lambda p: p.view.memory.reusable,
    ),
    create_gauge(
        "node_memory_base_bytes", "Footprint of the engine with no model loaded.", lambda p: p.view.memory.base
    ),
    create_gauge(
        "node_memory_reserve_bytes", "Emergency reserve, freed first under pressure.", lambda p: p.view.memory.reserve
    ),
    create_gauge("node_memory_mlx_cache_bytes", "Free buffers in the MLX cache.", lambda p: p.view.memory.cache),
    create_gauge(
        "node_memory_mlx_peak_bytes",
        "Peak of active memory since MLX's peak counter was last reset.",
        lambda p: p.view.memory.peak,
    ),
    create_gauge(
        "node_memory_lease_bytes",
        "Memory leased to a video job or a quantization, subtracted from the cap.",
        lambda p: p.view.memory.leases,
    ),
    create_gauge(
        "video_worker_phys_bytes",
        "Footprint of the process with the lease, a video worker or a quantization; 0 without one.",
        lambda p: p.view.system.worker,
    ),
    create_gauge(
        "node_memory_level",
        "Memory level: 0 unknown, 1 ok, 2 over soft, 3 over hard.",
        lambda p: p.view.enforcement.level,
    ),
    create_gauge(
        "node_memory_reading_timestamp_seconds",
        "Time of the agent's last reading, Unix time.",
        lambda p: p.reported_at - p.view.system.age,
    ),
    MetricFamily(
        "node_memory_reading_source",
        _G,
        "Source of the footprint reading; always 1.",
        lambda p: build_state_row(p.view.memory.source, SOURCES),
        (("source", join_quoted(SOURCES)),),
    ),
    create_gauge(
        "node_memory_engine_phys_bytes",
        "Footprint of the engine, read by the agent.",
        lambda p: p.view.enforcement.phys,
        _READABLE,
    ),
    create_gauge(
        "node_system_available_bytes",
        "Memory that can be allocated without displacing other programs.",
        lambda p: p.view.system.available,
        _WHILE_REPORTED,
    ),
    MetricFamily(
        "node_system_pressure",
        _G,
        "Memory pressure reported by the system; always 1.",
        lambda p: build_state_row(p.view.system.pressure, PRESSURES) if p.view.system.pressure else [],
        (("pressure", join_quoted(PRESSURES)),),
        _WHILE_REPORTED,
    ),
    create_counter("node_memory_polls", "Polls of the enforcer.", lambda p: p.view.enforcement.polls),
    create_counter(
        "node_memory_over_cap",
        "Times that the engine went over its cap.",
        lambda p: p.view.enforcement.over_caps,
    ),
    create_counter(
        "node_memory_kills", "Engines killed because of their memory use.", lambda p: p.view.enforcement.kills
    ),
)
GATE: tuple[MetricFamily[NodeSnapshot], ...] = (
    create_gauge(
        "gate_armed",
        "1 while the gate is armed: limits are set, the guard is on, and readings are live.",
        lambda p: p.view.memory.armed and p.view.memory.guard,
    ),
    create_gauge(
        "gate_guard",
        "0 if memory.guard is off: no request is refused for memory.",
        lambda p: p.view.memory.guard,
    ),
    MetricFamily(
        "gate_checks",
        _C,
        "Checks by the gate.",
        _build_check_rows,
        (("site", f"{join_quoted(SITES)}; `all` if the node reports only a total"),),
    ),
    MetricFamily(
        "gate_refusals",
        _C,
        "Refusals by the gate.",
        _build_refusal_rows,
        (("reason", f"{join_quoted(REASONS)}; `all` if the node reports only a total"),),
    ),
    MetricFamily(
        "gate_predicted_peak_ratio",
        MetricKind.HISTOGRAM,
        "Predicted peak divided by the ceiling, per check.",
        _read_distribution(PREDICTED_BOUNDS, lambda gate: gate.predicted),
    ),
    MetricFamily(
        "gate_transient_bytes",
        MetricKind.HISTOGRAM,
        "Rise of MLX memory during a prefill or a join.",
        _read_distribution(TRANSIENT_BOUNDS, lambda gate: gate.transient),
    ),
    create_counter(
        "gate_prefill_chunks_shrunk",
        "Prefill chunks that were made smaller to fit.",
        lambda p: p.view.engine.counts.shrinks,
    ),
)

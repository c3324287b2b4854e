"""Metric families of one node, from its newest report and its own measurements.

The families have no node label: Prometheus attaches it. Reports have passed `router.placement.cluster_view`, which
removes impossible numbers. `sanitize_measures` does the same for measurements.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite

from coordinator.metrics.families import (
    MAX_MODELS_PER_NODE,
    HistogramValue,
    MetricFamily,
    MetricKind,
    Row,
    build_single_row,
    build_state_row,
    limit_to_known,
)
from router.placement.cluster_view import NodeView
from wire.histogram import PREDICTED_BOUNDS, TRANSIENT_BOUNDS, GateMeasures, HistogramSnapshot, NodeMeasures
from wire.refusals import RefusalCode
from wire.report import Model

SITES = ("preflight", "prefill", "join", "grow", "load", "probe")
TERMS = ("static", "setting", "metal", "container", "dynamic", "leases", "unreadable")
SOURCES = ("phys_footprint", "statm", "scripted")
ENGINE_STATES = ("starting", "ready", "hung", "restarting", "failed")
PRESSURES = ("normal", "warn", "critical")
KINDS = ("mlx", "scripted")
TIERS = ("safe", "balanced", "aggressive")
MODEL_STATES = ("loaded", "loading", "known", "failed")
REASONS = (
    RefusalCode.NO_ROOM.value,
    RefusalCode.TOO_LARGE.value,
    RefusalCode.UNREADABLE.value,
    RefusalCode.NOT_READY.value,
)
MAX_COUNT = 2**53
"""Largest count that is exact as a float64."""


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """Metrics of one node at one moment. Times are in Unix seconds."""

    view: NodeView
    reported_at: float
    """Arrival of the report."""
    wall: float
    """Current time."""
    host: tuple[str, str, str] = ("", "", "")
    """Chip, operating system and version of macpool."""
    models: tuple[Model, ...] = ()
    """Models with their own series."""
    measures: NodeMeasures | None = None
    """Measurements of the node; None if the node was not asked or sent invalid ones."""


def sanitize_measures(measures: NodeMeasures) -> NodeMeasures:
    """Return a node's measurements with impossible numbers replaced or limited."""
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


def _join_quoted(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


_MODEL_MEANING = f"a model of this node; {MAX_MODELS_PER_NODE} at most, those first that are loaded"


def _limit_count(count: int) -> int:
    return min(max(0, count), MAX_COUNT)


def _sanitize_tally(tally: HistogramSnapshot, bounds: int) -> HistogramSnapshot:
    if len(tally.counts) != bounds + 1 or not isfinite(tally.total) or tally.total < 0:
        return HistogramSnapshot((0,) * (bounds + 1))
    return HistogramSnapshot(tuple(map(_limit_count, tally.counts)), tally.total)


def _count_known(pairs: Iterable[tuple[str, int]], known: tuple[str, ...]) -> list[Row]:
    """Return a row for each value of a closed set, and a row for the sum of all other values, if any."""
    sums = dict.fromkeys(known, 0)
    for name, count in pairs:
        name = limit_to_known(name, known)
        sums[name] = sums.get(name, 0) + count
    return [((name,), count) for name, count in sums.items()]


def sort_by_priority(view: NodeView) -> list[Model]:
    """Return a node's models by their priority for series: loaded and loading models first, then by name."""
    return sorted(view.models.values(), key=lambda model: (not (model.loaded or model.loading), model.name))


def _get_state(model: Model) -> str:
    if model.loaded:
        return "loaded"
    return "loading" if model.loading else "failed" if model.cause else "known"


def _count_model_states(view: NodeView) -> list[Row]:
    counts: dict[str, int] = dict.fromkeys(MODEL_STATES, 0)
    for model in view.models.values():
        counts[_get_state(model)] += 1
    return [((state,), count) for state, count in counts.items()]


def _build_check_rows(snapshot: NodeSnapshot) -> list[Row]:
    """Return checks by site, or the total of the report if the node sent no measurements."""
    if snapshot.measures is not None:
        return _count_known(snapshot.measures.gate.checks, SITES)
    return [(("all",), snapshot.view.engine.counts.checks)]


def _build_refusal_rows(snapshot: NodeSnapshot) -> list[Row]:
    if snapshot.measures is not None:
        return _count_known(snapshot.measures.gate.refusals, REASONS)
    return [(("all",), snapshot.view.engine.counts.refusals)]


Read = Callable[[NodeSnapshot], float | None]


def _create_gauge(name: str, meaning: str, read: Read, when: str = "") -> MetricFamily[NodeSnapshot]:
    return MetricFamily(name, MetricKind.GAUGE, meaning, lambda picture: build_single_row(read(picture)), when=when)


def _create_counter(name: str, meaning: str, read: Read) -> MetricFamily[NodeSnapshot]:
    return MetricFamily(name, MetricKind.COUNTER, meaning, lambda picture: build_single_row(read(picture)))


def _read_agent(read: Callable[[NodeMeasures], float]) -> Read:
    return lambda picture: None if picture.measures is None else read(picture.measures)


def _read_distribution(
    bounds: tuple[float, ...], read: Callable[[GateMeasures], HistogramSnapshot]
) -> Callable[[NodeSnapshot], list[Row]]:
    def rows(snapshot: NodeSnapshot) -> list[Row]:
        return (
            [] if snapshot.measures is None else build_single_row(HistogramValue(bounds, read(snapshot.measures.gate)))
        )

    return rows


_G, _C = MetricKind.GAUGE, MetricKind.COUNTER
_READABLE = "while the footprint can be read"
_WHILE_REPORTED = "while the system reports the value"

ABOUT: tuple[MetricFamily[NodeSnapshot], ...] = (
    MetricFamily(
        "node_info",
        _G,
        "Machine and software of the node; always 1.",
        lambda p: [
            ((*p.host, limit_to_known(p.view.engine.kind, KINDS), limit_to_known(p.view.enforcement.tier, TIERS)), 1.0)
        ],
        (
            ("chip", "as the machine reports it"),
            ("system", "as the machine reports it"),
            ("version", "of macpool"),
            ("engine", "`engine.kind`"),
            ("tier", "`memory.tier`"),
        ),
    ),
    _create_gauge(
        "node_report_timestamp_seconds", "Arrival of the node's newest report, Unix time.", lambda p: p.reported_at
    ),
    _create_counter("node_agent_cpu_seconds", "CPU time of the agent's process.", _read_agent(lambda m: m.agent_cpu)),
    _create_gauge("node_agent_phys_bytes", "Footprint of the agent's process.", _read_agent(lambda m: m.agent_phys)),
)
MEMORY: tuple[MetricFamily[NodeSnapshot], ...] = (
    _create_gauge("node_memory_total_bytes", "RAM of the machine.", lambda p: p.view.memory.total),
    _create_gauge("node_memory_cap_bytes", "Memory that the engine may use.", lambda p: p.view.memory.cap),
    _create_gauge(
        "node_memory_ceiling_bytes",
        "Cap minus leases, or the memory that the system can spare, whichever is lower.",
        lambda p: p.view.memory.ceiling,
    ),
    MetricFamily(
        "node_memory_ceiling_bound",
        _G,
        "Term that limits the ceiling; always 1.",
        lambda p: build_state_row(p.view.memory.bound_by, TERMS),
        (("term", _join_quoted(TERMS)),),
    ),
    _create_gauge(
        "node_memory_margin_bytes", "Memory kept free for short-lived buffers.", lambda p: p.view.memory.margin
    ),
    _create_gauge(
        "node_memory_phys_bytes",
        "Memory that the kernel charges to the engine.",
        lambda p: p.view.memory.phys,
        _READABLE,
    ),
    _create_gauge("node_memory_active_bytes", "Active memory, counted by MLX.", lambda p: p.view.memory.active),
    _create_gauge(
        "node_memory_recent_peak_bytes", "Highest reading of the last polls.", lambda p: p.view.memory.recent
    ),
    _create_gauge(
        "node_memory_current_bytes",
        "Highest of active, phys and recent peak; the gate compares this value.",
        lambda p: p.view.memory.current,
        _READABLE,
    ),
    _create_gauge(
        "node_memory_reserved_bytes",
        "Reserved for accepted requests and not used yet.",
        lambda p: p.view.memory.reserved,
    ),
    _create_gauge(
        "node_memory_headroom_bytes",
        "Ceiling minus margin, current and reserved; may be negative.",
        lambda p: p.view.memory.headroom,
        _READABLE,
    ),
    _create_gauge(
        "node_memory_reusable_bytes",
        "Part of current that is freed before a request is refused.",
        lambda p: p.view.memory.reusable,
    ),
    _create_gauge(
        "node_memory_base_bytes", "Footprint of the engine with no model loaded.", lambda p: p.view.memory.base
    ),
    _create_gauge(
        "node_memory_reserve_bytes", "Emergency reserve, freed first under pressure.", lambda p: p.view.memory.reserve
    ),
    _create_gauge("node_memory_mlx_cache_bytes", "Free buffers in the MLX cache.", lambda p: p.view.memory.cache),
    _create_gauge(
        "node_memory_mlx_peak_bytes",
        "Peak of active memory since MLX's peak counter was last reset.",
        lambda p: p.view.memory.peak,
    ),
    _create_gauge(
        "node_memory_lease_bytes",
        "Memory leased to video jobs, subtracted from the cap.",
        lambda p: p.view.memory.leases,
    ),
    _create_gauge(
        "video_worker_phys_bytes",
        "Footprint of the video worker; 0 without a worker.",
        lambda p: p.view.system.worker,
    ),
    _create_gauge(
        "node_memory_level",
        "Memory level: 0 unknown, 1 ok, 2 over soft, 3 over hard.",
        lambda p: p.view.enforcement.level,
    ),
    _create_gauge(
        "node_memory_reading_timestamp_seconds",
        "Time of the agent's last reading, Unix time.",
        lambda p: p.reported_at - p.view.system.age,
    ),
    MetricFamily(
        "node_memory_reading_source",
        _G,
        "Source of the footprint reading; always 1.",
        lambda p: build_state_row(p.view.memory.source, SOURCES),
        (("source", _join_quoted(SOURCES)),),
    ),
    _create_gauge(
        "node_memory_engine_phys_bytes",
        "Footprint of the engine, read by the agent.",
        lambda p: p.view.enforcement.phys,
        _READABLE,
    ),
    _create_gauge(
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
        (("pressure", _join_quoted(PRESSURES)),),
        _WHILE_REPORTED,
    ),
    _create_counter("node_memory_polls", "Polls of the enforcer.", lambda p: p.view.enforcement.polls),
    _create_counter(
        "node_memory_over_cap",
        "Times that the engine went over its cap.",
        lambda p: p.view.enforcement.over_caps,
    ),
    _create_counter(
        "node_memory_kills", "Engines killed because of their memory use.", lambda p: p.view.enforcement.kills
    ),
)
GATE: tuple[MetricFamily[NodeSnapshot], ...] = (
    _create_gauge(
        "gate_armed",
        "1 while the gate is armed: limits are set, the guard is on, and readings are live.",
        lambda p: p.view.memory.armed and p.view.memory.guard,
    ),
    _create_gauge(
        "gate_guard",
        "0 if memory.guard is off: no request is refused for memory.",
        lambda p: p.view.memory.guard,
    ),
    MetricFamily(
        "gate_checks",
        _C,
        "Checks by the gate.",
        _build_check_rows,
        (("site", f"{_join_quoted(SITES)}; `all` if the node reports only a total"),),
    ),
    MetricFamily(
        "gate_refusals",
        _C,
        "Refusals by the gate.",
        _build_refusal_rows,
        (("reason", f"{_join_quoted(REASONS)}; `all` if the node reports only a total"),),
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
    _create_counter(
        "gate_prefill_chunks_shrunk",
        "Prefill chunks that were made smaller to fit.",
        lambda p: p.view.engine.counts.shrinks,
    ),
)
ENGINE: tuple[MetricFamily[NodeSnapshot], ...] = (
    MetricFamily(
        "engine_state",
        _G,
        "State of the engine's process; always 1.",
        lambda p: build_state_row(p.view.engine.state, ENGINE_STATES),
        (("state", _join_quoted(ENGINE_STATES)),),
    ),
    MetricFamily(
        "engine_requests",
        _G,
        "Requests in the engine.",
        lambda p: [(("running",), p.view.engine.running), (("waiting",), p.view.engine.waiting)],
        (("state", "`running`, `waiting`"),),
    ),
    _create_gauge("engine_queued_tokens", "Prompt tokens waiting for prefill.", lambda p: p.view.engine.queued_tokens),
    _create_counter(
        "engine_forwards", "Prefills and joins; each follows a check.", lambda p: p.view.engine.counts.forwards
    ),
    _create_counter("engine_steps", "Decode steps.", lambda p: p.view.engine.counts.steps),
    _create_counter(
        "engine_failures", "Requests that failed with an engine fault.", lambda p: p.view.engine.counts.failures
    ),
    _create_counter(
        "engine_requests_evicted",
        "Requests aborted because the engine was over its cap.",
        lambda p: p.view.engine.counts.sheds,
    ),
    _create_counter(
        "engine_preemptions",
        "Requests that were preempted.",
        lambda p: p.view.engine.counts.preemptions,
    ),
    _create_counter(
        "engine_over_cap",
        "Forward passes after which the engine was over its cap.",
        lambda p: p.view.engine.counts.overs,
    ),
    _create_counter("engine_restarts", "Unplanned ends of the engine's process.", lambda p: p.view.engine.restarts),
    _create_counter(
        "engine_graceful_restarts",
        "Planned restarts of the engine because memory was not freed.",
        lambda p: p.view.engine.recycles,
    ),
    _create_gauge(
        "engine_leaked_wired_bytes",
        "Wired memory leaked by ended engines; a restart of the machine frees it.",
        lambda p: p.view.engine.leaked,
    ),
)
MODELS: tuple[MetricFamily[NodeSnapshot], ...] = (
    MetricFamily(
        "node_models",
        _G,
        "Models known to the node, by state.",
        lambda p: _count_model_states(p.view),
        (("state", _join_quoted(MODEL_STATES)),),
    ),
    MetricFamily(
        "model_loaded",
        _G,
        "1 where the model is in memory.",
        lambda p: [((model.name,), float(model.loaded)) for model in p.models],
        (("model", _MODEL_MEANING),),
    ),
    MetricFamily(
        "model_weights_bytes",
        _G,
        "Weights in memory.",
        lambda p: [((model.name,), model.weights) for model in p.models if model.loaded],
        (("model", _MODEL_MEANING),),
        "while loaded",
    ),
    MetricFamily(
        "model_load_progress_ratio",
        _G,
        "Share of the weights that is loaded.",
        lambda p: [((model.name,), model.progress) for model in p.models if model.loading],
        (("model", _MODEL_MEANING),),
        "during loading",
    ),
    _create_counter(
        "model_evictions", "Idle models unloaded to free memory.", lambda p: p.view.engine.counts.evictions
    ),
    _create_counter(
        "model_idle_unloads",
        "Models unloaded because they were idle.",
        lambda p: p.view.engine.counts.departures,
    ),
)
CACHE: tuple[MetricFamily[NodeSnapshot], ...] = (
    _create_gauge("prefix_cache_bytes", "Size of the prefix cache.", lambda p: p.view.engine.cache.nbytes),
    _create_gauge("prefix_cache_entries", "Prompts in the prefix cache.", lambda p: p.view.engine.cache.entries),
    _create_counter(
        "prefix_cache_hits", "Requests with a hit in the prefix cache.", lambda p: p.view.engine.cache.hits
    ),
    _create_counter(
        "prefix_cache_hit_tokens",
        "Prompt tokens taken from the prefix cache.",
        lambda p: p.view.engine.cache.hit_tokens,
    ),
    _create_counter("prefix_cache_inserts", "Prompts added to the prefix cache.", lambda p: p.view.engine.cache.stores),
    _create_counter(
        "prefix_cache_evictions", "Prompts evicted from the prefix cache.", lambda p: p.view.engine.cache.evictions
    ),
)
NODE = (*ABOUT, *MEMORY, *GATE, *ENGINE, *MODELS, *CACHE)

"""Metric families of one node, from its newest report and its own measurements.

They have no node label: Prometheus attaches it. Reports have passed `router.placement.cluster_view`, which removes
impossible numbers. `sanitize_measures` checks measurements.
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
    closed,
    one,
    state,
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
    heard: float
    """Arrival of the report."""
    wall: float
    """Current time."""
    about: tuple[str, str, str] = ("", "", "")
    """Chip, operating system and version of macpool."""
    models: tuple[Model, ...] = ()
    """Models with their own series."""
    measures: NodeMeasures | None = None
    """Measurements; None if the node was not asked."""


def sanitize_measures(told: NodeMeasures) -> NodeMeasures:
    """Return a node's measurements without impossible numbers."""
    gate = told.gate
    return NodeMeasures(
        GateMeasures(
            tuple((site, _count(count)) for site, count in gate.checks[:64]),
            tuple((reason, _count(count)) for reason, count in gate.refusals[:64]),
            _tally(gate.predicted, len(PREDICTED_BOUNDS)),
            _tally(gate.transient, len(TRANSIENT_BOUNDS)),
        ),
        told.agent_cpu if 0 <= told.agent_cpu < MAX_COUNT else 0.0,
        _count(told.agent_phys),
    )


def _told(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


_NAMED = f"a model of this node; {MAX_MODELS_PER_NODE} at most, those first that are loaded"


def _count(count: int) -> int:
    return min(max(0, count), MAX_COUNT)


def _tally(tally: HistogramSnapshot, bounds: int) -> HistogramSnapshot:
    if len(tally.counts) != bounds + 1 or not isfinite(tally.total) or tally.total < 0:
        return HistogramSnapshot((0,) * (bounds + 1))
    return HistogramSnapshot(tuple(map(_count, tally.counts)), tally.total)


def _counted(pairs: Iterable[tuple[str, int]], known: tuple[str, ...]) -> list[Row]:
    """Return a row for each value of a closed set, and one for all other values."""
    sums = dict.fromkeys(known, 0)
    for name, count in pairs:
        name = closed(name, known)
        sums[name] = sums.get(name, 0) + count
    return [((name,), count) for name, count in sums.items()]


def by_priority(view: NodeView) -> list[Model]:
    """Return a node's models in order of priority for series: loaded models first."""
    return sorted(view.models.values(), key=lambda model: (not (model.loaded or model.loading), model.name))


def _state(model: Model) -> str:
    if model.loaded:
        return "loaded"
    return "loading" if model.loading else "failed" if model.cause else "known"


def _model_states(view: NodeView) -> list[Row]:
    counts: dict[str, int] = dict.fromkeys(MODEL_STATES, 0)
    for model in view.models.values():
        counts[_state(model)] += 1
    return [((state,), count) for state, count in counts.items()]


def _checks(picture: NodeSnapshot) -> list[Row]:
    """Return checks by site, or their total from the report if the node sent no sites."""
    if picture.measures is not None:
        return _counted(picture.measures.gate.checks, SITES)
    return [(("all",), picture.view.engine.counts.checks)]


def _refusals(picture: NodeSnapshot) -> list[Row]:
    if picture.measures is not None:
        return _counted(picture.measures.gate.refusals, REASONS)
    return [(("all",), picture.view.engine.counts.refusals)]


Read = Callable[[NodeSnapshot], float | None]


def _gauge(name: str, meaning: str, read: Read, when: str = "") -> MetricFamily[NodeSnapshot]:
    return MetricFamily(name, MetricKind.GAUGE, meaning, lambda picture: one(read(picture)), when=when)


def _counter(name: str, meaning: str, read: Read) -> MetricFamily[NodeSnapshot]:
    return MetricFamily(name, MetricKind.COUNTER, meaning, lambda picture: one(read(picture)))


def _agent(read: Callable[[NodeMeasures], float]) -> Read:
    return lambda picture: None if picture.measures is None else read(picture.measures)


def _distribution(
    bounds: tuple[float, ...], read: Callable[[GateMeasures], HistogramSnapshot]
) -> Callable[[NodeSnapshot], list[Row]]:
    def rows(picture: NodeSnapshot) -> list[Row]:
        return [] if picture.measures is None else one(HistogramValue(bounds, read(picture.measures.gate)))

    return rows


_G, _C = MetricKind.GAUGE, MetricKind.COUNTER
_READABLE = "while the footprint can be read"
_TOLD = "while the system says so"

ABOUT: tuple[MetricFamily[NodeSnapshot], ...] = (
    MetricFamily(
        "node_info",
        _G,
        "The machine and what runs on it; always 1.",
        lambda p: [((*p.about, closed(p.view.engine.kind, KINDS), closed(p.view.enforcement.tier, TIERS)), 1.0)],
        (
            ("chip", "as the machine says"),
            ("system", "as the machine says"),
            ("version", "of macpool"),
            ("engine", "`engine.kind`"),
            ("tier", "`memory.tier`"),
        ),
    ),
    _gauge("node_report_timestamp_seconds", "When the node's newest report came, Unix time.", lambda p: p.heard),
    _counter("node_agent_cpu_seconds", "CPU time of the agent's process.", _agent(lambda m: m.agent_cpu)),
    _gauge("node_agent_phys_bytes", "Footprint of the agent's process.", _agent(lambda m: m.agent_phys)),
)
MEMORY: tuple[MetricFamily[NodeSnapshot], ...] = (
    _gauge("node_memory_total_bytes", "RAM of the machine.", lambda p: p.view.memory.total),
    _gauge("node_memory_cap_bytes", "The most that the engine may ever reach.", lambda p: p.view.memory.cap),
    _gauge(
        "node_memory_ceiling_bytes",
        "Cap less leases, or what the system can spare, if that is less.",
        lambda p: p.view.memory.ceiling,
    ),
    MetricFamily(
        "node_memory_ceiling_bound",
        _G,
        "Which term settles the ceiling; always 1.",
        lambda p: state(p.view.memory.bound_by, TERMS),
        (("term", _told(TERMS)),),
    ),
    _gauge("node_memory_margin_bytes", "Room kept for spikes that no reading sees.", lambda p: p.view.memory.margin),
    _gauge(
        "node_memory_phys_bytes",
        "Footprint of the engine as the kernel charges it.",
        lambda p: p.view.memory.phys,
        _READABLE,
    ),
    _gauge("node_memory_active_bytes", "Active memory as MLX counts it.", lambda p: p.view.memory.active),
    _gauge("node_memory_recent_bytes", "Highest reading of the last polls.", lambda p: p.view.memory.recent),
    _gauge(
        "node_memory_current_bytes",
        "What the gate compares: the highest of active, phys and recent.",
        lambda p: p.view.memory.current,
        _READABLE,
    ),
    _gauge("node_memory_reserved_bytes", "Promised to requests and not written yet.", lambda p: p.view.memory.reserved),
    _gauge(
        "node_memory_headroom_bytes",
        "Ceiling less margin, current and reserved; may be negative.",
        lambda p: p.view.memory.headroom,
        _READABLE,
    ),
    _gauge(
        "node_memory_reusable_bytes",
        "Part of current that is given back before anything is refused.",
        lambda p: p.view.memory.reusable,
    ),
    _gauge("node_memory_base_bytes", "Footprint of the engine before any model.", lambda p: p.view.memory.base),
    _gauge("node_memory_canary_bytes", "The last reserve, given up before all else.", lambda p: p.view.memory.canary),
    _gauge("node_memory_mlx_cache_bytes", "Free buffers that MLX keeps.", lambda p: p.view.memory.cache),
    _gauge(
        "node_memory_mlx_peak_bytes",
        "The most that was active since MLX was last asked to forget it.",
        lambda p: p.view.memory.peak,
    ),
    _gauge("node_memory_lease_bytes", "Leased to video jobs, taken off the cap.", lambda p: p.view.memory.leases),
    _gauge(
        "video_worker_phys_bytes",
        "Footprint of the process that lives on the leases; 0 where there is none.",
        lambda p: p.view.system.worker,
    ),
    _gauge(
        "node_memory_level",
        "How the node stands: 0 unknown, 1 ok, 2 over soft, 3 over hard.",
        lambda p: p.view.enforcement.level,
    ),
    _gauge(
        "node_memory_reading_timestamp_seconds",
        "When the agent last read the machine, Unix time.",
        lambda p: p.heard - p.view.system.age,
    ),
    MetricFamily(
        "node_memory_reading_source",
        _G,
        "Where the footprint is read; always 1.",
        lambda p: state(p.view.memory.source, SOURCES),
        (("source", _told(SOURCES)),),
    ),
    _gauge(
        "node_memory_engine_phys_bytes",
        "The engine's footprint as its agent reads it from outside.",
        lambda p: p.view.enforcement.phys,
        _READABLE,
    ),
    _gauge(
        "node_system_available_bytes",
        "What the system can give without pushing anyone out.",
        lambda p: p.view.system.available,
        _TOLD,
    ),
    MetricFamily(
        "node_system_pressure",
        _G,
        "The system's own word for its memory; always 1.",
        lambda p: state(p.view.system.pressure, PRESSURES) if p.view.system.pressure else [],
        (("pressure", _told(PRESSURES)),),
        _TOLD,
    ),
    _counter("node_memory_polls", "Looks of the enforcer.", lambda p: p.view.enforcement.polls),
    _counter(
        "node_memory_over_cap",
        "Times that the enforcer found the engine over its cap.",
        lambda p: p.view.enforcement.over_caps,
    ),
    _counter("node_memory_kills", "Engines that were ended for memory.", lambda p: p.view.enforcement.kills),
)
GATE: tuple[MetricFamily[NodeSnapshot], ...] = (
    _gauge(
        "gate_armed",
        "1 while the gate could refuse on facts: it has limits, they are on, its reading is live.",
        lambda p: p.view.memory.armed and p.view.memory.guard,
    ),
    _gauge(
        "gate_guard",
        "0 where memory.guard is off by name, and nothing is refused for memory.",
        lambda p: p.view.memory.guard,
    ),
    MetricFamily(
        "gate_checks",
        _C,
        "Questions to the gate.",
        _checks,
        (("site", f"{_told(SITES)}; `all` where the node tells no more"),),
    ),
    MetricFamily(
        "gate_refusals",
        _C,
        "Refusals by the gate.",
        _refusals,
        (("reason", f"{_told(REASONS)}; `all` where the node tells no more"),),
    ),
    MetricFamily(
        "gate_predicted_peak_ratio",
        MetricKind.HISTOGRAM,
        "Predicted peak as a share of the ceiling, of every check.",
        _distribution(PREDICTED_BOUNDS, lambda gate: gate.predicted),
    ),
    MetricFamily(
        "gate_transient_bytes",
        MetricKind.HISTOGRAM,
        "How far MLX rose in a prefill or a join above where it stood.",
        _distribution(TRANSIENT_BOUNDS, lambda gate: gate.transient),
    ),
    _counter(
        "gate_shrinks", "Pieces of prompts that were made smaller to fit.", lambda p: p.view.engine.counts.shrinks
    ),
)
ENGINE: tuple[MetricFamily[NodeSnapshot], ...] = (
    MetricFamily(
        "engine_state",
        _G,
        "State of the engine's process; always 1.",
        lambda p: state(p.view.engine.state, ENGINE_STATES),
        (("state", _told(ENGINE_STATES)),),
    ),
    MetricFamily(
        "engine_requests",
        _G,
        "Requests in the engine.",
        lambda p: [(("running",), p.view.engine.running), (("waiting",), p.view.engine.waiting)],
        (("state", "`running`, `waiting`"),),
    ),
    _gauge("engine_queued_tokens", "Prompt tokens that wait for their prefill.", lambda p: p.view.engine.queued_tokens),
    _counter("engine_forwards", "Prefills and joins; each follows a check.", lambda p: p.view.engine.counts.forwards),
    _counter("engine_steps", "Decode steps.", lambda p: p.view.engine.counts.steps),
    _counter("engine_failures", "Requests that ended in a fault.", lambda p: p.view.engine.counts.failures),
    _counter(
        "engine_sheds",
        "Requests that were ended because the engine stood over its cap.",
        lambda p: p.view.engine.counts.sheds,
    ),
    _counter(
        "engine_preemptions",
        "Requests that gave way to older ones and came back.",
        lambda p: p.view.engine.counts.preemptions,
    ),
    _counter(
        "engine_overs",
        "Forwards after which the engine found itself over its cap.",
        lambda p: p.view.engine.counts.overs,
    ),
    _counter("engine_restarts", "Deaths of the engine's process.", lambda p: p.view.engine.restarts),
    _counter(
        "engine_recycles",
        "Engines replaced in good health, because memory did not come back.",
        lambda p: p.view.engine.recycles,
    ),
    _gauge(
        "engine_leaked_bytes",
        "Wired memory that ended engines left behind, until the machine restarts.",
        lambda p: p.view.engine.leaked,
    ),
)
MODELS: tuple[MetricFamily[NodeSnapshot], ...] = (
    MetricFamily(
        "node_models",
        _G,
        "Models that the node knows, by how it stands to them.",
        lambda p: _model_states(p.view),
        (("state", _told(MODEL_STATES)),),
    ),
    MetricFamily(
        "model_loaded",
        _G,
        "1 where the model is in memory.",
        lambda p: [((model.name,), float(model.loaded)) for model in p.models],
        (("model", _NAMED),),
    ),
    MetricFamily(
        "model_weights_bytes",
        _G,
        "Weights in memory.",
        lambda p: [((model.name,), model.weights) for model in p.models if model.loaded],
        (("model", _NAMED),),
        "where it is loaded",
    ),
    MetricFamily(
        "model_load_progress_ratio",
        _G,
        "Share of the weights that is read.",
        lambda p: [((model.name,), model.progress) for model in p.models if model.loading],
        (("model", _NAMED),),
        "while it is loaded",
    ),
    _counter("model_evictions", "Idle models that made room.", lambda p: p.view.engine.counts.evictions),
    _counter(
        "model_departures",
        "Models that left because nobody had used them for long.",
        lambda p: p.view.engine.counts.departures,
    ),
)
CACHE: tuple[MetricFamily[NodeSnapshot], ...] = (
    _gauge("prefix_cache_bytes", "What the prefix cache holds.", lambda p: p.view.engine.cache.nbytes),
    _gauge("prefix_cache_entries", "Prompts in the prefix cache.", lambda p: p.view.engine.cache.entries),
    _counter("prefix_cache_hits", "Requests that the prefix cache served.", lambda p: p.view.engine.cache.hits),
    _counter(
        "prefix_cache_hit_tokens", "Prompt tokens that were not read anew.", lambda p: p.view.engine.cache.hit_tokens
    ),
    _counter("prefix_cache_stores", "Prompts that were kept.", lambda p: p.view.engine.cache.stores),
    _counter("prefix_cache_evictions", "Prompts that were evicted.", lambda p: p.view.engine.cache.evictions),
)
NODE = (*ABOUT, *MEMORY, *GATE, *ENGINE, *MODELS, *CACHE)

"""Metric families of a node's engine: process, requests, models and prefix cache."""

from coordinator.metrics.families import (
    MAX_MODELS_PER_NODE,
    MetricFamily,
    MetricKind,
    Row,
    build_state_row,
    create_counter,
    create_gauge,
    join_quoted,
)
from coordinator.metrics.node_snapshot import NodeSnapshot
from router.placement.cluster_view import NodeView
from wire.report import Model

ENGINE_STATES = ("starting", "ready", "hung", "restarting", "failed")
"""States of the engine as label values; any other state becomes `families.OTHER`."""
MODEL_STATES = ("loaded", "loading", "known", "failed")
"""States of a model as label values."""
_G, _C = MetricKind.GAUGE, MetricKind.COUNTER
_MODEL_MEANING = f"a model of this node; {MAX_MODELS_PER_NODE} at most, those first that are loaded"


def _get_state(model: Model) -> str:
    if model.loaded:
        return "loaded"
    return "loading" if model.loading else "failed" if model.cause else "known"


def _count_model_states(view: NodeView) -> list[Row]:
    counts: dict[str, int] = dict.fromkeys(MODEL_STATES, 0)
    for model in view.models.values():
        counts[_get_state(model)] += 1
    return [((state,), count) for state, count in counts.items()]


ENGINE: tuple[MetricFamily[NodeSnapshot], ...] = (
    MetricFamily(
        "engine_state",
        _G,
        "State of the engine's process; always 1.",
        lambda p: build_state_row(p.view.engine.state, ENGINE_STATES),
        (("state", join_quoted(ENGINE_STATES)),),
    ),
    MetricFamily(
        "engine_requests",
        _G,
        "Requests in the engine.",
        lambda p: [(("running",), p.view.engine.running), (("waiting",), p.view.engine.waiting)],
        (("state", "`running`, `waiting`"),),
    ),
    create_gauge("engine_queued_tokens", "Prompt tokens waiting for prefill.", lambda p: p.view.engine.queued_tokens),
    create_counter(
        "engine_forwards",
        "Prefills, joins and parts of forwards for embeddings; each follows a check.",
        lambda p: p.view.engine.counts.forwards,
    ),
    create_counter(
        "engine_prefill_tokens",
        "Prompt tokens that forward passes have computed; cached tokens are not among them.",
        lambda p: p.view.engine.counts.prefill_tokens,
    ),
    create_counter("engine_steps", "Decode steps.", lambda p: p.view.engine.counts.steps),
    create_counter(
        "engine_failures", "Requests that failed with an engine fault.", lambda p: p.view.engine.counts.failures
    ),
    create_counter(
        "engine_requests_evicted",
        "Requests aborted because the engine was over its cap.",
        lambda p: p.view.engine.counts.sheds,
    ),
    create_counter(
        "engine_preemptions",
        "Requests that were preempted.",
        lambda p: p.view.engine.counts.preemptions,
    ),
    create_counter(
        "engine_over_cap",
        "Forward passes after which the engine was over its cap.",
        lambda p: p.view.engine.counts.overs,
    ),
    create_counter("engine_restarts", "Unplanned ends of the engine's process.", lambda p: p.view.engine.restarts),
    create_counter(
        "engine_graceful_restarts",
        "Planned restarts of the engine because memory was not freed.",
        lambda p: p.view.engine.recycles,
    ),
    create_gauge(
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
        (("state", join_quoted(MODEL_STATES)),),
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
    create_counter("model_evictions", "Idle models unloaded to free memory.", lambda p: p.view.engine.counts.evictions),
    create_counter(
        "model_idle_unloads",
        "Models unloaded because they were idle.",
        lambda p: p.view.engine.counts.departures,
    ),
)
CACHE: tuple[MetricFamily[NodeSnapshot], ...] = (
    create_gauge("prefix_cache_bytes", "Size of the prefix cache.", lambda p: p.view.engine.cache.nbytes),
    create_gauge("prefix_cache_entries", "Prompts in the prefix cache.", lambda p: p.view.engine.cache.entries),
    create_counter("prefix_cache_hits", "Requests with a hit in the prefix cache.", lambda p: p.view.engine.cache.hits),
    create_counter(
        "prefix_cache_hit_tokens",
        "Prompt tokens taken from the prefix cache.",
        lambda p: p.view.engine.cache.hit_tokens,
    ),
    create_counter("prefix_cache_inserts", "Prompts added to the prefix cache.", lambda p: p.view.engine.cache.stores),
    create_counter(
        "prefix_cache_evictions", "Prompts evicted from the prefix cache.", lambda p: p.view.engine.cache.evictions
    ),
    create_gauge("disk_cache_bytes", "Size of the disk cache.", lambda p: p.view.engine.cache.disk_bytes),
    create_gauge("disk_cache_files", "Files of the disk cache.", lambda p: p.view.engine.cache.disk_files),
    create_counter("disk_cache_hits", "Prompts restored from the disk.", lambda p: p.view.engine.cache.disk_hits),
    create_counter(
        "disk_cache_hit_tokens",
        "Prompt tokens restored from the disk.",
        lambda p: p.view.engine.cache.disk_hit_tokens,
    ),
    create_counter(
        "disk_cache_read_bytes", "Bytes read from the disk cache.", lambda p: p.view.engine.cache.disk_read_bytes
    ),
    create_counter(
        "disk_cache_saves", "Parts passed to the disk cache's writer.", lambda p: p.view.engine.cache.disk_saves
    ),
    create_counter("disk_cache_persisted", "Parts written to the disk.", lambda p: p.view.engine.cache.disk_persisted),
    create_counter(
        "disk_cache_drops", "Parts dropped before they were written.", lambda p: p.view.engine.cache.disk_drops
    ),
    create_counter(
        "disk_cache_errors", "Parts that could not be written or read.", lambda p: p.view.engine.cache.disk_errors
    ),
    create_counter(
        "disk_cache_evictions", "Files deleted for newer ones.", lambda p: p.view.engine.cache.disk_evictions
    ),
)

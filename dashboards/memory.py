"""Memory: the sum of each Mac, its gate, its engine, its models and its prefix cache."""

from dashboards.panels import (
    BYTES,
    COUNT,
    PER_SECOND,
    SECONDS,
    SHARE,
    THIRD,
    Board,
    figure,
    heat,
    lines,
    listing,
    quantiles,
    states,
)

N = '{node=~"$node"}'


def _rate(name: str) -> str:
    return f"rate(macpool_{name}_total{N}[$__rate_interval])"


def _size(name: str) -> tuple[str, str]:
    return f"macpool_node_memory_{name}_bytes{N}", f"{{{{node}}}} {name}"


GLANCE = (
    figure(
        "Armed",
        "1: the gate has limits, they are on, and its reading is live.",
        COUNT,
        f"min(macpool_gate_armed{N})",
        bad=1,
        below=True,
    ),
    figure(
        "Guard",
        "0: memory.guard is off, and nothing is refused for memory.",
        COUNT,
        f"min(macpool_gate_guard{N})",
        bad=1,
        below=True,
    ),
    figure(
        "Headroom",
        "Ceiling less margin, current and reserved, where it is least.",
        BYTES,
        f"min(macpool_node_memory_headroom_bytes{N})",
        bad=0,
        below=True,
    ),
    figure(
        "Level",
        "0 unknown, 1 ok, 2 over soft, 3 over hard; the worst.",
        COUNT,
        f"max(macpool_node_memory_level{N})",
        bad=2,
    ),
    figure(
        "Over cap",
        "Times in the last hour that the enforcer found the engine over its cap.",
        COUNT,
        f"sum(increase(macpool_node_memory_over_cap_total{N}[1h]))",
        bad=1,
    ),
    figure(
        "Age of the reading",
        "Since the agent last read the machine, where it is most.",
        SECONDS,
        f"max(time() - macpool_node_memory_reading_timestamp_seconds{N})",
        bad=15,
    ),
    lines(
        "The sum that the gate makes",
        "Nothing is started that would lift current, reserved and margin above the ceiling.",
        BYTES,
        _size("cap"),
        _size("ceiling"),
        _size("current"),
        _size("reserved"),
        _size("margin"),
    ),
    lines(
        "Headroom",
        "What is left of the ceiling; what is reusable is given back before anything is refused.",
        BYTES,
        _size("headroom"),
        _size("reusable"),
    ),
    lines(
        "Refusals by reason",
        "What the gate said no to, and why.",
        PER_SECOND,
        (f"sum by (node, reason) ({_rate('gate_refusals')})", "{{node}} {{reason}}"),
    ),
    heat(
        "Predicted peaks",
        "Share of the ceiling that each check predicted; above 1 it was refused.",
        SHARE,
        f"macpool_gate_predicted_peak_ratio_bucket{N}",
    ),
    lines(
        "Size",
        "What each prefix cache holds; all of it is given back before a request is refused.",
        BYTES,
        (f"macpool_prefix_cache_bytes{N}", "{{node}} kept"),
        (f"macpool_node_memory_reusable_bytes{N}", "{{node}} reusable"),
    ),
    lines(
        "Tokens from the cache",
        "Prompt tokens that were not prefilled, per second.",
        PER_SECOND,
        (_rate("prefix_cache_hit_tokens"), "{{node}}"),
    ),
)
MEMORY = (
    lines(
        "The terms of current",
        "The highest of them is what the gate compares.",
        BYTES,
        _size("phys"),
        _size("active"),
        _size("recent_peak"),
    ),
    lines(
        "MLX and the engine",
        "Free buffers, the highest ever, the engine before any model, and the last reserve.",
        BYTES,
        _size("mlx_cache"),
        _size("mlx_peak"),
        _size("base"),
        _size("reserve"),
    ),
    lines(
        "Seen from outside",
        "The engine's footprint as its agent reads it, beside what the engine says.",
        BYTES,
        _size("engine_phys"),
        _size("phys"),
    ),
    lines(
        "The machine",
        "RAM, and what the system can give without pushing anyone out.",
        BYTES,
        _size("total"),
        (f"macpool_node_system_available_bytes{N}", "{{node}} available"),
    ),
    lines(
        "Lost wired memory",
        "What ended engines left wired: only a restart of that Mac brings it back.",
        BYTES,
        (f"macpool_engine_leaked_wired_bytes{N}", "{{node}}"),
    ),
    states(
        "What binds the ceiling",
        "The term that settles it: look up its remedy in `cluster nodes`.",
        f"macpool_node_memory_ceiling_bound{N}",
        "{{node}} {{term}}",
    ),
    states(
        "Pressure", "The system's own word for its memory.", f"macpool_node_system_pressure{N}", "{{node}} {{pressure}}"
    ),
)
GATE = (
    lines(
        "Forwards and checks",
        "Prefills and joins each follow a check: forwards without checks mean that the gate is not asked.",
        PER_SECOND,
        (_rate("engine_forwards"), "{{node}} forwards"),
        (f"sum by (node) ({_rate('gate_checks')})", "{{node}} checks"),
    ),
    lines(
        "Checks by site",
        "Where the gate is asked.",
        PER_SECOND,
        (f"sum by (node, site) ({_rate('gate_checks')})", "{{node}} {{site}}"),
    ),
    lines(
        "What was done instead of refusing",
        "Smaller pieces, requests that gave way, and requests that were ended.",
        PER_SECOND,
        (_rate("gate_prefill_chunks_shrunk"), "{{node}} shrinks"),
        (_rate("engine_preemptions"), "{{node}} preemptions"),
        (_rate("engine_requests_evicted"), "{{node}} sheds"),
    ),
    quantiles(
        "Transients",
        "How far MLX rose in prefills and joins: the margin must hold what no estimate has.",
        BYTES,
        f"macpool_gate_transient_bytes_bucket{N}",
        "node",
    ),
    lines(
        "Over the cap",
        "Forwards that ended over the cap, findings of the enforcer, engines that it ended.",
        PER_SECOND,
        (_rate("engine_over_cap"), "{{node}} forwards"),
        (_rate("node_memory_over_cap"), "{{node}} found"),
        (_rate("node_memory_kills"), "{{node}} ended"),
    ),
    lines(
        "Looks of the enforcer",
        "Per second: four while it works, one in five seconds with no model.",
        PER_SECOND,
        (_rate("node_memory_polls"), "{{node}}"),
    ),
)
ENGINE = (
    states("State", "Of the engine's process.", f"macpool_engine_state{N}", "{{node}} {{state}}"),
    lines(
        "Requests", "Running and waiting in the engine.", COUNT, (f"macpool_engine_requests{N}", "{{node}} {{state}}")
    ),
    lines(
        "Steps",
        "Decode steps per second: the pace of every answer there.",
        PER_SECOND,
        (_rate("engine_steps"), "{{node}}"),
        width=THIRD,
    ),
    lines(
        "Queued tokens",
        "Prompt tokens that wait for their prefill.",
        COUNT,
        (f"macpool_engine_queued_tokens{N}", "{{node}}"),
        width=THIRD,
    ),
    lines(
        "Deaths and faults",
        "Deaths, replacements in good health, and requests that ended in a fault.",
        PER_SECOND,
        (_rate("engine_restarts"), "{{node}} deaths"),
        (_rate("engine_graceful_restarts"), "{{node}} recycles"),
        (_rate("engine_failures"), "{{node}} faults"),
        width=THIRD,
    ),
)
MODELS = (
    lines(
        "Models",
        "How the node stands to the models that it knows.",
        COUNT,
        (f"macpool_node_models{N}", "{{node}} {{state}}"),
    ),
    states("Loaded", "1 while a model is in memory.", f"macpool_model_loaded{N}", "{{node}} {{model}}"),
    lines("Weights", "In memory.", BYTES, (f"macpool_model_weights_bytes{N}", "{{node}} {{model}}")),
    lines(
        "Loads under way",
        "Share of the weights that is read.",
        SHARE,
        (f"macpool_model_load_progress_ratio{N}", "{{node}} {{model}}"),
    ),
    lines("Agent", "Footprint of the agent's own process.", BYTES, (f"macpool_node_agent_phys_bytes{N}", "{{node}}")),
    lines(
        "Reports",
        "Time since the node's newest report.",
        SECONDS,
        (f"time() - macpool_node_report_timestamp_seconds{N}", "{{node}}"),
    ),
    listing("The machines", "Chip, system, version, engine and tier.", f"macpool_node_info{N}"),
    listing("Sources", "Where the footprint is read.", f"macpool_node_memory_reading_source{N}"),
)
CACHE = (
    lines("Prompts", "Kept prompts.", COUNT, (f"macpool_prefix_cache_entries{N}", "{{node}}")),
    lines(
        "Hits",
        "Requests that found a part of their prompt, per second.",
        PER_SECOND,
        (_rate("prefix_cache_hits"), "{{node}}"),
    ),
    lines(
        "Stored and evicted",
        "Prompts per second.",
        PER_SECOND,
        (_rate("prefix_cache_inserts"), "{{node}} stored"),
        (_rate("prefix_cache_evictions"), "{{node}} evicted"),
    ),
    lines(
        "Models that made room",
        "Evicted for another, or unused for long.",
        PER_SECOND,
        (_rate("model_evictions"), "{{node}} evicted"),
        (_rate("model_idle_unloads"), "{{node}} left"),
    ),
)
BOARD = Board(
    "macpool-memory",
    "Macpool: memory",
    "One Mac, or several beside each other: memory, gate, engine, models, cache.",
    (
        ("Memory now", GLANCE),
        ("Memory in detail", MEMORY),
        ("Gate", GATE),
        ("Engine", ENGINE),
        ("Models and machine", MODELS),
        ("Prefix cache", CACHE),
    ),
    (("node", "Mac", "label_values(macpool_gate_armed, node)"),),
)

"""Dashboard "memory": the terms of headroom on each Mac, gate, engine, models and prefix cache."""

from dashboards.panels import (
    BYTES,
    COUNT,
    PER_SECOND,
    SECONDS,
    SHARE,
    THIRD,
    Board,
    create_heatmap,
    create_label_table,
    create_line_panel,
    create_quantile_panel,
    create_stat_panel,
    create_state_timeline,
)

N = '{node=~"$node"}'


def _build_rate(name: str) -> str:
    return f"rate(macpool_{name}_total{N}[$__rate_interval])"


def _build_size_query(name: str) -> tuple[str, str]:
    return f"macpool_node_memory_{name}_bytes{N}", f"{{{{node}}}} {name}"


GLANCE = (
    create_stat_panel(
        "Armed",
        "1: the gate has limits, they are on, and its reading is live.",
        COUNT,
        f"min(macpool_gate_armed{N})",
        bad=1,
        below=True,
    ),
    create_stat_panel(
        "Guard",
        "0: memory.guard is off, and no request is refused for memory.",
        COUNT,
        f"min(macpool_gate_guard{N})",
        bad=1,
        below=True,
    ),
    create_stat_panel(
        "Headroom",
        "Ceiling less margin, current and reserved: the minimum over the Macs.",
        BYTES,
        f"min(macpool_node_memory_headroom_bytes{N})",
        bad=0,
        below=True,
    ),
    create_stat_panel(
        "Level",
        "0 unknown, 1 ok, 2 over soft, 3 over hard: the maximum over the Macs.",
        COUNT,
        f"max(macpool_node_memory_level{N})",
        bad=2,
    ),
    create_stat_panel(
        "Over cap",
        "How often the enforcer found the engine over its cap in the last hour.",
        COUNT,
        f"sum(increase(macpool_node_memory_over_cap_total{N}[1h]))",
        bad=1,
    ),
    create_stat_panel(
        "Age of the reading",
        "Time since the agent read the machine's memory: the maximum over the Macs.",
        SECONDS,
        f"max(time() - macpool_node_memory_reading_timestamp_seconds{N})",
        bad=15,
    ),
    create_line_panel(
        "The gate's sum",
        "The gate refuses work that would lift current, reserved and margin above the ceiling.",
        BYTES,
        _build_size_query("cap"),
        _build_size_query("ceiling"),
        _build_size_query("current"),
        _build_size_query("reserved"),
        _build_size_query("margin"),
    ),
    create_line_panel(
        "Headroom",
        "The rest of the ceiling. Reusable memory is freed before any request is refused.",
        BYTES,
        _build_size_query("headroom"),
        _build_size_query("reusable"),
    ),
    create_line_panel(
        "Refusals by reason",
        "Refusals of the gate per second.",
        PER_SECOND,
        (f"sum by (node, reason) ({_build_rate('gate_refusals')})", "{{node}} {{reason}}"),
    ),
    create_heatmap(
        "Predicted peaks",
        "Predicted peak of each check, as a share of the ceiling. Above 1 the gate refused.",
        SHARE,
        f"macpool_gate_predicted_peak_ratio_bucket{N}",
    ),
    create_line_panel(
        "Prefix cache",
        "Size of each prefix cache. All of it is freed before a request is refused.",
        BYTES,
        (f"macpool_prefix_cache_bytes{N}", "{{node}} cached"),
        (f"macpool_node_memory_reusable_bytes{N}", "{{node}} reusable"),
    ),
    create_line_panel(
        "Prompt tokens",
        "Prompt tokens per second that engines computed, and those that needed no prefill.",
        PER_SECOND,
        (_build_rate("engine_prefill_tokens"), "{{node}} computed"),
        (_build_rate("prefix_cache_hit_tokens"), "{{node}} from memory"),
        (_build_rate("disk_cache_hit_tokens"), "{{node}} from the disk"),
    ),
)
MEMORY = (
    create_line_panel(
        "The terms of current",
        "The gate compares the highest of these terms.",
        BYTES,
        _build_size_query("phys"),
        _build_size_query("active"),
        _build_size_query("recent_peak"),
    ),
    create_line_panel(
        "MLX and the engine",
        "MLX's free buffers and peak, the engine before any model, and the last reserve.",
        BYTES,
        _build_size_query("mlx_cache"),
        _build_size_query("mlx_peak"),
        _build_size_query("base"),
        _build_size_query("reserve"),
    ),
    create_line_panel(
        "Two readings of the footprint",
        "The engine's footprint as the agent reads it, and as the engine reports it.",
        BYTES,
        _build_size_query("engine_phys"),
        _build_size_query("phys"),
    ),
    create_line_panel(
        "The machine",
        "RAM, and memory that the system can provide without affecting other programs.",
        BYTES,
        _build_size_query("total"),
        (f"macpool_node_system_available_bytes{N}", "{{node}} available"),
    ),
    create_line_panel(
        "Lost wired memory",
        "Wired memory that ended engines leaked. Only a restart of that Mac frees it.",
        BYTES,
        (f"macpool_engine_leaked_wired_bytes{N}", "{{node}}"),
    ),
    create_state_timeline(
        "Limit of the ceiling",
        "The term that limits the ceiling. `cluster nodes` shows the remedy.",
        f"macpool_node_memory_ceiling_bound{N}",
        "{{node}} {{term}}",
    ),
    create_state_timeline(
        "Pressure",
        "Memory pressure as the system reports it.",
        f"macpool_node_system_pressure{N}",
        "{{node}} {{pressure}}",
    ),
)
GATE = (
    create_line_panel(
        "Forwards and checks",
        "Each prefill and join follows a check. Forwards without checks mean that the gate is bypassed.",
        PER_SECOND,
        (_build_rate("engine_forwards"), "{{node}} forwards"),
        (f"sum by (node) ({_build_rate('gate_checks')})", "{{node}} checks"),
    ),
    create_line_panel(
        "Checks by site",
        "Checks per second at each place that asks the gate.",
        PER_SECOND,
        (f"sum by (node, site) ({_build_rate('gate_checks')})", "{{node}} {{site}}"),
    ),
    create_line_panel(
        "Actions instead of refusals",
        "Smaller chunks, preempted requests, and requests that were ended over the cap.",
        PER_SECOND,
        (_build_rate("gate_prefill_chunks_shrunk"), "{{node}} shrinks"),
        (_build_rate("engine_preemptions"), "{{node}} preemptions"),
        (_build_rate("engine_requests_evicted"), "{{node}} sheds"),
    ),
    create_quantile_panel(
        "Transients",
        "Rise of MLX's memory in prefills and joins. The margin must cover the part beyond the estimate.",
        BYTES,
        f"macpool_gate_transient_bytes_bucket{N}",
        "node",
    ),
    create_line_panel(
        "Over the cap",
        "Forwards that ended over the cap, findings of the enforcer, and engines that it ended.",
        PER_SECOND,
        (_build_rate("engine_over_cap"), "{{node}} forwards"),
        (_build_rate("node_memory_over_cap"), "{{node}} found"),
        (_build_rate("node_memory_kills"), "{{node}} ended"),
    ),
    create_line_panel(
        "Polls of the enforcer",
        "Per second: four while the engine works, one in five seconds without a model.",
        PER_SECOND,
        (_build_rate("node_memory_polls"), "{{node}}"),
    ),
)
ENGINE = (
    create_state_timeline("State", "State of the engine's process.", f"macpool_engine_state{N}", "{{node}} {{state}}"),
    create_line_panel(
        "Requests", "Running and waiting in the engine.", COUNT, (f"macpool_engine_requests{N}", "{{node}} {{state}}")
    ),
    create_line_panel(
        "Steps",
        "Decode steps per second: the speed of every answer on the node.",
        PER_SECOND,
        (_build_rate("engine_steps"), "{{node}}"),
        width=THIRD,
    ),
    create_line_panel(
        "Queued tokens",
        "Prompt tokens waiting for prefill.",
        COUNT,
        (f"macpool_engine_queued_tokens{N}", "{{node}}"),
        width=THIRD,
    ),
    create_line_panel(
        "Deaths and faults",
        "Deaths, planned replacements, and requests that ended in a fault.",
        PER_SECOND,
        (_build_rate("engine_restarts"), "{{node}} deaths"),
        (_build_rate("engine_graceful_restarts"), "{{node}} recycles"),
        (_build_rate("engine_failures"), "{{node}} faults"),
        width=THIRD,
    ),
)
MODELS = (
    create_line_panel(
        "Models",
        "Models of the node by state.",
        COUNT,
        (f"macpool_node_models{N}", "{{node}} {{state}}"),
    ),
    create_state_timeline("Loaded", "1 while a model is in memory.", f"macpool_model_loaded{N}", "{{node}} {{model}}"),
    create_line_panel(
        "Weights", "Weights in memory.", BYTES, (f"macpool_model_weights_bytes{N}", "{{node}} {{model}}")
    ),
    create_line_panel(
        "Loads under way",
        "Share of the weights that has been read.",
        SHARE,
        (f"macpool_model_load_progress_ratio{N}", "{{node}} {{model}}"),
    ),
    create_line_panel(
        "Agent", "Footprint of the agent's own process.", BYTES, (f"macpool_node_agent_phys_bytes{N}", "{{node}}")
    ),
    create_line_panel(
        "Reports",
        "Time since the node's newest report.",
        SECONDS,
        (f"time() - macpool_node_report_timestamp_seconds{N}", "{{node}}"),
    ),
    create_label_table("The machines", "Chip, system, version, engine and tier.", f"macpool_node_info{N}"),
    create_label_table("Sources", "Where the footprint is read.", f"macpool_node_memory_reading_source{N}"),
)
CACHE = (
    create_line_panel("Prompts", "Cached prompts.", COUNT, (f"macpool_prefix_cache_entries{N}", "{{node}}")),
    create_line_panel(
        "Hits",
        "Requests per second with a cached prefix.",
        PER_SECOND,
        (_build_rate("prefix_cache_hits"), "{{node}}"),
    ),
    create_line_panel(
        "Stored and evicted",
        "Prompts per second.",
        PER_SECOND,
        (_build_rate("prefix_cache_inserts"), "{{node}} stored"),
        (_build_rate("prefix_cache_evictions"), "{{node}} evicted"),
    ),
    create_line_panel(
        "Disk cache",
        "Size of the files of cached prefixes.",
        BYTES,
        (f"macpool_disk_cache_bytes{N}", "{{node}}"),
    ),
    create_line_panel(
        "Disk cache files", "Each holds a part of a prompt.", COUNT, (f"macpool_disk_cache_files{N}", "{{node}}")
    ),
    create_line_panel(
        "Restored from the disk",
        "Prompts and tokens per second that needed no prefill after they had left the memory.",
        PER_SECOND,
        (_build_rate("disk_cache_hits"), "{{node}} prompts"),
        (_build_rate("disk_cache_hit_tokens"), "{{node}} tokens"),
        (_build_rate("disk_cache_read_bytes"), "{{node}} bytes"),
    ),
    create_line_panel(
        "Written to the disk",
        "Parts per second. The difference between passed and written parts is lost.",
        PER_SECOND,
        (_build_rate("disk_cache_saves"), "{{node}} passed"),
        (_build_rate("disk_cache_persisted"), "{{node}} written"),
        (_build_rate("disk_cache_drops"), "{{node}} dropped"),
        (_build_rate("disk_cache_errors"), "{{node}} failed"),
        (_build_rate("disk_cache_evictions"), "{{node}} deleted"),
    ),
    create_line_panel(
        "Models unloaded",
        "Unloaded for another model, or unused for long.",
        PER_SECOND,
        (_build_rate("model_evictions"), "{{node}} for another"),
        (_build_rate("model_idle_unloads"), "{{node}} idle"),
    ),
)
BOARD = Board(
    "macpool-memory",
    "Macpool: memory",
    "One or more Macs: memory, gate, engine, models and prefix cache.",
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

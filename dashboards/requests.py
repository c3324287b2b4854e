"""Dashboard "requests": speed, outcomes and waiting times of requests."""

from dashboards.panels import (
    COUNT,
    PER_SECOND,
    REQUESTS,
    SECONDS,
    SHARE,
    Board,
    create_heatmap,
    create_line_panel,
    create_quantile_panel,
    create_stat_panel,
)

M = '{model=~"$model"}'


def _build_rate(name: str, chosen: str = "") -> str:
    return f"rate(macpool_{name}_total{chosen}[$__rate_interval])"


def _build_quantile(share: float, name: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate(macpool_{name}_seconds_bucket{M}[$__rate_interval])))"


GLANCE = (
    create_stat_panel("Requests", "Requests ended per second.", REQUESTS, f"sum({_build_rate('router_requests', M)})"),
    create_stat_panel(
        "Answered",
        "Share of requests that were answered.",
        SHARE,
        f'sum(rate(macpool_router_requests_total{{model=~"$model", outcome="ok"}}[$__rate_interval])) / '
        f"sum({_build_rate('router_requests', M)})",
        bad=0.95,
        below=True,
    ),
    create_stat_panel(
        "TTFT, median", "From arrival to the first token.", SECONDS, _build_quantile(0.5, "time_to_first_token")
    ),
    create_stat_panel(
        "TTFT, p99", "One request in a hundred waits longer.", SECONDS, _build_quantile(0.99, "time_to_first_token")
    ),
    create_stat_panel("ITL, median", "Gap between tokens.", SECONDS, _build_quantile(0.5, "inter_token_latency")),
    create_stat_panel(
        "ITL, p99", "One gap in a hundred is longer.", SECONDS, _build_quantile(0.99, "inter_token_latency")
    ),
    create_quantile_panel(
        "Time to first token",
        "Queue and retries included, as the client sees it.",
        SECONDS,
        f"macpool_time_to_first_token_seconds_bucket{M}",
    ),
    create_quantile_panel(
        "Inter-token latency",
        "Gaps between the tokens of streams.",
        SECONDS,
        f"macpool_inter_token_latency_seconds_bucket{M}",
        "model",
    ),
    create_line_panel(
        "Tokens",
        "Prompt, cached and generated tokens per second.",
        PER_SECOND,
        (f"sum by (model) ({_build_rate('prompt_tokens', M)})", "{{model}} prompt"),
        (f"sum by (model) ({_build_rate('cached_prompt_tokens', M)})", "{{model}} cached"),
        (f"sum by (model) ({_build_rate('generation_tokens', M)})", "{{model}} generated"),
    ),
    create_line_panel(
        "Outcomes",
        "Outcomes of requests: ok, cancelled, failed, or the code of a refusal.",
        PER_SECOND,
        (f"sum by (outcome) ({_build_rate('router_requests', M)})", "{{outcome}}"),
    ),
    create_line_panel(
        "Queue",
        "Requests in the queue, and its limit.",
        COUNT,
        ("macpool_router_queue_depth", "waiting"),
        ("macpool_router_queue_limit", "limit"),
    ),
    create_line_panel(
        "Tokens by key",
        "Prompt and generated tokens per second, of the ten keys with the most.",
        PER_SECOND,
        (f"topk(10, sum by (key) ({_build_rate('key_tokens', M)}))", "{{key}}"),
    ),
)
SPEED = (
    create_heatmap(
        "Time to first token", "Distribution of the times.", SECONDS, f"macpool_time_to_first_token_seconds_bucket{M}"
    ),
    create_heatmap(
        "Inter-token latency", "Distribution of the gaps.", SECONDS, f"macpool_inter_token_latency_seconds_bucket{M}"
    ),
    create_quantile_panel(
        "Whole requests",
        "From arrival to the end, with any outcome.",
        SECONDS,
        f"macpool_e2e_request_latency_seconds_bucket{M}",
    ),
)
ENDS = (
    create_line_panel(
        "Answers",
        "HTTP answers by status. 499: the client disconnected before an answer.",
        PER_SECOND,
        (f"sum by (code) ({_build_rate('router_http_responses')})", "{{code}}"),
    ),
    create_line_panel(
        "Refusals by nodes",
        "A request may be refused by several nodes and still be answered.",
        PER_SECOND,
        (f"sum by (reason) ({_build_rate('router_node_refusals')}) > 0", "{{reason}}"),
    ),
    create_line_panel(
        "More than one attempt",
        "Per second: attempts, retries, answers resumed by another Mac, moves to another Mac, losses and slow clients.",
        PER_SECOND,
        (_build_rate("router_attempts"), "attempts"),
        (_build_rate("router_retries"), "retries"),
        (_build_rate("router_requests_resumed"), "resumes"),
        (_build_rate("router_requests_migrated"), "moves"),
        (_build_rate("router_requests_lost"), "losses"),
        (_build_rate("router_slow_clients"), "slow clients"),
    ),
    create_line_panel(
        "Requests to upstreams",
        "Per second, by outcome: requests that left the pool because no candidate of their alias could start.",
        REQUESTS,
        (f"sum by (upstream, outcome) ({_build_rate('upstream_requests')})", "{{upstream}} {{outcome}}"),
    ),
    create_line_panel(
        "Tokens of upstreams",
        "Prompt and generated tokens per second of requests to upstreams.",
        PER_SECOND,
        (f"sum by (upstream, kind) ({_build_rate('upstream_tokens')})", "{{upstream}} {{kind}}"),
    ),
)
LINE = (
    create_line_panel(
        "Longest wait",
        "Waiting time of the oldest queued request.",
        SECONDS,
        ("macpool_router_queue_oldest_seconds", "oldest"),
    ),
    create_quantile_panel(
        "Time in the queue", "Of requests that were queued.", SECONDS, "macpool_request_queue_time_seconds_bucket"
    ),
    create_quantile_panel(
        "Time to decide", "Time to choose a node for a request.", SECONDS, "macpool_router_placement_seconds_bucket"
    ),
)
BOARD = Board(
    "macpool-requests",
    "Macpool: requests",
    "Speed, outcomes and waiting times of requests.",
    (("Requests now", GLANCE), ("Distributions", SPEED), ("Ends and retries", ENDS), ("Queue and placement", LINE)),
    (("model", "Model", "label_values(macpool_e2e_request_latency_seconds_count, model)"),),
)

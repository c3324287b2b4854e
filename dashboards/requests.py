"""Dashboard "requests": speed, outcomes and waiting times of requests."""

from dashboards.panels import (
    COUNT,
    PER_SECOND,
    REQUESTS,
    SECONDS,
    SHARE,
    Board,
    figure,
    heat,
    lines,
    quantiles,
)

M = '{model=~"$model"}'


def _rate(name: str, chosen: str = "") -> str:
    return f"rate(macpool_{name}_total{chosen}[$__rate_interval])"


def _p(share: float, name: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate(macpool_{name}_seconds_bucket{M}[$__rate_interval])))"


GLANCE = (
    figure("Requests", "Requests ended per second.", REQUESTS, f"sum({_rate('router_requests', M)})"),
    figure(
        "Answered",
        "Share of requests that were answered.",
        SHARE,
        f'sum(rate(macpool_router_requests_total{{model=~"$model", outcome="ok"}}[$__rate_interval])) / '
        f"sum({_rate('router_requests', M)})",
        bad=0.95,
        below=True,
    ),
    figure("TTFT, median", "From arrival to the first token.", SECONDS, _p(0.5, "time_to_first_token")),
    figure("TTFT, p99", "One request in a hundred waits longer.", SECONDS, _p(0.99, "time_to_first_token")),
    figure("ITL, median", "Gap between tokens.", SECONDS, _p(0.5, "inter_token_latency")),
    figure("ITL, p99", "One gap in a hundred is longer.", SECONDS, _p(0.99, "inter_token_latency")),
    quantiles(
        "Time to first token",
        "Queue and retries included, as the client sees it.",
        SECONDS,
        f"macpool_time_to_first_token_seconds_bucket{M}",
    ),
    quantiles(
        "Inter-token latency",
        "Gaps between the tokens of streams.",
        SECONDS,
        f"macpool_inter_token_latency_seconds_bucket{M}",
        "model",
    ),
    lines(
        "Tokens",
        "Prompt, cached and generated tokens per second.",
        PER_SECOND,
        (f"sum by (model) ({_rate('prompt_tokens', M)})", "{{model}} prompt"),
        (f"sum by (model) ({_rate('cached_prompt_tokens', M)})", "{{model}} cached"),
        (f"sum by (model) ({_rate('generation_tokens', M)})", "{{model}} generated"),
    ),
    lines(
        "Outcomes",
        "Outcomes of requests: ok, cancelled, failed, or the code of a refusal.",
        PER_SECOND,
        (f"sum by (outcome) ({_rate('router_requests', M)})", "{{outcome}}"),
    ),
    lines(
        "Queue",
        "Requests in the queue, and its limit.",
        COUNT,
        ("macpool_router_queue_depth", "waiting"),
        ("macpool_router_queue_limit", "limit"),
    ),
    lines(
        "Tokens by key",
        "Prompt and generated tokens per second, of the ten keys with the most.",
        PER_SECOND,
        (f"topk(10, sum by (key) ({_rate('key_tokens', M)}))", "{{key}}"),
    ),
)
SPEED = (
    heat(
        "Time to first token", "Distribution of the times.", SECONDS, f"macpool_time_to_first_token_seconds_bucket{M}"
    ),
    heat("Inter-token latency", "Distribution of the gaps.", SECONDS, f"macpool_inter_token_latency_seconds_bucket{M}"),
    quantiles(
        "Whole requests",
        "From arrival to the end, with any outcome.",
        SECONDS,
        f"macpool_e2e_request_latency_seconds_bucket{M}",
    ),
)
ENDS = (
    lines(
        "Answers",
        "HTTP answers by status. 499: the client disconnected before an answer.",
        PER_SECOND,
        (f"sum by (code) ({_rate('router_http_responses')})", "{{code}}"),
    ),
    lines(
        "Refusals by nodes",
        "A request may be refused by several nodes and still be answered.",
        PER_SECOND,
        (f"sum by (reason) ({_rate('router_node_refusals')}) > 0", "{{reason}}"),
    ),
    lines(
        "More than one attempt",
        "Per second: attempts, retries, answers resumed by another Mac, moves to another Mac, losses and slow clients.",
        PER_SECOND,
        (_rate("router_attempts"), "attempts"),
        (_rate("router_retries"), "retries"),
        (_rate("router_requests_resumed"), "resumes"),
        (_rate("router_requests_migrated"), "moves"),
        (_rate("router_requests_lost"), "losses"),
        (_rate("router_slow_clients"), "slow clients"),
    ),
)
LINE = (
    lines(
        "Longest wait",
        "Waiting time of the oldest queued request.",
        SECONDS,
        ("macpool_router_queue_oldest_seconds", "oldest"),
    ),
    quantiles(
        "Time in the queue", "Of requests that were queued.", SECONDS, "macpool_request_queue_time_seconds_bucket"
    ),
    quantiles(
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

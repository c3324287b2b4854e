"""Metric families of the router: requests, attempts, placement, queue and tokens."""

from collections.abc import Iterable

from coordinator.metrics.families import (
    MetricFamily,
    MetricKind,
    Row,
    build_single_row,
    create_counter,
    create_gauge,
    to_histogram_value,
)
from coordinator.metrics.pool_readers import MODEL_LABEL, NODE_LABEL, read_by_model, read_by_node
from coordinator.metrics.pool_snapshot import PoolSnapshot
from router.dispatch.counters import OUTCOMES, UPSTREAM_OUTCOMES
from wire.refusals import RefusalCode
from wire.state_machine import StateMachine

UPSTREAM_LABEL = (("upstream", "an upstream of the settings"),)
_G, _C, _H = MetricKind.GAUGE, MetricKind.COUNTER, MetricKind.HISTOGRAM


def _build_outcome_rows(snapshot: PoolSnapshot) -> Iterable[Row]:
    for name, counts in snapshot.counters.models.items():
        for outcome, count in counts.outcomes.items():
            yield (name, outcome), count


def _build_key_token_rows(snapshot: PoolSnapshot) -> Iterable[Row]:
    """Sum the tokens of API keys by name and model. Two keys with one name share a series."""
    totals: dict[tuple[str, str], int] = {}
    for (key, model), tokens in snapshot.counters.keys.items():
        name = snapshot.keys.get(key)
        if name is not None:
            totals[name, model] = totals.get((name, model), 0) + tokens
    return totals.items()


def _build_upstream_rows(snapshot: PoolSnapshot) -> Iterable[Row]:
    for name, counts in snapshot.counters.upstreams.items():
        for outcome, count in counts.outcomes.items():
            yield (name, outcome), count


def _build_upstream_token_rows(snapshot: PoolSnapshot) -> Iterable[Row]:
    for name, counts in snapshot.counters.upstreams.items():
        yield (name, "prompt"), counts.prompt_tokens
        yield (name, "completion"), counts.completion_tokens


ROUTER: tuple[MetricFamily[PoolSnapshot], ...] = (
    MetricFamily(
        "router_requests",
        _C,
        "Ended requests.",
        _build_outcome_rows,
        (*MODEL_LABEL, ("outcome", ", ".join(f"`{outcome}`" for outcome in sorted(OUTCOMES)))),
        "after the first request with this outcome",
    ),
    MetricFamily(
        "router_http_responses",
        _C,
        "HTTP responses of inference routes; 499: the client disconnected before the response.",
        lambda p: [((str(status),), count) for status, count in p.counters.answers.items()],
        (("code", "an HTTP status"),),
        "after the first response",
    ),
    create_counter("router_attempts", "Requests sent to nodes, retries included.", lambda p: p.counters.attempts),
    create_counter("router_retries", "Attempts after the first of a request.", lambda p: p.counters.retries),
    create_counter("router_requests_resumed", "Answers resumed on another node.", lambda p: p.counters.resumes),
    create_counter(
        "router_requests_migrated",
        "Requests moved to another node because theirs was draining, silent or busy.",
        lambda p: p.counters.moves,
    ),
    MetricFamily(
        "router_model_swaps",
        _C,
        "Model swaps, which unload models to load another; `dropped`: no request waited, "
        "the node was lost, or the time limit passed.",
        lambda p: [((outcome,), count) for outcome, count in p.counters.swaps.items()],
        (("outcome", "`done` or `dropped`"),),
    ),
    create_counter(
        "router_requests_lost", "Requests on a node at the time it was lost.", lambda p: p.counters.nodes_lost
    ),
    create_counter(
        "router_slow_clients", "Streams ended because the client did not read them.", lambda p: p.counters.slow_clients
    ),
    MetricFamily(
        "router_node_refusals",
        _C,
        "Refusals by nodes; a request can be refused by several nodes and still be answered.",
        lambda p: [((code.value,), p.counters.refusals.get(code.value, 0)) for code in RefusalCode],
        (("reason", "a code of [refusals](errors.md#refusals)"),),
    ),
    MetricFamily(
        "router_placements", _C, "Requests sent to a node.", read_by_node(lambda p: p.counters.placements), NODE_LABEL
    ),
    MetricFamily(
        "router_placement_seconds",
        _H,
        "Time to choose a node for a request.",
        lambda p: build_single_row(to_histogram_value(p.counters.placement)),
    ),
    MetricFamily(
        "router_in_flight_requests", _G, "Requests on a node.", read_by_node(lambda p: p.in_flight), NODE_LABEL
    ),
    MetricFamily(
        "router_reserved_bytes",
        _G,
        "Reserved on a node and not in its report yet.",
        read_by_node(lambda p: p.unacknowledged),
        NODE_LABEL,
    ),
    create_gauge(
        "router_reservation_leaks", "Reservations without a request; a value above 0 is a bug.", lambda p: p.leaks
    ),
    MetricFamily(
        "illegal_events",
        _C,
        "Events that a state machine of the coordinator does not allow. A value above 0 is a bug.",
        lambda p: [((machine.value,), count) for machine, count in p.counters.illegal_events.items()],
        (("machine", ", ".join(f"`{machine}`" for machine in StateMachine)),),
    ),
    MetricFamily(
        "router_breaker_open",
        _G,
        "1 while the circuit breaker of a node is open after engine faults: it gets no requests.",
        read_by_node(lambda p: {node.id: float(node.id in p.barred) for node in p.members}),
        NODE_LABEL,
    ),
    create_counter("router_breakers_opened", "Circuit breakers opened.", lambda p: p.opened_breakers),
    MetricFamily(
        "upstream_requests",
        _C,
        "Requests passed on to an upstream, by outcome.",
        _build_upstream_rows,
        (*UPSTREAM_LABEL, ("outcome", ", ".join(f"`{outcome}`" for outcome in UPSTREAM_OUTCOMES))),
        "after the first request with this outcome",
    ),
    MetricFamily(
        "upstream_tokens",
        _C,
        "Tokens of requests passed on to an upstream, by its own counts where it sends them.",
        _build_upstream_token_rows,
        (*UPSTREAM_LABEL, ("kind", "`prompt` or `completion`")),
        "after the first request",
    ),
    create_gauge("router_queue_depth", "Requests in the queue.", lambda p: p.waiting),
    create_gauge("router_queue_limit", "Limit of requests in the queue.", lambda p: p.queue_limit),
    create_gauge(
        "router_queue_oldest_seconds",
        "Waiting time of the oldest queued request; 0 if the queue is empty.",
        lambda p: p.oldest_wait_seconds,
    ),
    MetricFamily(
        "request_queue_time_seconds",
        _H,
        "Time in the queue, of queued requests.",
        lambda p: build_single_row(to_histogram_value(p.counters.queue_wait)),
    ),
    MetricFamily(
        "time_to_first_token_seconds",
        _H,
        "From a request's arrival to its first token, queue and retries included.",
        read_by_model(lambda counts: to_histogram_value(counts.ttft)),
        MODEL_LABEL,
        "after the first token",
    ),
    MetricFamily(
        "inter_token_latency_seconds",
        _H,
        "Gap between tokens of streams, observed once per decode step of a node.",
        read_by_model(lambda counts: to_histogram_value(counts.itl)),
        MODEL_LABEL,
        "after the first gap",
    ),
    MetricFamily(
        "e2e_request_latency_seconds",
        _H,
        "From a request's arrival to its end, for every outcome.",
        read_by_model(lambda counts: to_histogram_value(counts.e2e)),
        MODEL_LABEL,
        "after the first request ends",
    ),
    MetricFamily(
        "prompt_tokens",
        _C,
        "Prompt tokens of ended requests.",
        read_by_model(lambda counts: counts.prompt_tokens),
        MODEL_LABEL,
        "after the first request ends",
    ),
    MetricFamily(
        "cached_prompt_tokens",
        _C,
        "Prompt tokens of ended requests that came from a prefix cache.",
        read_by_model(lambda counts: counts.cached_tokens),
        MODEL_LABEL,
        "after the first request ends",
    ),
    MetricFamily(
        "generation_tokens",
        _C,
        "Generated tokens of ended requests.",
        read_by_model(lambda counts: counts.completion_tokens),
        MODEL_LABEL,
        "after the first request ends",
    ),
    MetricFamily(
        "cluster_node_prompt_tokens",
        _C,
        "Prompt tokens of requests by the node that generated their first token.",
        read_by_node(lambda p: {node: counts.prompt_tokens for node, counts in p.counters.nodes.items()}),
        NODE_LABEL,
        "after the first token of the node",
    ),
    MetricFamily(
        "cluster_node_generation_tokens",
        _C,
        "Tokens that a node generated, counted as they arrive.",
        read_by_node(lambda p: {node: counts.generated_tokens for node, counts in p.counters.nodes.items()}),
        NODE_LABEL,
        "after the first token of the node",
    ),
    MetricFamily(
        "key_tokens",
        _C,
        "Prompt and generated tokens of ended requests by API key: its name, never its id.",
        _build_key_token_rows,
        (("key", "the name of a valid key"), *MODEL_LABEL),
        "after the first request ends",
    ),
)

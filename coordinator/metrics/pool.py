"""Metric families of the coordinator: router, queue, members, certificates, process."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from coordinator.metrics.families import (
    MAX_MODELS_PER_NODE,
    HistogramValue,
    MetricFamily,
    MetricKind,
    Row,
    build_single_row,
    to_histogram_value,
)
from coordinator.video.metrics import ENDS, REASONS, VideoCounters, VideoSnapshot
from router.dispatch.counters import MACHINES, OTHER, OUTCOMES, Counters, ModelCounts
from router.placement.cluster_view import ClusterView
from wire.histogram import Histogram
from wire.identity import NodeId
from wire.node_state import SERVING, NodeState
from wire.refusals import RefusalCode

CERTIFICATES = ("authority", "coordinator", "endpoint")


@dataclass(frozen=True, slots=True)
class ProcessMetrics:
    """Metrics of the coordinator's process."""

    started: float
    """Unix time in seconds."""
    cpu_seconds: float
    peak_bytes: int
    """Peak of resident memory."""
    open_files: int
    max_files: int
    """Limit of open files."""


@dataclass(frozen=True, slots=True)
class LinkCounts:
    """Connections of the cluster port: current (`open`, `unlinked`) and since the start (`linked`, `denied`)."""

    open: int
    unlinked: int
    linked: int
    denied: int


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Metrics of the coordinator at one moment.

    Certificates are (issued, expires) in Unix seconds.
    """

    version: str
    python: str
    wall: float
    """Current time in Unix seconds."""
    now: float
    """Current time on the loop's clock."""
    view: ClusterView
    states: Mapping[str, int]
    self_suspect: bool
    counters: Counters
    keys: Mapping[str, str]
    """Names of valid API keys by id."""
    in_flight: Mapping[NodeId, int]
    unacknowledged: Mapping[NodeId, int]
    """Bytes by node that are reserved and not in the node's report yet."""
    leaks: int
    """Number of reservations without a request."""
    barred: frozenset[NodeId]
    """Nodes whose circuit breaker is open."""
    opened_breakers: int
    """Number of times that a circuit breaker opened."""
    waiting: int
    """Number of queued requests."""
    queue_limit: int
    oldest_wait_seconds: float
    """Waiting time of the oldest queued request."""
    keys_refused: int
    """Number of requests with an unknown or expired API key."""
    certificates: Mapping[str, tuple[float, float]]
    node_certificates: Mapping[NodeId, tuple[float, float]]
    links: LinkCounts
    conditions: Mapping[str, bool]
    process: ProcessMetrics
    video: VideoSnapshot


_NODE = (("node", "a member's name"),)
_MODEL = (("model", f"a model that some member has; `{OTHER}` for names that clients make up"),)


def _create_gauge(name: str, meaning: str, read: Callable[[PoolSnapshot], float]) -> MetricFamily[PoolSnapshot]:
    return MetricFamily(name, MetricKind.GAUGE, meaning, lambda picture: build_single_row(read(picture)))


def _create_counter(name: str, meaning: str, read: Callable[[PoolSnapshot], float]) -> MetricFamily[PoolSnapshot]:
    return MetricFamily(name, MetricKind.COUNTER, meaning, lambda picture: build_single_row(read(picture)))


def _read_by_node(values: Callable[[PoolSnapshot], Mapping[NodeId, float]]) -> Callable[[PoolSnapshot], list[Row]]:
    def rows(snapshot: PoolSnapshot) -> list[Row]:
        known = values(snapshot)
        return [((node.name,), known[node.id]) for node in snapshot.view.nodes if node.id in known]

    return rows


def _read_by_model(read: Callable[[ModelCounts], float | HistogramValue]) -> Callable[[PoolSnapshot], list[Row]]:
    return lambda picture: [((name,), read(counts)) for name, counts in picture.counters.models.items()]


def _build_outcome_rows(snapshot: PoolSnapshot) -> Iterable[Row]:
    for name, counts in snapshot.counters.models.items():
        for outcome, count in counts.outcomes.items():
            yield (name, outcome), count


def _build_key_token_rows(snapshot: PoolSnapshot) -> Iterable[Row]:
    """Sum the tokens of API keys by name and model. Two keys with one name share a series."""
    found: dict[tuple[str, str], int] = {}
    for (key, model), tokens in snapshot.counters.keys.items():
        name = snapshot.keys.get(key)
        if name is not None:
            found[name, model] = found.get((name, model), 0) + tokens
    return found.items()


def _compute_headrooms(snapshot: PoolSnapshot) -> Mapping[NodeId, float]:
    return {
        node.id: node.memory.headroom + node.memory.reusable - snapshot.unacknowledged.get(node.id, 0)
        for node in snapshot.view.nodes
        if node.state in SERVING and node.memory.headroom is not None
    }


def _read_video(read: Callable[[VideoSnapshot], Iterable[Row]]) -> Callable[[PoolSnapshot], Iterable[Row]]:
    """Return a reader that yields no rows for a pool without videos."""
    return lambda picture: read(picture.video) if picture.video.used else ()


def _read_video_times(read: Callable[[VideoCounters], Histogram]) -> Callable[[PoolSnapshot], Iterable[Row]]:
    return _read_video(lambda video: build_single_row(to_histogram_value(read(video.counters))))


def _read_validity(at: int) -> Callable[[PoolSnapshot], list[Row]]:
    return lambda picture: [((name,), life[at]) for name, life in picture.certificates.items()]


_G, _C, _H = MetricKind.GAUGE, MetricKind.COUNTER, MetricKind.HISTOGRAM

ROUTER: tuple[MetricFamily[PoolSnapshot], ...] = (
    MetricFamily(
        "router_requests",
        _C,
        "Ended requests.",
        _build_outcome_rows,
        (*_MODEL, ("outcome", ", ".join(f"`{outcome}`" for outcome in sorted(OUTCOMES)))),
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
    _create_counter("router_attempts", "Requests sent to nodes, retries included.", lambda p: p.counters.attempts),
    _create_counter("router_retries", "Attempts after the first of a request.", lambda p: p.counters.retries),
    _create_counter("router_requests_resumed", "Answers resumed on another node.", lambda p: p.counters.resumes),
    _create_counter(
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
    _create_counter(
        "router_requests_lost", "Requests on a node at the time it was lost.", lambda p: p.counters.nodes_lost
    ),
    _create_counter(
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
        "router_placements", _C, "Requests sent to a node.", _read_by_node(lambda p: p.counters.placements), _NODE
    ),
    MetricFamily(
        "router_placement_seconds",
        _H,
        "Time to choose a node for a request.",
        lambda p: build_single_row(to_histogram_value(p.counters.placement)),
    ),
    MetricFamily("router_in_flight_requests", _G, "Requests on a node.", _read_by_node(lambda p: p.in_flight), _NODE),
    MetricFamily(
        "router_reserved_bytes",
        _G,
        "Reserved on a node and not in its report yet.",
        _read_by_node(lambda p: p.unacknowledged),
        _NODE,
    ),
    _create_gauge(
        "router_reservation_leaks", "Reservations without a request; a value above 0 is a bug.", lambda p: p.leaks
    ),
    MetricFamily(
        "illegal_events",
        _C,
        "Events that a state machine did not allow; each ended one request. A value above 0 is a bug.",
        lambda p: [((machine,), count) for machine, count in p.counters.illegal_events.items()],
        (("machine", ", ".join(f"`{machine}`" for machine in MACHINES)),),
    ),
    MetricFamily(
        "router_breaker_open",
        _G,
        "1 while the circuit breaker of a node is open after engine faults: it gets no requests.",
        _read_by_node(lambda p: {node.id: float(node.id in p.barred) for node in p.view.nodes}),
        _NODE,
    ),
    _create_counter("router_breakers_opened", "Circuit breakers opened.", lambda p: p.opened_breakers),
    _create_gauge("router_queue_depth", "Requests in the queue.", lambda p: p.waiting),
    _create_gauge("router_queue_limit", "Limit of requests in the queue.", lambda p: p.queue_limit),
    _create_gauge(
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
        _read_by_model(lambda counts: to_histogram_value(counts.ttft)),
        _MODEL,
        "after the first token",
    ),
    MetricFamily(
        "inter_token_latency_seconds",
        _H,
        "Gap between tokens of streams, observed once per decode step of a node.",
        _read_by_model(lambda counts: to_histogram_value(counts.itl)),
        _MODEL,
        "after the first gap",
    ),
    MetricFamily(
        "e2e_request_latency_seconds",
        _H,
        "From a request's arrival to its end, for every outcome.",
        _read_by_model(lambda counts: to_histogram_value(counts.e2e)),
        _MODEL,
        "after the first request ends",
    ),
    MetricFamily(
        "prompt_tokens",
        _C,
        "Prompt tokens of ended requests.",
        _read_by_model(lambda counts: counts.prompt_tokens),
        _MODEL,
        "after the first request ends",
    ),
    MetricFamily(
        "cached_prompt_tokens",
        _C,
        "Prompt tokens of ended requests that came from a prefix cache.",
        _read_by_model(lambda counts: counts.cached_tokens),
        _MODEL,
        "after the first request ends",
    ),
    MetricFamily(
        "generation_tokens",
        _C,
        "Generated tokens of ended requests.",
        _read_by_model(lambda counts: counts.completion_tokens),
        _MODEL,
        "after the first request ends",
    ),
    MetricFamily(
        "cluster_node_prompt_tokens",
        _C,
        "Prompt tokens of requests by the node that generated their first token.",
        _read_by_node(lambda p: {node: counts.prompt_tokens for node, counts in p.counters.nodes.items()}),
        _NODE,
        "after the first token of the node",
    ),
    MetricFamily(
        "cluster_node_generation_tokens",
        _C,
        "Tokens that a node generated, counted as they arrive.",
        _read_by_node(lambda p: {node: counts.generated_tokens for node, counts in p.counters.nodes.items()}),
        _NODE,
        "after the first token of the node",
    ),
    MetricFamily(
        "key_tokens",
        _C,
        "Prompt and generated tokens of ended requests by API key: its name, never its id.",
        _build_key_token_rows,
        (("key", "the name of a valid key"), *_MODEL),
        "after the first request ends",
    ),
)
MEMBERS: tuple[MetricFamily[PoolSnapshot], ...] = (
    MetricFamily(
        "cluster_nodes",
        _G,
        "Members by state.",
        lambda p: [((state.value,), p.states.get(state.value, 0)) for state in NodeState],
        (("state", ", ".join(f"`{state.value}`" for state in NodeState)),),
    ),
    MetricFamily(
        "cluster_node_state",
        _G,
        "The state of a member; always 1.",
        lambda p: [((node.name, str(node.state)), 1.0) for node in p.view.nodes],
        (*_NODE, ("state", "as above")),
    ),
    MetricFamily(
        "cluster_node_cordoned",
        _G,
        "1 while a member is cordoned by an administrator.",
        lambda p: [((node.name,), float(node.cordoned)) for node in p.view.nodes],
        _NODE,
    ),
    MetricFamily(
        "cluster_node_paused",
        _G,
        "1 while a member is paused for its owner.",
        lambda p: [((node.name,), float(node.sharing.paused)) for node in p.view.nodes],
        _NODE,
    ),
    MetricFamily(
        "cluster_node_paused_until_timestamp_seconds",
        _G,
        "End of a member's pause, Unix time.",
        lambda p: [
            ((node.name,), node.sharing.until) for node in p.view.nodes if node.sharing.paused and node.sharing.until
        ],
        _NODE,
        "while the pause has an end",
    ),
    MetricFamily(
        "cluster_node_report_timestamp_seconds",
        _G,
        "Arrival of a member's newest report, Unix time.",
        lambda p: [((node.name,), p.wall - (p.now - node.reported_at)) for node in p.view.nodes if node.reported_at],
        _NODE,
        "after the first report",
    ),
    MetricFamily(
        "cluster_node_headroom_bytes",
        _G,
        "Headroom used by placement: headroom and reusable memory of the newest report, minus later reservations.",
        _read_by_node(_compute_headrooms),
        _NODE,
        "while the node is linked, not paused, and its footprint readable",
    ),
    MetricFamily(
        "cluster_node_certificate_issued_timestamp_seconds",
        _G,
        "Start of validity of a node's certificate, Unix time.",
        _read_by_node(lambda p: {node: life[0] for node, life in p.node_certificates.items()}),
        _NODE,
        "while the node is linked",
    ),
    MetricFamily(
        "cluster_node_certificate_expires_timestamp_seconds",
        _G,
        "Expiry of a node's certificate, Unix time.",
        _read_by_node(lambda p: {node: life[1] for node, life in p.node_certificates.items()}),
        _NODE,
        "while the node is linked",
    ),
    MetricFamily(
        "cluster_model_fingerprints",
        _G,
        "Different fingerprints of models with the same name.",
        lambda p: [
            ((name,), float(len(p.view.identify(name).holders))) for name in p.view.conflicts[:MAX_MODELS_PER_NODE]
        ],
        _MODEL,
        "while they differ",
    ),
    _create_gauge(
        "coordinator_self_suspect",
        "1 while half of the members are silent since the same moment.",
        lambda p: p.self_suspect,
    ),
    _create_gauge("cluster_links", "Open links of nodes.", lambda p: p.links.open),
    _create_gauge(
        "cluster_unauthenticated_connections",
        "Open connections to the cluster port that are not links yet.",
        lambda p: p.links.unlinked,
    ),
    _create_counter("cluster_node_connections", "Links established.", lambda p: p.links.linked),
    _create_counter(
        "cluster_node_connections_denied", "Connections of nodes that were refused.", lambda p: p.links.denied
    ),
)
_USED = "once a node has a video model, or a job exists or has ended"
VIDEO: tuple[MetricFamily[PoolSnapshot], ...] = (
    MetricFamily(
        "video_jobs",
        _G,
        "Video jobs that have not ended.",
        _read_video(lambda v: [((state,), count) for state, count in v.states.items()]),
        (
            (
                "state",
                "`queued`; `leasing`: a node was asked for memory; `in_progress`; `finalizing`: its files are fetched",
            ),
        ),
        _USED,
    ),
    MetricFamily(
        "video_jobs_ended",
        _C,
        "Ended video jobs.",
        _read_video(lambda v: [((end,), count) for end, count in v.counters.ends.items()]),
        (("status", ", ".join(f"`{end}`" for end in ENDS)),),
        _USED,
    ),
    MetricFamily(
        "video_failures",
        _C,
        "Failed video jobs by reason.",
        _read_video(lambda v: [((reason,), count) for reason, count in v.counters.failures.items()]),
        (("reason", ", ".join(f"`{reason}`" for reason in sorted(REASONS))),),
        "after the first failure with this reason",
    ),
    MetricFamily(
        "video_oldest_queued_seconds",
        _G,
        "Waiting time of the oldest queued job; 0 if the queue is empty.",
        _read_video(lambda v: build_single_row(v.oldest_wait_seconds)),
        when=_USED,
    ),
    MetricFamily(
        "video_job_progress_ratio",
        _G,
        "Progress of the job on a node.",
        _read_by_node(lambda p: p.video.progress),
        _NODE,
        "while a job runs on the node",
    ),
    MetricFamily(
        "video_output_seconds",
        _C,
        "Total length of completed videos.",
        _read_video(lambda v: build_single_row(v.counters.clip_seconds)),
        when=_USED,
    ),
    MetricFamily(
        "video_artifacts_bytes",
        _G,
        "Disk space of video files on the coordinator.",
        _read_video(lambda v: build_single_row(v.stored_bytes)),
        when=_USED,
    ),
    MetricFamily(
        "video_queue_time_seconds",
        _H,
        "From a job's creation to its lease.",
        _read_video_times(lambda counters: counters.queue_seconds),
        when=_USED,
    ),
    MetricFamily(
        "video_job_duration_seconds",
        _H,
        "From a job's lease to its end, for completed jobs.",
        _read_video_times(lambda counters: counters.run_seconds),
        when=_USED,
    ),
    MetricFamily(
        "video_lease_confirm_seconds",
        _H,
        "From the lease request to the node's confirmation.",
        _read_video_times(lambda counters: counters.confirm_seconds),
        when=_USED,
    ),
)
SELF: tuple[MetricFamily[PoolSnapshot], ...] = (
    MetricFamily(
        "build_info",
        _G,
        "Version of the coordinator; always 1.",
        lambda p: [((p.version, p.python), 1.0)],
        (("version", "of macpool"), ("python", "its version")),
    ),
    MetricFamily(
        "tls_issued_timestamp_seconds",
        _G,
        "Start of validity of a certificate of the coordinator, Unix time.",
        _read_validity(0),
        (("certificate", ", ".join(f"`{name}`" for name in CERTIFICATES)),),
        "while the certificate exists",
    ),
    MetricFamily(
        "tls_expires_timestamp_seconds",
        _G,
        "Expiry of a certificate of the coordinator, Unix time.",
        _read_validity(1),
        (("certificate", "as above"),),
        "while the certificate exists",
    ),
    _create_counter("auth_failures", "Requests with an unknown or expired API key.", lambda p: p.keys_refused),
    MetricFamily(
        "condition_active",
        _G,
        "1 while a condition is active; the alert of the same name fires.",
        lambda p: [((name,), float(holds)) for name, holds in p.conditions.items()],
        (("condition", "a name of the [runbook](alerts.md)"),),
    ),
    _create_gauge("process_start_time_seconds", "Start of the coordinator, Unix time.", lambda p: p.process.started),
    _create_counter("process_cpu_seconds", "CPU time of the coordinator.", lambda p: p.process.cpu_seconds),
    _create_gauge(
        "process_peak_resident_bytes", "Peak resident memory of the coordinator.", lambda p: p.process.peak_bytes
    ),
    _create_gauge("process_open_fds", "Open files and connections of the coordinator.", lambda p: p.process.open_files),
    _create_gauge("process_max_fds", "Limit of open files and connections.", lambda p: p.process.max_files),
)
POOL = (*ROUTER, *MEMBERS, *VIDEO, *SELF)

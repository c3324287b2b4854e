"""Every series of a scrape has its value. All fields of a picture have different numbers, which reveals a swap."""

from dataclasses import replace

from coordinator.alerts.rules import RULES
from coordinator.metrics.exposition import render_metrics
from coordinator.metrics.families import CollectedFamily, collect_families
from coordinator.metrics.node_families import NODE
from coordinator.metrics.node_snapshot import NodeSnapshot
from coordinator.metrics.pool_families import POOL
from coordinator.metrics.pool_snapshot import LinkCounts, PoolSnapshot, ProcessMetrics
from coordinator.models.wish_counters import ActionOutcome, WishCounters, WishSnapshot
from coordinator.video.metrics import VideoCounters, VideoSnapshot
from router.dispatch.counters import Counters
from router.placement.cluster_view import ClusterView
from tests.support.pictures import DISTINCT, NOW, WALL, node_picture, pool_picture, view
from wire.frames import Report
from wire.histogram import PREDICTED_BOUNDS, TRANSIENT_BOUNDS, GateMeasures, HistogramSnapshot, NodeMeasures
from wire.identity import NodeId
from wire.node_state import NodeState
from wire.refusals import RefusalCode
from wire.report import EngineState, Memory, Sharing
from wire.state_machine import StateMachine

A, B = NodeId("a"), NodeId("b")
Numbers = dict[str, float]


def numbers(text: bytes) -> Numbers:
    """Return the lines of a scrape as a dictionary without `macpool_`; histograms only by their sum and count."""
    found: Numbers = {}
    for line in text.decode().splitlines():
        name, _, value = line.rpartition(" ")
        if name and not name.startswith("#") and "_bucket{" not in name:
            assert name not in found
            found[name.removeprefix("macpool_")] = float(value)
    return found


def buckets(text: bytes, name: str) -> list[tuple[str, float]]:
    """Return bound and cumulative count of every bucket of a histogram without other labels."""
    lines = [line for line in text.decode().splitlines() if line.startswith(f"macpool_{name}_bucket{{")]
    return [(line.split('"')[1], float(line.rpartition(" ")[2])) for line in lines]


def node_scrape(picture: NodeSnapshot) -> bytes:
    found: list[CollectedFamily[NodeSnapshot]] = collect_families(NODE, picture)
    return render_metrics(found, "")[0]


def pool_scrape(picture: PoolSnapshot) -> bytes:
    found: list[CollectedFamily[PoolSnapshot]] = collect_families(POOL, picture)
    return render_metrics(found, "")[0]


def report(memory: Memory, sharing: Sharing | None = None) -> Report:
    """Return a report with little more than its memory."""
    return Report(1, memory, EngineState(), (), sharing=sharing or Sharing())


MEASURES = NodeMeasures(
    GateMeasures(
        (
            *(("preflight", 1), ("prefill", 2), ("join", 3), ("grow", 4), ("load", 5)),
            *(("probe", 6), ("new", 7), ("embed", 8), ("restore", 9)),
        ),
        (("no_headroom", 8), ("prefill_memory_exceeded", 9), ("memory_unreadable", 10), ("engine_not_ready", 11)),
        HistogramSnapshot(tuple(range(1, len(PREDICTED_BOUNDS) + 2)), 40.5),
        HistogramSnapshot(tuple(range(2, len(TRANSIENT_BOUNDS) + 3)), 5e9),
    ),
    6001.5,
    6002,
)
NODE_NUMBERS: Numbers = {
    'node_info{chip="Apple M3 Max",engine="mlx",system="macOS 15.1",tier="safe",version="0.1.0"}': 1,
    "node_report_timestamp_seconds": WALL - 1,
    "node_agent_cpu_seconds_total": 6001.5,
    "node_agent_phys_bytes": 6002,
    "node_illegal_events_total": 6003,
    "node_memory_total_bytes": 1011,
    "node_memory_cap_bytes": 1001,
    "node_memory_ceiling_bytes": 1002,
    'node_memory_ceiling_bound{term="dynamic"}': 1,
    "node_memory_margin_bytes": 1003,
    "node_memory_phys_bytes": 1004,
    "node_memory_active_bytes": 1005,
    "node_memory_recent_peak_bytes": 1006,
    "node_memory_current_bytes": 1007,
    "node_memory_reserved_bytes": 1008,
    "node_memory_headroom_bytes": -1009,
    "node_memory_reusable_bytes": 1000,
    "node_memory_base_bytes": 1012,
    "node_memory_reserve_bytes": 1015,
    "node_memory_mlx_cache_bytes": 1013,
    "node_memory_mlx_peak_bytes": 1014,
    "node_memory_lease_bytes": 1010,
    "video_worker_phys_bytes": 4002,
    "node_memory_level": 2,
    "node_memory_reading_timestamp_seconds": WALL - 1.75,
    'node_memory_reading_source{source="phys_footprint"}': 1,
    "node_memory_engine_phys_bytes": 5001,
    "node_system_available_bytes": 4001,
    'node_system_pressure{pressure="warn"}': 1,
    "node_memory_polls_total": 5004,
    "node_memory_over_cap_total": 5005,
    "node_memory_kills_total": 5006,
    "gate_armed": 1,
    "gate_guard": 1,
    'gate_checks_total{site="preflight"}': 1,
    'gate_checks_total{site="restore"}': 9,
    'gate_checks_total{site="prefill"}': 2,
    'gate_checks_total{site="join"}': 3,
    'gate_checks_total{site="grow"}': 4,
    'gate_checks_total{site="load"}': 5,
    'gate_checks_total{site="probe"}': 6,
    'gate_checks_total{site="embed"}': 8,
    'gate_checks_total{site="other"}': 7,
    'gate_refusals_total{reason="no_headroom"}': 8,
    'gate_refusals_total{reason="prefill_memory_exceeded"}': 9,
    'gate_refusals_total{reason="memory_unreadable"}': 10,
    'gate_refusals_total{reason="engine_not_ready"}': 11,
    "gate_predicted_peak_ratio_count": sum(range(1, len(PREDICTED_BOUNDS) + 2)),
    "gate_predicted_peak_ratio_sum": 40.5,
    "gate_transient_bytes_count": sum(range(2, len(TRANSIENT_BOUNDS) + 3)),
    "gate_transient_bytes_sum": 5e9,
    "gate_prefill_chunks_shrunk_total": 2012,
    'engine_state{state="hung"}': 1,
    'engine_requests{state="running"}': 2002,
    'engine_requests{state="waiting"}': 2003,
    "engine_queued_tokens": 2004,
    "engine_forwards_total": 2007,
    "engine_prefill_tokens_total": 2111,
    "engine_steps_total": 2008,
    "engine_failures_total": 2009,
    "engine_requests_evicted_total": 2010,
    "engine_preemptions_total": 2013,
    "engine_over_cap_total": 2014,
    "engine_restarts_total": 2001,
    "engine_graceful_restarts_total": 2022,
    "engine_leaked_wired_bytes": 2025,
    'node_models{state="loaded"}': 1,
    'node_models{state="loading"}': 1,
    'node_models{state="known"}': 2,
    'node_models{state="failed"}': 1,
    'model_loaded{model="read"}': 1,
    'model_loaded{model="reading"}': 0,
    'model_loaded{model="broken"}': 0,
    'model_loaded{model="first"}': 0,
    'model_loaded{model="second"}': 0,
    'model_weights_bytes{model="read"}': 3001,
    'model_load_progress_ratio{model="reading"}': 0.375,
    "model_evictions_total": 2011,
    "model_idle_unloads_total": 2015,
    "prefix_cache_bytes": 2016,
    "prefix_cache_entries": 2017,
    "prefix_cache_hits_total": 2018,
    "prefix_cache_hit_tokens_total": 2019,
    "prefix_cache_inserts_total": 2020,
    "prefix_cache_evictions_total": 2021,
    "disk_cache_bytes": 2101,
    "disk_cache_files": 2102,
    "disk_cache_hits_total": 2103,
    "disk_cache_hit_tokens_total": 2104,
    "disk_cache_read_bytes_total": 2105,
    "disk_cache_saves_total": 2106,
    "disk_cache_persisted_total": 2107,
    "disk_cache_drops_total": 2108,
    "disk_cache_errors_total": 2109,
    "disk_cache_evictions_total": 2110,
}


def test_every_series_of_a_node_has_the_value_of_its_report_and_its_measures():
    assert numbers(node_scrape(node_picture(view(report=DISTINCT), MEASURES))) == NODE_NUMBERS


def test_histograms_of_a_node_are_cumulative_with_the_bounds_of_the_protocol():
    text = node_scrape(node_picture(view(report=DISTINCT), MEASURES))
    predicted = buckets(text, "gate_predicted_peak_ratio")
    assert predicted == [
        ("0.3", 1),
        ("0.5", 3),
        ("0.7", 6),
        ("0.8", 10),
        ("0.85", 15),
        ("0.9", 21),
        ("0.95", 28),
        ("1.0", 36),
        ("1.05", 45),
        ("1.25", 55),
        ("+Inf", 66),
    ]
    transient = buckets(text, "gate_transient_bytes")
    assert [bound for bound, _ in transient[:2]] == [f"{16 * 2**20}.0", f"{64 * 2**20}.0"]
    assert transient[-2:] == [(f"{float(16384 * 2**20)!r}", 65), ("+Inf", 77)]


def test_node_metrics_without_a_fetch_have_totals_of_the_report_only():
    found = numbers(node_scrape(node_picture(view(report=DISTINCT), None)))
    assert found['gate_checks_total{site="all"}'] == 2005
    assert found['gate_refusals_total{reason="all"}'] == 2006
    assert not [name for name in found if name.startswith(("gate_predicted", "gate_transient", "node_agent"))]
    assert len([name for name in found if name.startswith(("gate_checks", "gate_refusals"))]) == 2


def test_a_footprint_that_cannot_be_read_has_no_series_instead_of_zero():
    blind = report(Memory(cap=5, phys=None, current=None, headroom=None))
    found = numbers(node_scrape(node_picture(view(report=blind), None)))
    unread = ("phys", "current", "headroom", "engine_phys")
    assert not [name for name in unread if f"node_memory_{name}_bytes" in found]
    assert "node_system_available_bytes" not in found
    assert not [name for name in found if name.startswith("node_system_pressure")]
    assert found["node_memory_level"] == 0


def test_the_gate_is_armed_only_with_limits_in_force_and_the_guard_on():
    for armed, guard, expected in ((True, True, 1), (True, False, 0), (False, True, 0), (False, False, 0)):
        memory = Memory(armed=armed, guard=guard)
        found = numbers(node_scrape(node_picture(view(report=report(memory)), None)))
        assert (found["gate_armed"], found["gate_guard"]) == (expected, float(guard))


# the coordinator


def counters() -> Counters:
    made = Counters()
    made.attempts, made.retries, made.resumes, made.moves = 101, 102, 103, 104
    made.nodes_lost, made.slow_clients = 105, 106
    made.swaps = {"done": 107, "dropped": 108}
    made.answers = {200: 109, 503: 110}
    made.refusals = {"no_headroom": 111}
    made.placements = {A: 112, B: 113, NodeId("gone"): 999}
    made.get_model("tiny").add_tokens(114, 115, 116)
    made.get_model("tiny").ttft.observe(0.5)
    made.get_model("tiny").itl.observe(0.25, 2)
    made.get_model("tiny").e2e.observe(3.0)
    made.get_model("tiny").e2e.observe(4.0)
    made.get_model("tiny").outcomes = {"ok": 117, "no_headroom": 118}
    made.get_model("big").add_tokens(119, 120, 121)
    made.get_node(A).prompt_tokens, made.get_node(A).generated_tokens = 122, 123
    made.keys = {("k1", "tiny"): 124, ("k2", "tiny"): 125, ("k2", "big"): 126, ("gone", "big"): 999}
    made.illegal_events.update({machine: 127 + place for place, machine in enumerate(StateMachine)})
    made.count_upstream("office", "ok", 128, 129)
    made.count_upstream("office", "failed", 2, 5)
    made.queue_wait.observe(0.75)
    made.placement.observe(0.00003)
    return made


def video() -> VideoSnapshot:
    made = VideoCounters({"completed": 201, "failed": 202, "cancelled": 203}, {"worker_lost": 204}, 205.5)
    made.queue_seconds.observe(206.0)
    made.run_seconds.observe(207.0)
    made.confirm_seconds.observe(0.5)
    states = {"queued": 208, "leasing": 209, "in_progress": 210, "finalizing": 211}
    return VideoSnapshot(made, states, 212.0, 213, {A: 0.625}, used=True)


def pool() -> PoolSnapshot:
    memory = Memory(headroom=5000, reusable=300, active=400, current=100)
    shared = Sharing("hours", until=WALL + 50)
    a = view("a", report=report(memory, shared), state="ready", reported_at=NOW - 2, cordoned=True)
    pause = Sharing("idle", paused=True, why="in use", until=WALL + 60)
    b = view("b", report=report(Memory(headroom=7000), pause), state="draining", reported_at=NOW - 5)
    lost = view("c", report=report(Memory(headroom=8000)), state="lost", reported_at=0.0)
    return PoolSnapshot(
        version="0.9.1",
        python="3.11.7",
        wall=WALL,
        now=NOW,
        view=ClusterView((a, b, lost)),
        states={str(state): at for at, state in enumerate(NodeState, 1)},
        self_suspect=True,
        unwritten=381,
        counters=counters(),
        keys={"k1": "laptop", "k2": "server"},
        in_flight={A: 301, B: 302},
        unacknowledged={A: 303, B: 304},
        leaks=305,
        barred=frozenset({B}),
        opened_breakers=306,
        waiting=307,
        queue_limit=308,
        oldest_wait_seconds=309.5,
        keys_refused=310,
        certificates={"authority": (311, 312), "coordinator": (313, 314), "endpoint": (315, 316)},
        node_certificates={A: (317, 318), B: (319, 320)},
        links=LinkCounts(321, 322, 323, 324),
        conditions={"GateInert": True, "GuardOff": False},
        process=ProcessMetrics(325, 326.5, 327, 328, 329),
        video=video(),
        wishes=WishSnapshot(
            WishCounters({("tiny", ActionOutcome.DONE): 401}, {("tiny", ActionOutcome.REFUSED): 402}),
            {"tiny": (403, 404)},
        ),
    )


POOL_NUMBERS: Numbers = {
    'wish_replicas_wanted{model="tiny"}': 403,
    'wish_replicas_ready{model="tiny"}': 404,
    'wish_loads_total{model="tiny",outcome="done"}': 401,
    'wish_unloads_total{model="tiny",outcome="refused"}': 402,
    'router_requests_total{model="tiny",outcome="ok"}': 117,
    'router_requests_total{model="tiny",outcome="no_headroom"}': 118,
    'router_http_responses_total{code="200"}': 109,
    'router_http_responses_total{code="503"}': 110,
    "router_attempts_total": 101,
    "router_retries_total": 102,
    "router_requests_resumed_total": 103,
    "router_requests_migrated_total": 104,
    'router_model_swaps_total{outcome="done"}': 107,
    'router_model_swaps_total{outcome="dropped"}': 108,
    "router_requests_lost_total": 105,
    "router_slow_clients_total": 106,
    **{f'router_node_refusals_total{{reason="{code.value}"}}': 0 for code in RefusalCode},
    'router_node_refusals_total{reason="no_headroom"}': 111,
    'router_placements_total{node="a"}': 112,
    'router_placements_total{node="b"}': 113,
    "router_placement_seconds_count": 1,
    "router_placement_seconds_sum": 0.00003,
    'router_in_flight_requests{node="a"}': 301,
    'router_in_flight_requests{node="b"}': 302,
    'router_reserved_bytes{node="a"}': 303,
    'router_reserved_bytes{node="b"}': 304,
    "router_reservation_leaks": 305,
    **{
        f'illegal_events_total{{machine="{machine}"}}': 127 + place
        for place, machine in enumerate(("request", "membership", "pull", "wish", "video_job"))
    },
    'upstream_requests_total{outcome="ok",upstream="office"}': 1,
    'upstream_requests_total{outcome="failed",upstream="office"}': 1,
    'upstream_tokens_total{kind="prompt",upstream="office"}': 130,
    'upstream_tokens_total{kind="completion",upstream="office"}': 134,
    'router_breaker_open{node="a"}': 0,
    'router_breaker_open{node="b"}': 1,
    'router_breaker_open{node="c"}': 0,
    "router_breakers_opened_total": 306,
    "router_queue_depth": 307,
    "router_queue_limit": 308,
    "router_queue_oldest_seconds": 309.5,
    "request_queue_time_seconds_count": 1,
    "request_queue_time_seconds_sum": 0.75,
    'time_to_first_token_seconds_count{model="tiny"}': 1,
    'time_to_first_token_seconds_sum{model="tiny"}': 0.5,
    'time_to_first_token_seconds_count{model="big"}': 0,
    'time_to_first_token_seconds_sum{model="big"}': 0,
    'inter_token_latency_seconds_count{model="tiny"}': 2,
    'inter_token_latency_seconds_sum{model="tiny"}': 0.5,
    'inter_token_latency_seconds_count{model="big"}': 0,
    'inter_token_latency_seconds_sum{model="big"}': 0,
    'e2e_request_latency_seconds_count{model="tiny"}': 2,
    'e2e_request_latency_seconds_sum{model="tiny"}': 7,
    'e2e_request_latency_seconds_count{model="big"}': 0,
    'e2e_request_latency_seconds_sum{model="big"}': 0,
    'prompt_tokens_total{model="tiny"}': 114,
    'prompt_tokens_total{model="big"}': 119,
    'cached_prompt_tokens_total{model="tiny"}': 115,
    'cached_prompt_tokens_total{model="big"}': 120,
    'generation_tokens_total{model="tiny"}': 116,
    'generation_tokens_total{model="big"}': 121,
    'cluster_node_prompt_tokens_total{node="a"}': 122,
    'cluster_node_generation_tokens_total{node="a"}': 123,
    'key_tokens_total{key="laptop",model="tiny"}': 124,
    'key_tokens_total{key="server",model="tiny"}': 125,
    'key_tokens_total{key="server",model="big"}': 126,
    **{f'cluster_nodes{{state="{state}"}}': at for at, state in enumerate(NodeState, 1)},
    'cluster_node_state{node="a",state="ready"}': 1,
    'cluster_node_state{node="b",state="draining"}': 1,
    'cluster_node_state{node="c",state="lost"}': 1,
    'cluster_node_cordoned{node="a"}': 1,
    'cluster_node_cordoned{node="b"}': 0,
    'cluster_node_cordoned{node="c"}': 0,
    'cluster_node_paused{node="a"}': 0,
    'cluster_node_paused{node="b"}': 1,
    'cluster_node_paused{node="c"}': 0,
    'cluster_node_paused_until_timestamp_seconds{node="b"}': WALL + 60,
    'cluster_node_report_timestamp_seconds{node="a"}': WALL - 2,
    'cluster_node_report_timestamp_seconds{node="b"}': WALL - 5,
    'cluster_node_headroom_bytes{node="a"}': 5000 + 300 - 303,
    'cluster_node_headroom_bytes{node="b"}': 7000 - 304,
    'cluster_node_certificate_issued_timestamp_seconds{node="a"}': 317,
    'cluster_node_certificate_issued_timestamp_seconds{node="b"}': 319,
    'cluster_node_certificate_expires_timestamp_seconds{node="a"}': 318,
    'cluster_node_certificate_expires_timestamp_seconds{node="b"}': 320,
    "coordinator_self_suspect": 1,
    "coordinator_unwritten_changes": 381,
    "cluster_links": 321,
    "cluster_unauthenticated_connections": 322,
    "cluster_node_connections_total": 323,
    "cluster_node_connections_denied_total": 324,
    'video_jobs{state="queued"}': 208,
    'video_jobs{state="leasing"}': 209,
    'video_jobs{state="in_progress"}': 210,
    'video_jobs{state="finalizing"}': 211,
    'video_jobs_ended_total{status="completed"}': 201,
    'video_jobs_ended_total{status="failed"}': 202,
    'video_jobs_ended_total{status="cancelled"}': 203,
    'video_failures_total{reason="worker_lost"}': 204,
    "video_oldest_queued_seconds": 212,
    'video_job_progress_ratio{node="a"}': 0.625,
    "video_output_seconds_total": 205.5,
    "video_artifacts_bytes": 213,
    "video_queue_time_seconds_count": 1,
    "video_queue_time_seconds_sum": 206,
    "video_job_duration_seconds_count": 1,
    "video_job_duration_seconds_sum": 207,
    "video_lease_confirm_seconds_count": 1,
    "video_lease_confirm_seconds_sum": 0.5,
    'build_info{python="3.11.7",version="0.9.1"}': 1,
    'tls_issued_timestamp_seconds{certificate="authority"}': 311,
    'tls_issued_timestamp_seconds{certificate="coordinator"}': 313,
    'tls_issued_timestamp_seconds{certificate="endpoint"}': 315,
    'tls_expires_timestamp_seconds{certificate="authority"}': 312,
    'tls_expires_timestamp_seconds{certificate="coordinator"}': 314,
    'tls_expires_timestamp_seconds{certificate="endpoint"}': 316,
    "auth_failures_total": 310,
    'condition_active{condition="GateInert"}': 1,
    'condition_active{condition="GuardOff"}': 0,
    "process_start_time_seconds": 325,
    "process_cpu_seconds_total": 326.5,
    "process_peak_resident_bytes": 327,
    "process_open_fds": 328,
    "process_max_fds": 329,
}


def test_every_series_of_the_coordinator_has_its_value():
    assert numbers(pool_scrape(pool())) == POOL_NUMBERS


def test_headroom_of_the_pool_names_linked_nodes_that_can_be_read_alone():
    """An asleep, lost, paused or unreadable node has no headroom. Otherwise NoHeadroomAnywhere would never hold."""
    states = ("ready", "suspect", "draining", "joining", "asleep", "lost", "paused", "left")
    nodes = tuple(view(state, report=report(Memory(headroom=10)), state=state) for state in states)
    unreadable = view("blind", report=report(Memory(phys=None, headroom=None)), state="ready")
    picture = replace(pool(), view=ClusterView((*nodes, unreadable)), unacknowledged={NodeId("ready"): 4})
    found = numbers(pool_scrape(picture))
    named = {name: value for name, value in found.items() if name.startswith("cluster_node_headroom_bytes")}
    assert named == {
        'cluster_node_headroom_bytes{node="ready"}': 6,
        'cluster_node_headroom_bytes{node="suspect"}': 10,
        'cluster_node_headroom_bytes{node="draining"}': 10,
    }


def test_a_pool_that_makes_no_videos_has_no_series_of_videos():
    found = numbers(pool_scrape(replace(pool(), video=replace(video(), used=False))))
    assert [name for name in found if name.startswith("video_") and "progress" not in name] == []


def test_every_metric_of_a_condition_has_a_value_here():
    """An alert reads metrics. This file must check the value of each of them."""
    known = {name.partition("{")[0] for name in (*NODE_NUMBERS, *POOL_NUMBERS)}
    wanted = {name.removeprefix("macpool_") for rule in RULES for name in rule.list_metrics() if name != "up"}
    missing = wanted - known - {"cluster_model_fingerprints"}  # fingerprints: test_metrics.py
    assert missing == set(), "add the value of these metrics to NODE_NUMBERS or POOL_NUMBERS"


def test_histograms_of_the_coordinator_have_their_documented_bounds():
    text = pool_scrape(pool_picture(1, 0))
    assert [bound for bound, _ in buckets(text, "request_queue_time_seconds")] == [
        "0.01",
        "0.05",
        "0.1",
        "0.25",
        "0.5",
        "1.0",
        "2.5",
        "5.0",
        "10.0",
        "20.0",
        "30.0",
        "60.0",
        "+Inf",
    ]

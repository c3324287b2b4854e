"""For each rule, scenarios in which it holds and in which it does not, as series of values five seconds apart.

Both Prometheus (`promtool test rules`) and the coordinator's own conditions are tested with them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

STEP = 5
"""Seconds between two samples."""
Values = Callable[[float], float]
Series = dict[str, Values]
"""Values by metric with its labels as in PromQL: `name{label="value"}`."""
NODE = 'node="studio"'


def steady(value: float) -> Values:
    """Return values that stay constant."""
    return lambda _: value


def rising(per_second: float) -> Values:
    """Return values that rise all the time."""
    return lambda seconds: per_second * seconds


def until(seconds: float, per_second: float) -> Values:
    """Return values that rise by `per_second` for `seconds`, and then stay."""
    return lambda now: per_second * min(now, seconds)


def restarting(after: float, per_second: float) -> Values:
    """Return values that rise, and start from zero again after `after` seconds."""
    return lambda now: per_second * (now if now < after else now - after)


def _node(**series: Values) -> Series:
    return {f"macpool_{name}{{{NODE}}}": values for name, values in series.items()}


def _pool(**series: Values) -> Series:
    return {f"macpool_{name}": values for name, values in series.items()}


def _labelled(labels: str, **series: Values) -> Series:
    return {f"macpool_{name}{{{labels}}}": values for name, values in series.items()}


def _forwards(forwards: Values, *checks: Values) -> Series:
    sites = ("prefill", "join")
    return _node(engine_forwards_total=forwards) | {
        f'macpool_gate_checks_total{{{NODE},site="{site}"}}': values
        for site, values in zip(sites, checks, strict=False)
    }


def _refusals(checks: float, refused: float) -> Series:
    return {
        f'macpool_gate_refusals_total{{{NODE},reason="no_headroom"}}': rising(refused),
        f'macpool_gate_refusals_total{{{NODE},reason="prefill_memory_exceeded"}}': steady(0),
        f'macpool_gate_checks_total{{{NODE},site="prefill"}}': rising(checks),
    }


@dataclass(frozen=True, slots=True)
class Story:
    """Scenarios of one rule.

    `holds`: Series with which the rule holds after `seconds`, with these `labels`.
    `rests`: Series with which the rule never holds.
    """

    holds: Series
    seconds: int
    labels: Mapping[str, str]
    rests: tuple[Series, ...]


_STUDIO = {"node": "studio"}
_LIFE = 1000.0
GIB = 2.0**30

STORIES: dict[str, Story] = {
    "GateInert": Story(
        _forwards(rising(2), steady(0), steady(7)),
        30,
        _STUDIO,
        (
            _forwards(rising(2), rising(1), rising(1)),
            _forwards(steady(5), steady(0), steady(0)),
            _forwards(rising(2), steady(0), rising(1)),
            _forwards(restarting(60, 2), restarting(60, 3), steady(0)),
            _forwards(until(60, 2), until(60, 2), steady(0)),
        ),
    ),
    "GateUnarmed": Story(
        _node(gate_armed=steady(0), gate_guard=steady(1)),
        60,
        _STUDIO,
        (
            _node(gate_armed=steady(1), gate_guard=steady(1)),
            _node(gate_armed=steady(0), gate_guard=steady(0)),
            _node(gate_armed=lambda now: float(now > 20), gate_guard=steady(1)),
        ),
    ),
    "GuardOff": Story(_node(gate_guard=steady(0)), 10, _STUDIO, (_node(gate_guard=steady(1)),)),
    "MarginZero": Story(
        _node(node_memory_margin_bytes=steady(0), node_memory_cap_bytes=steady(96 * GIB)),
        30,
        _STUDIO,
        (
            _node(node_memory_margin_bytes=steady(GIB), node_memory_cap_bytes=steady(96 * GIB)),
            _node(node_memory_margin_bytes=steady(0), node_memory_cap_bytes=steady(0)),
        ),
    ),
    "OverCap": Story(
        _node(
            node_memory_engine_phys_bytes=steady(90 * GIB),
            node_memory_cap_bytes=steady(96 * GIB),
            node_memory_lease_bytes=steady(8 * GIB),
        ),
        30,
        _STUDIO,
        (
            _node(
                node_memory_engine_phys_bytes=steady(90 * GIB),
                node_memory_cap_bytes=steady(96 * GIB),
                node_memory_lease_bytes=steady(0),
            ),
            _node(node_memory_cap_bytes=steady(96 * GIB), node_memory_lease_bytes=steady(0)),
        ),
    ),
    "StaleSensor": Story(
        _node(node_memory_reading_timestamp_seconds=steady(0)),
        60,
        _STUDIO,
        (
            _node(node_memory_reading_timestamp_seconds=rising(1)),
            _node(node_memory_reading_timestamp_seconds=lambda now: now - 10),
        ),
    ),
    "NodeDown": Story(
        _labelled(f'{NODE},state="lost"', cluster_node_state=steady(1)),
        90,
        {**_STUDIO, "state": "lost"},
        (
            _labelled(f'{NODE},state="asleep"', cluster_node_state=steady(1)),
            _labelled(f'{NODE},state="ready"', cluster_node_state=steady(1)),
        ),
    ),
    "CutOff": Story(_pool(coordinator_self_suspect=steady(1)), 20, {}, (_pool(coordinator_self_suspect=steady(0)),)),
    "StateUnwritten": Story(
        _pool(coordinator_unwritten_changes=steady(3)), 30, {}, (_pool(coordinator_unwritten_changes=steady(0)),)
    ),
    "ModelConflict": Story(
        _labelled('model="tiny"', cluster_model_fingerprints=steady(2)),
        90,
        {"model": "tiny"},
        (
            _labelled('model="tiny"', cluster_model_fingerprints=steady(1)),
            _labelled('model="tiny"', cluster_model_fingerprints=lambda now: 1.0 + float(now % 60 < 30)),
        ),
    ),
    "ModelWishUnmet": Story(
        _labelled('model="big"', wish_replicas_ready=steady(1), wish_replicas_wanted=steady(2)),
        660,
        {"model": "big"},
        (
            _labelled('model="big"', wish_replicas_ready=steady(2), wish_replicas_wanted=steady(2)),
            _labelled('model="big"', wish_replicas_ready=steady(0), wish_replicas_wanted=steady(0)),
            _labelled('model="big"', wish_replicas_ready=lambda now: float(now > 500), wish_replicas_wanted=steady(1)),
        ),
    ),
    "BreakerOpen": Story(
        _node(router_breaker_open=steady(1)),
        60,
        _STUDIO,
        (_node(router_breaker_open=steady(0)), _node(router_breaker_open=lambda now: float(now % 30 < 10))),
    ),
    "EngineCrashing": Story(
        _node(engine_restarts_total=rising(0.02)),
        300,
        _STUDIO,
        (_node(engine_restarts_total=steady(9)), _node(engine_restarts_total=lambda now: float(now > 100))),
    ),
    "EngineKilled": Story(
        _node(node_memory_kills_total=lambda now: float(now > 30)),
        60,
        _STUDIO,
        (_node(node_memory_kills_total=steady(3)),),
    ),
    "WiredLeak": Story(
        _node(engine_leaked_wired_bytes=lambda now: 40.0 * GIB * (now > 30)),
        60,
        _STUDIO,
        (_node(engine_leaked_wired_bytes=steady(0)),),
    ),
    "LeaseLeak": Story(
        _node(node_memory_lease_bytes=steady(8 * GIB), video_worker_phys_bytes=steady(0)),
        700,
        _STUDIO,
        (
            _node(node_memory_lease_bytes=steady(8 * GIB), video_worker_phys_bytes=steady(4 * GIB)),
            _node(node_memory_lease_bytes=steady(0), video_worker_phys_bytes=steady(0)),
        ),
    ),
    "ReservationLeak": Story(
        _pool(router_reservation_leaks=steady(1)), 30, {}, (_pool(router_reservation_leaks=steady(0)),)
    ),
    "IllegalEvent": Story(
        _labelled('machine="request"', illegal_events_total=lambda now: float(now > 30)),
        60,
        {"machine": "request"},
        (_labelled('machine="request"', illegal_events_total=steady(3)),),
    ),
    "NodeIllegalEvent": Story(
        _node(node_illegal_events_total=lambda now: float(now > 30)),
        60,
        _STUDIO,
        (_node(node_illegal_events_total=steady(3)),),
    ),
    "QueueStuck": Story(
        _pool(router_queue_depth=steady(3), router_attempts_total=steady(50)),
        60,
        {},
        (
            _pool(router_queue_depth=steady(3), router_attempts_total=rising(0.1)),
            _pool(router_queue_depth=steady(0), router_attempts_total=steady(50)),
        ),
    ),
    "NoHeadroomAnywhere": Story(
        {
            'macpool_cluster_node_headroom_bytes{node="a"}': steady(-GIB),
            'macpool_cluster_node_headroom_bytes{node="b"}': steady(0),
        },
        90,
        {},
        (
            {
                'macpool_cluster_node_headroom_bytes{node="a"}': steady(-GIB),
                'macpool_cluster_node_headroom_bytes{node="b"}': steady(GIB),
            },
            {},
        ),
    ),
    "HighRefusalRatio": Story(_refusals(1, 0.8), 200, _STUDIO, (_refusals(1, 0.2), _refusals(0.01, 0.01))),
    "CertExpiry": Story(
        _labelled(
            'certificate="coordinator"',
            tls_expires_timestamp_seconds=steady(_LIFE),
            tls_issued_timestamp_seconds=steady(0),
        ),
        850,
        {"certificate": "coordinator"},
        (
            _labelled(
                'certificate="coordinator"',
                tls_expires_timestamp_seconds=steady(10 * _LIFE),
                tls_issued_timestamp_seconds=steady(0),
            ),
        ),
    ),
    "NodeCertExpiry": Story(
        _node(
            cluster_node_certificate_expires_timestamp_seconds=steady(_LIFE),
            cluster_node_certificate_issued_timestamp_seconds=steady(0),
        ),
        850,
        _STUDIO,
        (
            _node(
                cluster_node_certificate_expires_timestamp_seconds=steady(10 * _LIFE),
                cluster_node_certificate_issued_timestamp_seconds=steady(0),
            ),
        ),
    ),
    "FilesRunOut": Story(
        _pool(process_open_fds=steady(95), process_max_fds=steady(100)),
        60,
        {},
        (
            _pool(process_open_fds=steady(80), process_max_fds=steady(100)),
            _pool(process_open_fds=steady(0), process_max_fds=steady(0)),
        ),
    ),
    "CoordinatorDown": Story(
        {'up{job="macpool"}': steady(0)},
        60,
        {"job": "macpool"},
        ({'up{job="macpool"}': steady(1)}, {'up{job="macpool-nodes"}': steady(0)}),
    ),
}

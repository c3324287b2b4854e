"""Metric families of the coordinator itself: version, certificates, conditions and process."""

from collections.abc import Callable

from coordinator.metrics.families import (
    MetricFamily,
    MetricKind,
    Row,
    create_counter,
    create_gauge,
)
from coordinator.metrics.pool_snapshot import PoolSnapshot

CERTIFICATES = ("authority", "coordinator", "endpoint")
"""Certificates of the coordinator, as label values: the cluster CA, the cluster port's, and the HTTP port's."""
_G, _C, _H = MetricKind.GAUGE, MetricKind.COUNTER, MetricKind.HISTOGRAM


def _read_validity(at: int) -> Callable[[PoolSnapshot], list[Row]]:
    return lambda picture: [((name,), life[at]) for name, life in picture.certificates.items()]


COORDINATOR: tuple[MetricFamily[PoolSnapshot], ...] = (
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
    create_counter("auth_failures", "Requests with an unknown or expired API key.", lambda p: p.keys_refused),
    MetricFamily(
        "condition_active",
        _G,
        "1 while a condition is active; the alert of the same name fires.",
        lambda p: [((name,), float(holds)) for name, holds in p.conditions.items()],
        (("condition", "a name of the [runbook](alerts.md)"),),
    ),
    create_gauge("process_start_time_seconds", "Start of the coordinator, Unix time.", lambda p: p.process.started),
    create_counter("process_cpu_seconds", "CPU time of the coordinator.", lambda p: p.process.cpu_seconds),
    create_gauge(
        "process_peak_resident_bytes", "Peak resident memory of the coordinator.", lambda p: p.process.peak_bytes
    ),
    create_gauge("process_open_fds", "Open files and connections of the coordinator.", lambda p: p.process.open_files),
    create_gauge("process_max_fds", "Limit of open files and connections.", lambda p: p.process.max_files),
)

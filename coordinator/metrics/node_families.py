"""Metric families of one node, from its newest report and its own measurements.

The families have no label for the node, because Prometheus adds it.
"""

from collections.abc import Callable

from coordinator.metrics.engine_families import CACHE, ENGINE, MODELS
from coordinator.metrics.families import (
    MetricFamily,
    MetricKind,
    create_counter,
    create_gauge,
    limit_to_known,
)
from coordinator.metrics.memory_families import GATE, MEMORY
from coordinator.metrics.node_snapshot import NodeSnapshot
from wire.histogram import NodeMeasures

KINDS = ("mlx", "scripted")
"""Kinds of engines, as label values; any other kind becomes `families.OTHER`."""
TIERS = ("safe", "balanced", "aggressive")
"""Memory tiers, as label values; any other tier becomes `families.OTHER`."""
_G, _C = MetricKind.GAUGE, MetricKind.COUNTER


def _read_agent(read: Callable[[NodeMeasures], float]) -> Callable[[NodeSnapshot], float | None]:
    return lambda picture: None if picture.measures is None else read(picture.measures)


ABOUT: tuple[MetricFamily[NodeSnapshot], ...] = (
    MetricFamily(
        "node_info",
        _G,
        "Machine and software of the node; always 1.",
        lambda p: [
            ((*p.host, limit_to_known(p.view.engine.kind, KINDS), limit_to_known(p.view.enforcement.tier, TIERS)), 1.0)
        ],
        (
            ("chip", "as the machine reports it"),
            ("system", "as the machine reports it"),
            ("version", "of macpool"),
            ("engine", "`engine.kind`"),
            ("tier", "`memory.tier`"),
        ),
    ),
    create_gauge(
        "node_report_timestamp_seconds", "Arrival of the node's newest report, Unix time.", lambda p: p.reported_at
    ),
    create_counter("node_agent_cpu_seconds", "CPU time of the agent's process.", _read_agent(lambda m: m.agent_cpu)),
    create_counter(
        "node_illegal_events",
        "Events that a state machine of the agent does not allow: engine process, link or lease.",
        lambda p: p.view.illegal_events,
    ),
    create_gauge("node_agent_phys_bytes", "Footprint of the agent's process.", _read_agent(lambda m: m.agent_phys)),
)
NODE = (*ABOUT, *MEMORY, *GATE, *ENGINE, *MODELS, *CACHE)

"""Load of the pool and of each node over the last hour, in a ring of fixed size.

Rules
- A reading has totals and gauges of one moment. Totals are stored as rates between two readings.
- An unknown value is a gap, never zero and never the last value. Examples: memory of a lost or paused node, time to
  first token without a first token, every value while the coordinator slept.
- The size is fixed: `MAX_POINTS` points of the pool and of at most `MAX_NODES` nodes. The pool's points include all
  nodes.
"""

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from wire.identity import NodeId

INTERVAL_SECONDS = 10.0
"""Seconds between two readings of the load."""
MAX_POINTS = 360
"""Number of points of each series, which cover one hour. The oldest point is removed first."""
MAX_NODES = 64
"""Maximum number of nodes with their own points, of 17 KB each."""
UNKNOWN = math.nan
"""Value of a point without a reading."""
NODE_SERIES = (
    "prompt_tokens_per_second",
    "generated_tokens_per_second",
    "in_flight",
    "memory_bytes",
    "cap_bytes",
    "ttft_seconds",
)
"""Names of the series of a node."""
POOL_SERIES = (*NODE_SERIES, "requests_per_second", "queued")
"""Names of the series of the whole pool."""


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """Load of one node at one moment: totals since the coordinator started, then gauges."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_tokens: int = 0
    """Number of requests for which the node has generated the first token."""
    first_token_seconds: float = 0.0
    """Sum of the times to first token of the requests in `first_tokens`, in seconds."""
    in_flight: int = 0
    """Current number of requests on the node."""
    memory: int | None = None
    """Current memory in bytes; None while the node is not linked or the pool does not use its memory."""
    cap: int | None = None
    """Cap in bytes; None while the node is not linked or the pool does not use its memory."""


@dataclass(frozen=True, slots=True)
class LoadReading:
    """Load of the pool at one moment."""

    at: float
    """Time of the reading in Unix seconds."""
    nodes: Mapping[NodeId, NodeLoad]
    requests: int = 0
    """Total of ended requests since the coordinator started."""
    queued: int = 0
    """Current number of requests that wait for a node."""


class _Ring:
    """Newest `MAX_POINTS` values of several series."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._series = {name: array("d", [UNKNOWN]) * MAX_POINTS for name in names}

    def put(self, number: int, values: Mapping[str, float]) -> None:
        for name, series in self._series.items():
            series[number % MAX_POINTS] = values.get(name, UNKNOWN)

    def to_row(self, number: int, count: int) -> dict[str, list[float | None]]:
        """Return the `count` values of each series up to the point `number`, oldest first. None is a gap."""
        at = [point % MAX_POINTS for point in range(number - count + 1, number + 1)]
        return {name: [_to_json_number(series[index]) for index in at] for name, series in self._series.items()}


class LoadHistory:
    """Ring of load points of the last hour. Each point is computed from two consecutive readings."""

    def __init__(self) -> None:
        self._last: LoadReading | None = None
        self._number = -1
        self._pool = _Ring(POOL_SERIES)
        self._nodes: dict[NodeId, _Ring] = {}

    def add_reading(self, reading: LoadReading) -> None:
        """Add a reading, and the point between the previous reading and this one. Missed intervals become gaps.

        The first reading adds no point. If the clock was set back, `INTERVAL_SECONDS` are assumed between both
        readings. The points of nodes that are not in the reading are deleted.
        """
        last, self._last = self._last, reading
        for node in self._nodes.keys() - reading.nodes.keys():
            del self._nodes[node]
        if last is None:
            return
        elapsed = max(INTERVAL_SECONDS, reading.at - last.at)  # less only if the clock was set back
        for _ in range(min(MAX_POINTS, round(elapsed / INTERVAL_SECONDS) - 1)):
            self._append_point({}, {})
        nodes = {
            node: _compute_node_point(last.nodes.get(node, NodeLoad()), load, elapsed)
            for node, load in reading.nodes.items()
        }
        self._append_point(_compute_pool_point(last, reading, elapsed), nodes)

    def _append_point(self, pool: Mapping[str, float], nodes: Mapping[NodeId, Mapping[str, float]]) -> None:
        self._number += 1
        self._pool.put(self._number, pool)
        for node in nodes:
            if node not in self._nodes and len(self._nodes) < MAX_NODES:
                self._nodes[node] = _Ring(NODE_SERIES)
        for node, ring in self._nodes.items():
            ring.put(self._number, nodes.get(node, {}))

    def to_row(self, points: int = MAX_POINTS) -> dict[str, object]:
        """Return the newest `points` points as a row of the API, oldest first.

        None is a gap. `number` is the sequence number of the newest point. Before the first point, it is -1 and the
        series are empty.
        """
        count = min(points, MAX_POINTS, self._number + 1)
        return {
            "interval_seconds": INTERVAL_SECONDS,
            "number": self._number,
            "at": None if self._last is None else self._last.at,
            "pool": self._pool.to_row(self._number, count),
            "nodes": {node: ring.to_row(self._number, count) for node, ring in self._nodes.items()},
        }


def _compute_pool_point(last: LoadReading, now: LoadReading, seconds: float) -> dict[str, float]:
    before = [last.nodes.get(node, NodeLoad()) for node in now.nodes]
    pairs = list(zip(before, now.nodes.values(), strict=True))
    loads = now.nodes.values()
    return {
        "prompt_tokens_per_second": sum(_compute_increase(a.prompt_tokens, b.prompt_tokens) for a, b in pairs)
        / seconds,
        "generated_tokens_per_second": sum(_compute_increase(a.generated_tokens, b.generated_tokens) for a, b in pairs)
        / seconds,
        "in_flight": sum(load.in_flight for load in loads),
        "memory_bytes": _sum_known([load.memory for load in loads]),
        "cap_bytes": _sum_known([load.cap for load in loads if load.memory is not None]),
        "ttft_seconds": _compute_mean(
            sum(_compute_increase(a.first_token_seconds, b.first_token_seconds) for a, b in pairs),
            sum(_compute_increase(a.first_tokens, b.first_tokens) for a, b in pairs),
        ),
        "requests_per_second": _compute_increase(last.requests, now.requests) / seconds,
        "queued": now.queued,
    }


def _compute_node_point(last: NodeLoad, now: NodeLoad, seconds: float) -> dict[str, float]:
    if now.memory is None:
        return {}
    return {
        "prompt_tokens_per_second": _compute_increase(last.prompt_tokens, now.prompt_tokens) / seconds,
        "generated_tokens_per_second": _compute_increase(last.generated_tokens, now.generated_tokens) / seconds,
        "in_flight": now.in_flight,
        "memory_bytes": now.memory,
        "cap_bytes": UNKNOWN if now.cap is None else now.cap,
        "ttft_seconds": _compute_mean(
            _compute_increase(last.first_token_seconds, now.first_token_seconds),
            _compute_increase(last.first_tokens, now.first_tokens),
        ),
    }


def _compute_increase(before: float, now: float) -> float:
    """Return the increase of a total. A total that fell restarted at zero."""
    return now - before if now >= before else now


def _compute_mean(total: float, count: float) -> float:
    return total / count if count else UNKNOWN


def _sum_known(values: list[int | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) if known else UNKNOWN


def _to_json_number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)

"""Sampler of the pool's load, every `INTERVAL_SECONDS` while the coordinator runs."""

import asyncio
import time
from collections.abc import Callable

import structlog

from coordinator.cluster.registry import Registry
from coordinator.observe.load_history import INTERVAL_SECONDS, LoadHistory, LoadReading, NodeLoad
from router.dispatch.counters import NodeCounts
from router.dispatch.dispatcher import Dispatcher
from router.placement.cluster_view import NodeView
from wire.node_state import NodeState

log = structlog.get_logger("coordinator.load")
MEASURED_STATES = frozenset({NodeState.READY, NodeState.SUSPECT, NodeState.DRAINING})
"""States in which the memory and the cap of a node are recorded.

In other states the pool does not use the memory of the node, or has no recent report.
"""


def read_load(registry: Registry, dispatcher: Dispatcher, at: float) -> LoadReading:
    """Return the load of the pool and of each member. `at` is the current time in Unix seconds.

    Nodes that have left are omitted.
    """
    counters = dispatcher.counters
    members = {
        node.id: build_node_load(node, counters.nodes.get(node.id), dispatcher.count_in_flight(node.id))
        for node in sorted(registry.build_view().nodes, key=lambda node: node.name)
        if node.state != NodeState.LEFT
    }
    return LoadReading(at, members, counters.durations, dispatcher.count_queued())


def build_node_load(node: NodeView, counts: NodeCounts | None, in_flight: int) -> NodeLoad:
    """Return the load of one member, from its view, its counters (None: zero) and the number of its requests.

    `memory` and `cap` are None unless the state of the member is in `MEASURED_STATES`.
    """
    counts, measured = counts or NodeCounts(), node.state in MEASURED_STATES
    return NodeLoad(
        prompt_tokens=counts.prompt_tokens,
        generated_tokens=counts.generated_tokens,
        first_tokens=counts.first_tokens,
        first_token_seconds=counts.first_token_seconds,
        in_flight=in_flight,
        memory=node.memory.current if measured else None,
        cap=node.memory.cap if measured else None,
    )


async def sample_load(history: LoadHistory, read: Callable[[float], LoadReading]) -> None:
    """Add a reading to `history` every `INTERVAL_SECONDS` until cancelled. A failed reading is a gap.

    `read` returns the load at a Unix time. The first of consecutive failures is logged.
    """
    failed = False
    while True:
        try:
            history.add_reading(read(time.time()))
            failed = False
        except Exception:
            if not failed:
                log.exception("load not read")
            failed = True
        await asyncio.sleep(INTERVAL_SECONDS)

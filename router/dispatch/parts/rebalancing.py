"""Rebalancing: move requests that wait on a busy node to an idle node.

A request is sent to a node at once if it fits there. A batch may therefore wait on one machine when another machine
joins, wakes up, or finishes sooner than expected. Rebalancing gives that machine a part of the batch.

A node is idle when it has prefilled every prompt and has a free decode row. Requests that wait on their first node
without a first token may then restart there, oldest first. A move must gain enough, because the prefill done on the old
node is lost. The wait on the old node must exceed `MIN_SPEEDUP` times that on the new node plus `MIN_GAIN_SECONDS`.

In a simulation, a second Mac joins while half of a batch of 70 requests still waits. The batch is done after 4.5
minutes instead of 8. In the scenarios of a household and of a lab, where no machine joins, the waits do not change.
"""

from collections.abc import Iterable

from router.dispatch.active_request import ActiveRequest
from router.placement.candidate import Candidate
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.reservations import ReservationLedger
from router.placement.weights import PREFILL_SLOWDOWN_WHILE_DECODING
from wire.node_state import NodeState

MIN_GAIN_SECONDS = 5.0
"""Seconds that a move must gain in addition to `MIN_SPEEDUP`, and minimum age of the request in seconds."""
MIN_SPEEDUP = 3
"""Minimum ratio of the wait on the old node to the wait on the new node. Expected times are inaccurate.

In simulations of machines that come and go, a ratio of 2 makes the slowest requests wait longer.
"""
MAX_JUDGED, MAX_EXAMINED, MAX_TARGETS = 64, 256, 16
"""Maximum requests judged in one pass, maximum requests examined in it, and maximum target nodes of each model.

In a large cluster, later passes handle the rest.
"""


def find_idle_nodes(view: ClusterView, ledger: ReservationLedger) -> dict[str, ClusterView]:
    """Return the idle nodes by the name of each model that they have, at most `MAX_TARGETS` for each model."""
    idle: dict[str, list[NodeView]] = {}
    for node in view.nodes:
        if _is_idle(node, ledger):
            for name in node.models:
                idle.setdefault(name, []).append(node)
    return {name: ClusterView(tuple(nodes[:MAX_TARGETS])) for name, nodes in idle.items()}


def _is_idle(node: NodeView, ledger: ReservationLedger) -> bool:
    engine, account = node.engine, ledger.get_account(node.id)
    if node.state != NodeState.READY or engine.waiting or engine.queued_tokens or account.pending_prefills:
        return False
    return not engine.rows or account.rows < engine.rows


def list_movable_requests(requests: Iterable[ActiveRequest], now: float) -> list[ActiveRequest]:
    """Return the requests that rebalancing may move, oldest first, at most `MAX_EXAMINED`.

    These requests are in their first attempt, have no first token, and arrived more than `MIN_GAIN_SECONDS` before
    `now` (monotonic seconds).
    """
    movable = [
        request
        for request in requests
        if request.life.first_at is None and request.attempts == 1 and now - request.arrived > MIN_GAIN_SECONDS
    ]
    return sorted(movable, key=lambda request: request.number)[:MAX_EXAMINED]


def estimate_wait_seconds(here: Candidate) -> float:
    """Return the expected seconds to the first token of a request that stays on its node; 0 if the model is unknown.

    `here` judges the request as if it were new. Its prompt is therefore counted twice: as the new prompt, and as a
    prompt in front of it. One of the two is subtracted.
    """
    return (
        here.expected_ttft - PREFILL_SLOWDOWN_WHILE_DECODING * here.prefill_tokens / here.model.prefill_speed
        if here.model
        else 0.0
    )


def is_worth_moving(here: Candidate, there: Candidate) -> bool:
    """Return whether a request that waits on the node `here` gains enough by a restart on the node `there`.

    Both candidates judge the request as if it were new.
    """
    return estimate_wait_seconds(here) > MIN_SPEEDUP * there.expected_ttft + MIN_GAIN_SECONDS

"""Migration: requests leave a live node for another one, which gets them before the old node loses them.

Requests are migrated if their node drains, or is silent for longer than a resume elsewhere would take, and another node
has room. The remaining requests continue on their node. Waiting requests of a busy node are rebalanced to idle nodes by
the rules of `rebalancing`.
"""

import asyncio
import contextlib
from collections.abc import Callable

from msgspec.structs import replace

from router.dispatch.active_request import ActiveRequest
from router.dispatch.counters import Counters
from router.dispatch.parts import rebalancing
from router.dispatch.parts.attempts import Attempts
from router.dispatch.parts.placer import Placer
from router.dispatch.parts.wakeups import DrainWaits
from router.dispatch.request_events import Event, Moved
from router.placement.candidate import Candidate, Placement
from router.placement.cluster_view import ClusterView
from router.placement.recovery import LossKind, can_recover, compute_silence_limit_seconds
from router.placement.reservations import ReservationLedger
from wire.identity import NodeId
from wire.node_state import NodeState


class Migration:
    """Migration and rebalancing of requests.

    `apply` applies an event to a request. `numbers` returns the next attempt number and sequence number. `clock`
    returns monotonic seconds.
    """

    def __init__(
        self,
        apply: Callable[[ActiveRequest, Event], None],
        numbers: Callable[[], tuple[int, int]],
        clock: Callable[[], float],
        *,
        placer: Placer,
        attempts: Attempts,
        ledger: ReservationLedger,
        counters: Counters,
        drains: DrainWaits,
    ) -> None:
        self._apply = apply
        self._numbers = numbers
        self._clock = clock
        self._placer = placer
        self._attempts = attempts
        self._ledger = ledger
        self._counters = counters
        self._drains = drains
        self._silent_since: dict[NodeId, float] = {}

    def remove_node(self, node: NodeId) -> None:
        """Remove the state of a node that is lost or no longer a member."""
        self._silent_since.pop(node, None)

    def migrate_node(self, node: NodeId) -> int:
        """Migrate the requests of a live node to other nodes, where their answers continue without a gap.

        Return the number of requests that stay on the node. A request stays if no other node with a link has room now.
        A later call may migrate it. A request also stays if its answer can neither restart nor resume, or after
        `recovery.MAX_LOSSES` losses.
        """
        return sum(not self._migrate_request(request) for request in self._attempts.list_on_node(node))

    async def wait_drained(self, node: NodeId, seconds: float) -> int:
        """Migrate the requests of a live node to other nodes, and wait at most `seconds` until the node has none.

        The wait also ends when the node is uncordoned. Requests that cannot be migrated now may end on the node, or be
        migrated by later calls of `migrate_node`. Return the number of requests that are left on the node.
        """
        empty = self._drains.add_wait(node)
        self.migrate_node(node)
        try:
            if self._ledger.count_in_flight(node):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await empty.wait()
        finally:
            self._drains.remove_wait(node, empty)
        return self._ledger.count_in_flight(node)

    def migrate_from_silent_nodes(self, now: float) -> None:
        """Migrate requests away from nodes that are silent for too long (`compute_silence_limit_seconds`).

        Requests move only if two calls in a row find the node silent. After a stall of this event loop, the waiting
        socket data is therefore processed first. `now` is in monotonic seconds.
        """
        silent = {node.id: node.reported_at for node in self._placer.view.nodes if node.state == NodeState.SUSPECT}
        for node, reported_at in silent.items():
            if self._silent_since.setdefault(node, now) < now:
                for request in self._attempts.list_on_node(node):
                    self._migrate_request(request, now - reported_at)
        for node in self._silent_since.keys() - silent:
            del self._silent_since[node]

    def rebalance(self, now: float) -> None:
        """Move requests that wait on busy nodes to idle nodes, if the move gains enough time (`rebalancing`).

        One call judges at most `rebalancing.MAX_JUDGED` requests. Call this method only while no request is queued.
        `now` is in monotonic seconds.
        """
        waiting = rebalancing.list_movable_requests(self._attempts.live.values(), now)
        if not waiting:
            return
        view, judged = self._placer.mark_failing_nodes(self._placer.view, now), 0
        nodes, helpers = {node.id: node for node in view.nodes}, rebalancing.find_idle_nodes(view, self._ledger)
        for request in waiting:
            node = None if request.node is None else nodes.get(request.node)
            others = helpers.get(request.demand.model)
            if node is None or others is None or others.find_node(node.id) is not None:
                continue
            here = self._placer.judge_as_new(request, node)
            if (
                rebalancing.estimate_wait_seconds(here) > rebalancing.MIN_GAIN_SECONDS
                and judged < rebalancing.MAX_JUDGED
            ):
                self._send_to_best(
                    others,
                    request,
                    lambda there, here=here: rebalancing.is_worth_moving(here, there),
                    is_loss=False,
                )
                judged += 1

    def _migrate_request(self, request: ActiveRequest, silent: float | None = None) -> bool:
        """Move a request to another node with room for it. Return whether the request moved.

        `silent` is the time since the node's newest report in seconds; None for a drain. A request leaves a silent node
        only if this time is at least `compute_silence_limit_seconds` for the other node.
        """
        restarts = request.tokens.unbegun and not request.answer.begun
        if not (restarts or request.resumable) or not can_recover(LossKind.NODE, request.life.losses + 1, 0):
            return False
        others = ClusterView(tuple(node for node in self._placer.view.nodes if node.id != request.node))
        return self._send_to_best(
            others,
            request,
            lambda there: silent is None or silent >= compute_silence_limit_seconds(there.expected_ttft),
            is_loss=True,
        )

    def _send_to_best(
        self, others: ClusterView, request: ActiveRequest, is_worth: Callable[[Candidate], bool], *, is_loss: bool
    ) -> bool:
        """Move a request to the best of `others` if `is_worth` returns True for it. Return whether the request moved.

        `is_loss` tells whether the move counts as a loss of the request.
        """
        name, demand = request.node_name, replace(request.demand, known_tokens=request.tokens.longest)
        result = self._placer.judge(request, others, demand)
        if not isinstance(result, Placement) or not is_worth(result.chosen):
            return False
        attempt, seq = self._numbers()
        self._apply(request, Moved(attempt, seq, result.chosen, result.chosen.need, is_loss))
        if request.life.attempt != attempt:
            return False
        request.prepare_resume()
        self._placer.record(request, result)
        request.add_step(self._clock(), "migrated", name)
        self._counters.count_move()
        return True

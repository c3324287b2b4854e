"""Execution of model swaps: perform the actions of `model_swaps.SwapPlanner` on the queue and the reservations."""

from collections.abc import Callable, Iterable, Mapping

from router.admission.queue import AdmissionQueue, QueuedRequest
from router.dispatch.active_request import ActiveRequest
from router.dispatch.counters import Counters
from router.dispatch.model_swaps import BeginTurn, EndTurn, SendRequest, SwapPlanner
from router.dispatch.parts.assignment import Assignment
from router.dispatch.parts.attempts import Attempts
from router.dispatch.parts.placer import Placer
from router.dispatch.parts.swap_input import build_swap_input
from router.dispatch.parts.wakeups import NodeChanges
from router.dispatch.request import SWAP
from router.placement.cluster_view import NodeView
from router.placement.reservations import ReservationLedger, SwapTurn
from router.settings import RouterSettings
from wire.identity import NodeId


class SwapTurns:
    """Model swaps of all nodes. `clock` returns monotonic seconds."""

    def __init__(
        self,
        settings: RouterSettings,
        clock: Callable[[], float],
        *,
        queue: AdmissionQueue[ActiveRequest],
        placer: Placer,
        assignment: Assignment,
        attempts: Attempts,
        ledger: ReservationLedger,
        counters: Counters,
        changes: NodeChanges,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._queue = queue
        self._placer = placer
        self._assignment = assignment
        self._attempts = attempts
        self._ledger = ledger
        self._counters = counters
        self._changes = changes
        self._planner = SwapPlanner(settings.swap_timeout_seconds)

    def update_loaded(self, nodes: Iterable[NodeView]) -> None:
        """Record which models are loaded on nodes with a new report."""
        self._planner.update_loaded(nodes, self._clock())

    def remove_node(self, node: NodeId) -> None:
        """Remove the state of a node that is no longer a member."""
        self._planner.remove_node(node)

    def advance(self, now: float) -> None:
        """Advance the running model swaps, and begin the swaps that are due at `now` (monotonic seconds).

        The deadline of each queued request that waits for a swap is extended, at most to `swap_timeout_seconds` after
        its arrival. Do nothing if no request is queued and no swap is running.
        """
        if not len(self._queue) and not self._ledger.turns:
            return
        entries = sorted(self._queue.list_entries(), key=lambda entry: entry.item.arrived)
        queued = [entry.item for entry in entries]
        view, live = self._placer.mark_failing_nodes(self._placer.view, now), self._attempts.live.values()
        plan = self._planner.step(build_swap_input(view, queued, live, self._ledger, self._placer.judge_on_node), now)
        for action in plan.actions:
            if isinstance(action, EndTurn):
                self._end_turn(action)
            elif isinstance(action, BeginTurn):
                self._ledger.begin_turn(action.turn, action.hold)
            else:
                self._send_request(action, entries)
        for entry in entries:
            self._update_wait(entry, plan.waits, now)

    def _end_turn(self, ended: EndTurn) -> None:
        self._ledger.end_turn(ended.turn)
        self._counters.count_swap(done=not ended.why)
        self._changes.mark(ended.turn.node)

    def _send_request(self, action: SendRequest, entries: Iterable[QueuedRequest[ActiveRequest]]) -> None:
        """Send the request of a turn to its node, and remove it from the queue if it was sent."""
        entry = next((entry for entry in entries if entry.item.number == action.turn.request), None)
        if entry is None:
            return
        if self._assignment.start_attempt(entry.item, action.candidate, action.candidate.need):
            self._ledger.mark_turn_sent(action.turn)
            self._queue.remove(entry)

    def _update_wait(
        self, entry: QueuedRequest[ActiveRequest], waits: Mapping[str, SwapTurn | None], now: float
    ) -> None:
        """Record the swap that a queued request waits for, and extend its deadline; clear the swap if there is none."""
        request, model = entry.item, entry.item.demand.model
        if request.entry is not entry:
            return
        if model not in waits:
            request.set_swap("")
            return
        turn = waits[model]
        if turn is None:
            if request.set_swap(f"{SWAP}: no node can unload a model for it yet"):
                request.add_step(now, request.swap)
        elif request.set_swap(f"{SWAP} on {turn.name} ({turn.models})"):
            request.add_step(now, f"{SWAP}: {turn.models}", turn.name)
        latest = request.arrived + self._settings.swap_timeout_seconds
        request.extend_deadline(min(latest, now + self._settings.queue_timeout_seconds))

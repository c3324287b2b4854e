"""Waiting requests: the queue before placement, deadlines, retries, and holds.

A hold keeps memory of a node for a queued request (`router.placement.reservations`).
"""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from router.admission.queue import AdmissionQueue
from router.admission.rate_limits import RateLimits, estimate_probable_tokens
from router.dispatch.active_request import ActiveRequest
from router.dispatch.aliases.placement import AliasPlacement
from router.dispatch.counters import Counters
from router.dispatch.model_swaps import fits_next_to_loaded
from router.dispatch.parts.assignment import MAX_NODES_IN_A_ROW, Assignment
from router.dispatch.parts.crowding import CrowdRules
from router.dispatch.parts.endings import Endings
from router.dispatch.parts.placer import Placer
from router.dispatch.parts.wakeups import NodeChanges
from router.dispatch.request import PULL
from router.dispatch.request_events import DeadlinePassed, Dequeue, Enqueue, Event, RequestDenied, Withdraw
from router.placement.candidate import NoPlacement, Placement
from router.placement.cluster_view import ClusterView
from router.placement.reservations import ReservationLedger
from wire.identity import NodeId
from wire.node_state import NodeState
from wire.refusals import RefusalCode, Refused


class QueuedRequests:
    """Queued requests, which have no node.

    `apply` applies an event to a request. `clock` returns monotonic seconds. `timeout_seconds` is the time from
    queueing to the deadline, which a model swap and a pull extend.
    """

    def __init__(
        self,
        apply: Callable[[ActiveRequest, Event], None],
        clock: Callable[[], float],
        timeout_seconds: float,
        *,
        queue: AdmissionQueue[ActiveRequest],
        aliases: AliasPlacement,
        placer: Placer,
        assignment: Assignment,
        endings: Endings,
        crowds: CrowdRules,
        ledger: ReservationLedger,
        quotas: RateLimits,
        counters: Counters,
        changes: NodeChanges,
    ) -> None:
        self._apply = apply
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._queue = queue
        self._aliases = aliases
        self._placer = placer
        self._assignment = assignment
        self._endings = endings
        self._crowds = crowds
        self._ledger = ledger
        self._quotas = quotas
        self._counters = counters
        self._changes = changes

    # actions

    def enqueue(self, request: ActiveRequest, action: Enqueue) -> None:
        """Put a request into the queue, or end it with the refusal of the queue.

        A request with a lost attempt is never refused, and memory is held for it at once. A request keeps the deadline
        of an earlier wait, unless a node has admitted it since then.
        """
        now, result = self._clock(), action.result
        entry = self._queue.offer(
            request,
            request.spec.key,
            estimate_probable_tokens(request.demand),
            now,
            now + self._timeout_seconds if request.deadline is None else request.deadline,
            len(self._placer.view.nodes),
            weight=request.weighted_key.weight,
            share=self._quotas.get_limits(request.spec.key).waiting,
            begun=request.life.lost_by is not None,
        )
        if isinstance(entry, Refused):
            numbers = result.refused.numbers if isinstance(result, NoPlacement) else None
            self._apply(request, RequestDenied(Refused(entry.code, entry.message, numbers, entry.retry_after)))
            return
        request.enter_queue(entry)
        request.add_step(now, "queued")
        if self._placer.find_pull(request.demand.model) is not None:
            request.answer.announce_wait(PULL)
        self._counters.count_queue_entry()
        if request.life.lost_by is not None and isinstance(result, NoPlacement):
            self._hold_memory(request, result)

    def dequeue(self, request: ActiveRequest, _: Dequeue) -> None:
        """Record that a request left the queue, count its wait, and release its hold.

        Do nothing for a request that was not queued.
        """
        if request.entry is not None:
            self._counters.count_queue_exit(self._clock() - request.entry.arrived)
            self._ledger.drop_hold(request.number)
            request.leave_queue()

    def withdraw(self, request: ActiveRequest, _: Withdraw) -> None:
        """Remove from the queue a request that ended there. Do nothing for other requests.

        All nodes with a model swap are marked as changed, because a swap may be for this request and block other
        requests.
        """
        if request.entry is not None:
            self._queue.remove(request.entry)
            self.dequeue(request, Dequeue())
            for node in self._ledger.turns:
                self._changes.mark(node)

    # retries

    def retry_requests(self, nodes: Iterable[NodeId]) -> None:
        """Try to place each queued request once, in fair order, because the nodes `nodes` have changed.

        A request that fits on one of them is sent to the best of all nodes, unless it must wait for fairness. Memory is
        held for requests that must not wait longer. A request ends if its model can no longer be loaded.
        """
        chosen = frozenset(nodes)
        changed = ClusterView(tuple(node for node in self._placer.view.nodes if node.id in chosen))
        self._queue.place_waiting(self._clock(), lambda request, keep: self._try_request(request, keep, changed))

    def _try_request(self, request: ActiveRequest, keep: bool, changed: ClusterView) -> bool:
        """Try to place a queued request on the changed nodes. Return whether the request has left the queue.

        No other node had room for the request before. If it does not fit, `keep` tells whether memory is held for it.
        """
        if self._aliases.start_any(request, lambda: self._start_on_changed(request, changed)):
            return True
        result = self._placer.judge(request, changed, request.demand)
        if isinstance(result, Placement):
            return self._start_request(request)
        if self._settle_over_all_nodes(request, result):
            return True
        if keep or request.life.lost_by is not None:
            self._hold_memory(request, result)
        return False

    def _start_on_changed(self, request: ActiveRequest, changed: ClusterView) -> bool:
        """Send a queued request if its current model fits on a changed node. Return whether the request was sent."""
        result = self._placer.judge(request, changed, request.demand)
        return isinstance(result, Placement) and self._start_request(request)

    def _start_request(self, request: ActiveRequest) -> bool:
        """Send a queued request to the best of all nodes. Return whether it was sent.

        It is not sent if it must wait for fairness (`CrowdRules.must_wait`).
        """
        result = self._placer.judge(request, self._placer.view, request.demand)
        if not isinstance(result, Placement) or self._crowds.must_wait(request, result.chosen):
            return False
        if not self._assignment.start_attempt(request, result.chosen, result.chosen.need):
            return False
        self._placer.record(request, result)
        return True

    def _settle_over_all_nodes(self, request: ActiveRequest, part: NoPlacement) -> bool:
        """Place a request on all nodes if the changed nodes show that waiting may be useless.

        Return whether the request was sent or ended. Waiting may be useless if the changed nodes can no longer load the
        model, or only after they unload other models.
        """
        if part.candidate is None and part.refused.code is not RefusalCode.LOAD_FAILED:
            return False
        result = self._aliases.decide(request)
        if isinstance(result, Placement):
            return request.alias is not None and self._start_request(request)
        if result.refused.code is RefusalCode.LOAD_FAILED:
            self._endings.deny(request, result.refused)
            return True
        return self._assignment.start_at_decider(request, result)

    def _hold_memory(self, request: ActiveRequest, result: NoPlacement) -> None:
        """Hold memory for a request on the node that lacks the fewest bytes.

        Do nothing if the request has a hold on a node that is ready. No memory is held on a node that must unload a
        model for the request, swaps models, or has a hold already.
        """
        nodes = {node.id: node for node in self._placer.view.nodes}
        held = nodes.get(self._ledger.find_hold_node(request.number) or NodeId(""))
        if held is not None and held.state == NodeState.READY:
            return
        short = [
            candidate
            for candidate in result.candidates
            if candidate.code is RefusalCode.NO_ROOM
            and fits_next_to_loaded(nodes[candidate.node], candidate)
            and self._ledger.find_holder(candidate.node) is None
            and candidate.node not in self._ledger.turns
        ]
        if short:
            best = max(short, key=lambda candidate: (candidate.headroom or 0) - candidate.need)
            self._ledger.hold_memory(request.number, best.node, best.need)

    # deadlines

    def expire(self, now: float) -> None:
        """Send or end the queued requests whose deadline has passed at `now` (monotonic seconds).

        The deadline of a request is extended while its model is being pulled.
        """
        for entry in self._queue.list_entries():
            if entry.deadline <= now and self._placer.find_pull(entry.item.demand.model) is not None:
                entry.item.extend_deadline(now + self._timeout_seconds)
        for request in self._queue.expire(now):
            self._apply(request, DeadlinePassed())
            self._start_or_end(request, f" (waited {now - request.arrived:.0f} s in the queue)")

    def _start_or_end(self, request: ActiveRequest, waited: str) -> None:
        """Send a request whose deadline has passed to a node with room and a link, or end the request.

        `waited` is appended to the message of the refusal.
        """
        text = ""
        result = self._aliases.decide(request)
        while isinstance(result, Placement) and request.life.in_a_row < MAX_NODES_IN_A_ROW:
            chosen = result.chosen
            if self._crowds.must_end(request, chosen):
                text = f"other API keys use {chosen.name} up to its limit: retry"
                break
            if self._assignment.start_attempt(request, chosen, chosen.need):
                return
            text = f"the link to {chosen.name} ended: retry"
            result = self._aliases.decide(request)
        if isinstance(result, NoPlacement) and not text:
            refused = result.refused
        else:
            refused = Refused(RefusalCode.DEADLINE, text, None, 1.0)
        self._endings.deny(request, replace(refused, message=refused.message + waited))

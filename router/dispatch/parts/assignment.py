"""Assignment of a request to a node: nodes are asked one after another, then the request is queued or ended.

After a refusal, the request is sent to the next node at once. After `MAX_NODES_IN_A_ROW` nodes in a row, it is queued.
It ends if the refusal is final in the cluster. A refusal never counts as a failure.
"""

from collections import Counter
from collections.abc import Callable

from router.admission.queue import AdmissionQueue
from router.dispatch.active_request import ActiveRequest
from router.dispatch.aliases.placement import AliasPlacement
from router.dispatch.parts.attempts import Attempts
from router.dispatch.parts.crowding import CrowdRules
from router.dispatch.parts.endings import Endings
from router.dispatch.parts.placer import Placer
from router.dispatch.request import RequestFailure
from router.dispatch.request_events import Event, NoRoom, Placed, Stopped
from router.placement.candidate import Candidate, NoPlacement, Placement
from router.placement.reservations import ReservationLedger
from wire.capacity.fairness import WeightedKey
from wire.identity import NodeId
from wire.refusals import FailureCode, RefusalCode

UNSENDABLE = "the request cannot be sent to a node: shorten it, or report the log of the coordinator"
MAX_NODES_IN_A_ROW = 4
"""Maximum nodes to which a request is sent without a wait between them, before it is queued."""


class Assignment:
    """Assignment of requests to nodes.

    `apply` applies an event to a request. `numbers` returns the next attempt number and sequence number.
    """

    def __init__(
        self,
        apply: Callable[[ActiveRequest, Event], None],
        numbers: Callable[[], tuple[int, int]],
        *,
        aliases: AliasPlacement,
        placer: Placer,
        attempts: Attempts,
        ledger: ReservationLedger,
        queue: AdmissionQueue[ActiveRequest],
        crowds: CrowdRules,
        endings: Endings,
    ) -> None:
        self._apply = apply
        self._numbers = numbers
        self._aliases = aliases
        self._placer = placer
        self._attempts = attempts
        self._ledger = ledger
        self._queue = queue
        self._crowds = crowds
        self._endings = endings

    def start_attempt(self, request: ActiveRequest, chosen: Candidate, need: int) -> bool:
        """Reserve `need` bytes and send the request to a node. Return whether there was a link."""
        attempt, seq = self._numbers()
        self._apply(request, Placed(attempt, seq, chosen, need))
        return request.life.attempt == attempt

    def assign_new(self, request: ActiveRequest) -> None:
        """Assign a new request with `assign`.

        If a send raises an exception, end the request with a failure, and raise the exception. The end also settles the
        charge of the key's quota.
        """
        try:
            self.assign(request)
        except Exception:
            self._apply(request, Stopped(RequestFailure(FailureCode.ROUTER_ERROR, UNSENDABLE)))
            raise

    def assign(self, request: ActiveRequest) -> None:
        """Place a request and send it to the chosen node. If that node has no link, place the request again.

        A request that must wait for fairness (`CrowdRules.must_wait`), or has no placement, goes to the upstream of its
        alias if possible. Otherwise, end the request if its refusal is final. Send a request without a placement to the
        node of `start_at_decider`, or to a full node where another key holds more than its fair share. If neither is
        possible, if fairness requires it, or after `MAX_NODES_IN_A_ROW` nodes, queue the request.
        """
        decide = self._placer.decide if request.alias is None else self._aliases.decide
        result = decide(request)
        while isinstance(result, Placement) and request.life.in_a_row < MAX_NODES_IN_A_ROW:
            if self._crowds.must_wait(request, result.chosen):
                if not self._aliases.start_upstream(request):
                    self._apply(request, NoRoom(result))
                return
            if self.start_attempt(request, result.chosen, result.chosen.need):
                self._queue.count_overtake()
                return
            result = decide(request)
        if isinstance(result, NoPlacement):
            if self._aliases.start_upstream(request):
                return
            if result.refused.final:
                self._endings.deny(request, result.refused)
                return
            if self._aliases.offer(
                request,
                result,
                lambda candidate: (
                    self.start_at_decider(request, candidate) or self._start_for_share(request, candidate)
                ),
            ):
                return
        self._apply(request, NoRoom(result))

    def start_at_decider(self, request: ActiveRequest, result: NoPlacement) -> bool:
        """Send a request to `result.candidate`, the only node that can tell whether the request fits there.

        No memory is reserved. Return whether the request was sent. Return False if there is no such candidate, if the
        node has no link, or while it swaps models.
        """
        candidate = result.candidate
        return (
            candidate is not None
            and candidate.node not in self._ledger.turns
            and self.start_attempt(request, candidate, 0)
        )

    def _start_for_share(self, request: ActiveRequest, result: NoPlacement) -> bool:
        """Send a request to a full node where another key holds more than its share. Return whether it was sent.

        The engine of that node then preempts a request of the other key.
        """
        if request.life.in_a_row >= MAX_NODES_IN_A_ROW:
            return False
        full = [candidate for candidate in result.candidates if self._is_full(request, candidate)]
        rows: Counter[tuple[NodeId | None, WeightedKey]] = Counter(
            (live_request.node, live_request.weighted_key)
            for live_request in (self._attempts.live.values() if full else ())
        )
        for candidate in sorted(full, key=lambda candidate: candidate.expected_ttft):
            mine = request.weighted_key.load(rows[candidate.node, request.weighted_key] + 1)
            others = (key.load(count - 1) for (node, key), count in rows.items() if node == candidate.node)
            if any(load >= mine for load in others) and self.start_attempt(request, candidate, 0):
                return True
        return False

    def _is_full(self, request: ActiveRequest, candidate: Candidate) -> bool:
        """Return whether a node has the model loaded and lacks only memory for a request.

        Return False while the node swaps models, and until its next report if it has refused the request.
        """
        return (
            candidate.code is RefusalCode.NO_ROOM
            and candidate.model is not None
            and candidate.model.loaded
            and candidate.node not in self._ledger.turns
            and request.tried.refused.get(candidate.node) != self._placer.get_report_time(candidate.node)
        )

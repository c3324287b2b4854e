"""Losses: a node is lost, an engine dies, or a node runs out of memory. The request resumes elsewhere, or ends.

Requests resume from the received token ids, by the rules of `router.placement.recovery`. The text that the client has
received stays valid. A request of whose answer the client has received nothing may also restart. A request for which no
node has room waits in the queue, which never refuses it, and memory is held for it at once. It ends with the reason at
its deadline, or at once if only the lost nodes have its model.
"""

from collections.abc import Callable

from msgspec.structs import replace

from router.dispatch.active_request import ActiveRequest
from router.dispatch.aliases.placement import may_restart_with_other_model
from router.dispatch.circuit_breaker import CircuitBreakers
from router.dispatch.counters import Counters
from router.dispatch.parts.assignment import Assignment
from router.dispatch.parts.attempts import Attempts
from router.dispatch.parts.placer import Placer
from router.dispatch.request import RequestFailure
from router.dispatch.request_events import AttemptEnded, AttemptLost, Event
from router.dispatch.request_state import RequestState
from router.placement.recovery import LossKind, classify_loss, is_fault
from wire.frames import Failed
from wire.identity import NodeId
from wire.node_state import NodeState
from wire.refusals import FailureCode
from wire.report import Model


class Losses:
    """Handler of lost attempts, which resumes their requests on other nodes or ends them.

    `on_failure` is called with each request that failed on its node or whose node was lost, and with the failure code.
    `apply` applies an event to a request. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        apply: Callable[[ActiveRequest, Event], None],
        clock: Callable[[], float],
        on_failure: Callable[[ActiveRequest, str], None],
        *,
        placer: Placer,
        attempts: Attempts,
        assignment: Assignment,
        breakers: CircuitBreakers[NodeId],
        counters: Counters,
    ) -> None:
        self._apply = apply
        self._clock = clock
        self._on_failure = on_failure
        self._placer = placer
        self._attempts = attempts
        self._assignment = assignment
        self._breakers = breakers
        self._counters = counters

    def handle_lost_node(self, node: NodeId, reason: str) -> None:
        """Resume or restart the requests of a lost node on other nodes, or end those for which neither is possible.

        `reason` is the cause of the loss, for the messages to clients.
        """
        for request in self._attempts.list_on_node(node):
            self._counters.count_node_loss()
            self._on_failure(request, FailureCode.NODE_LOST)
            request.tried.mark_lost(node)
            text = f"node {request.node_name} was lost ({reason}): retry"
            self._recover_or_end(request, LossKind.NODE, RequestFailure(FailureCode.NODE_LOST, text))

    def handle_failure(self, request: ActiveRequest, node: NodeId, frame: Failed) -> None:
        """Handle `Failed` for a request: resume or restart it on another node, or end it.

        A code that `classify_loss` does not count as a loss ends the request. A fault of the engine counts for the
        node's circuit breaker. The node is excluded until its next report, or until it is ready again if it stops.
        After `FailureCode.LINK_LOST` it is not excluded, because it has another link.
        """
        if is_fault(frame.code):
            self._breakers.record_fault(node, frame.request, self._clock(), frame.message)
        self._on_failure(request, frame.code)
        kind = classify_loss(frame.code)
        if kind is None:
            self._apply(request, AttemptEnded(frame.request, RequestFailure(frame.code, frame.message)))
            return
        if kind is LossKind.NODE:
            if frame.code == FailureCode.NODE_STOPPING:
                request.tried.mark_lost(node)
            text = f"{request.node_name} gave the request up: {frame.message}"
            self._recover_or_end(request, kind, RequestFailure(FailureCode.NODE_LOST, text))
            return
        # the last report of the node still shows a ready engine, or the room
        request.tried.mark_refused(node, self._placer.get_report_time(node))
        code = frame.code if kind is LossKind.MEMORY else FailureCode.ENGINE_CRASHED
        self._recover_or_end(request, kind, RequestFailure(code, frame.message))

    def _recover_or_end(self, request: ActiveRequest, kind: LossKind, cause: RequestFailure) -> None:
        """Resume or restart a request on another node after a loss, if that is allowed and possible; else end it."""
        request.add_step(self._clock(), f"lost: {cause.message}", request.node_name)
        others = self._list_other_models(request)
        resumes = request.resumable and any(request.version.is_same(model.version) for model in others)
        restarts = (bool(others) and not request.answer.begun) or may_restart_with_other_model(request)
        stranded = None if resumes or restarts else _build_stranded_failure(request, cause, others)
        self._apply(request, AttemptLost(request.attempt, kind, cause, stranded))
        if request.state is not RequestState.NEW:
            return
        if resumes:
            request.prepare_resume()
        else:
            request.restart()
        self._assignment.assign(request)

    def _list_other_models(self, request: ActiveRequest) -> list[Model]:
        """Return the models with the name of a request's model, on the members that have not lost the request."""
        name, lost = request.demand.model, request.tried.lost
        nodes = (node for node in self._placer.view.nodes if node.state != NodeState.LEFT and node.id not in lost)
        return [node.models[name] for node in nodes if name in node.models]


def _build_stranded_failure(request: ActiveRequest, cause: RequestFailure, others: list[Model]) -> RequestFailure:
    """Return the failure of a request that no other node can continue: `cause`.

    If other nodes have a different model with the same name, the message says that as well.
    """
    if not request.version.fingerprint or all(request.version.is_same(model.version) for model in others):
        return cause
    text = f"the other nodes have a different model with the name {request.demand.model} (`cluster models`)"
    return replace(cause, message=f"{cause.message}; {text}, which cannot resume the answer")

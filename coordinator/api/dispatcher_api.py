"""Interface of the dispatcher for the control plane, which does not import the dispatcher."""

from typing import Protocol

from router.admission.model_names import ModelNames
from router.admission.usage import UsageCounter
from router.dispatch.active_request import ActiveRequest
from router.dispatch.circuit_breaker import CircuitBreakers
from router.dispatch.decision_log import DecisionLog
from router.dispatch.parts.placer import Placer
from router.dispatch.request import RequestSpec
from wire.identity import NodeId


class DispatcherApi(Protocol):
    """Part of the dispatcher that control routes use: requests, their nodes, and placement decisions."""

    usage: UsageCounter
    """Requests and tokens of each key and model since the last write to the database."""
    history: DecisionLog
    """Recent ended requests and placement decisions."""
    breakers: CircuitBreakers[NodeId]
    """Circuit breakers of the nodes, which open after engine faults."""
    placer: Placer
    """Choice of nodes; `placer.view` is the current state of the cluster."""
    names: ModelNames
    """Names of models and aliases, resolved to models."""

    def submit(self, spec: RequestSpec) -> ActiveRequest:
        """Place a request, queue it, pass it to an upstream, or end it with a refusal. Return the request.

        The caller must `close` the returned request.
        """
        ...

    def close(self, request: ActiveRequest) -> None:
        """Close a request from `submit`. Cancel the request if it has not ended."""
        ...

    def count_in_flight(self, node: NodeId) -> int:
        """Return the number of requests that a node works on. Queued requests are not counted."""
        ...

    def count_queued(self) -> int:
        """Return the number of requests that wait for a node."""
        ...

    def list_open_requests(self) -> list[ActiveRequest]:
        """Return all requests that have not ended, oldest first."""
        ...

    def get_time(self) -> float:
        """Return the current time in monotonic seconds, by the clock of all times of the dispatcher."""
        ...

    async def wait_drained(self, node: NodeId, seconds: float) -> int:
        """Migrate the requests of a node, and return how many are left.

        Wait until none is left or the node is uncordoned, at most `seconds`.
        """
        ...

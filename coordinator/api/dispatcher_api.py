"""Interface of the dispatcher for the control plane."""

from typing import Protocol

from router.admission.usage import UsageCounter
from router.dispatch.circuit_breaker import CircuitBreakers
from router.dispatch.decision_log import DecisionLog
from router.dispatch.request import ActiveRequest
from router.placement.place import NoPlacement, Placement, ResourceDemand
from wire.identity import NodeId


class DispatcherApi(Protocol):
    """Requests, their nodes, and the placement decisions."""

    usage: UsageCounter
    history: DecisionLog
    breakers: CircuitBreakers[NodeId]

    def in_flight(self, node: NodeId) -> int:
        """Requests on a node."""
        ...

    def waiting(self) -> int:
        """Requests that wait for a node."""
        ...

    def open_requests(self) -> list[ActiveRequest]:
        """Requests that are here, the oldest first."""
        ...

    def now(self) -> float:
        """The clock of its times."""
        ...

    async def wait_drained(self, node: NodeId, seconds: float) -> int:
        """Migrate the requests of a node, wait at most `seconds` until it has none, and return the number left."""
        ...

    def preview(self, demand: ResourceDemand) -> Placement | NoPlacement:
        """Place without reserving."""
        ...

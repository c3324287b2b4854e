"""Interface of the dispatcher for the control plane."""

from typing import Protocol

from router.admission.usage import Usage
from router.dispatch.circuit_breaker import Breakers
from router.dispatch.decision_log import History
from router.dispatch.request import Ticket
from router.placement.place import Demand, NoPlacement, Placement
from wire.identity import NodeId


class Traffic(Protocol):
    """Requests, their nodes, and the placement decisions."""

    usage: Usage
    history: History
    breakers: Breakers[NodeId]

    def in_flight(self, node: NodeId) -> int:
        """Requests on a node."""
        ...

    def waiting(self) -> int:
        """Requests that wait for a node."""
        ...

    def under_way(self) -> list[Ticket]:
        """Requests that are here, the oldest first."""
        ...

    def now(self) -> float:
        """The clock of its times."""
        ...

    async def emptied(self, node: NodeId, seconds: float) -> int:
        """Migrate the requests of a node, wait at most `seconds` until it has none, and return the number left."""
        ...

    def preview(self, demand: Demand) -> Placement | NoPlacement:
        """Place without reserving."""
        ...

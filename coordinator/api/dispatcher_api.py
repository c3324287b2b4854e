"""What the control plane reads of the dispatcher."""

from typing import Protocol

from router.admission.usage import Usage
from router.dispatch.circuit_breaker import Breakers
from router.dispatch.decision_log import History
from router.dispatch.request import Ticket
from router.placement.place import Demand, NoPlacement, Placement
from wire.identity import NodeId


class Traffic(Protocol):
    """Requests: where they are, and what was decided on them."""

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
        """Move what runs on a node, and wait until it has nothing."""
        ...

    def preview(self, demand: Demand) -> Placement | NoPlacement:
        """Place without reserving."""
        ...

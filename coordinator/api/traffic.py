"""What the control plane reads of the dispatcher."""

from typing import Protocol

from router.breaker import Breakers
from router.history import History
from router.placement import Demand, NoPlacement, Placement
from router.ticket import Ticket
from router.usage import Usage
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

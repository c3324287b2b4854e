"""Nodes that a request has tried with one model."""

from wire.identity import NodeId
from wire.refusals import Refused


class TriedNodes:
    """Nodes that a request has tried with one model. Placement excludes them.

    `lost` is the set of lost nodes that all candidate models of the request share; None creates a new set.
    """

    __slots__ = ("lost", "never", "refused")

    def __init__(self, lost: set[NodeId] | None = None) -> None:
        self.refused: dict[NodeId, float] = {}
        """Nodes that refused the request, each with the arrival of its newest report then, in monotonic seconds."""
        self.never: dict[NodeId, Refused] = {}
        """Nodes that refused the request permanently, with their refusals."""
        self.lost: set[NodeId] = set() if lost is None else lost
        """Nodes that were lost or stopped while they had the request, and are not ready again."""

    def mark_refused(self, node: NodeId, reported_at: float, refused: Refused | None = None) -> None:
        """Exclude a node until its next report, or permanently if its refusal is final.

        `reported_at` is the arrival of the node's newest report, in monotonic seconds. `refused` is the refusal; None
        if the node sent none.
        """
        self.refused[node] = reported_at
        if refused is not None and refused.final:
            self.never[node] = refused

    def mark_lost(self, node: NodeId) -> None:
        """Exclude a node that was lost or stops while it has the request, until `readmit`."""
        self.lost.add(node)

    def readmit(self, node: NodeId) -> None:
        """End the exclusion of a lost node that is ready again. Exclusions because of refusals remain."""
        self.lost.discard(node)

    def remove_node(self, node: NodeId) -> None:
        """Remove all state of a node that is no longer a member."""
        self.lost.discard(node)
        self.refused.pop(node, None)
        self.never.pop(node, None)

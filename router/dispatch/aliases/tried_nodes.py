"""Nodes that a request has tried with one model."""

from wire.identity import NodeId
from wire.refusals import Refused


class TriedNodes:
    """Nodes that a request has tried with one model, which placement excludes.

    `lost` is the set of lost nodes that all models of the request share; None for a new set.
    """

    __slots__ = ("lost", "never", "refused")

    def __init__(self, lost: set[NodeId] | None = None) -> None:
        self.refused: dict[NodeId, float] = {}
        """Nodes that refused the request, with the arrival of the report under which they refused, in monotonic
        seconds.
        """
        self.never: dict[NodeId, Refused] = {}
        """Nodes that refused the request permanently, with their refusals."""
        self.lost: set[NodeId] = set() if lost is None else lost
        """Nodes that were lost or stopped while they had the request, until they are ready again."""

    def mark_refused(self, node: NodeId, reported_at: float, refused: Refused | None = None) -> None:
        """Exclude a node until its next report, or for good if its refusal is final.

        `reported_at` is the arrival of the node's newest report, in monotonic seconds. `refused` is the refusal; None
        if the node sent none.
        """
        self.refused[node] = reported_at
        if refused is not None and refused.final:
            self.never[node] = refused

    def mark_lost(self, node: NodeId) -> None:
        """Exclude a node that was lost, or stops, while it has the request."""
        self.lost.add(node)

    def readmit(self, node: NodeId) -> None:
        """Stop excluding a node that was lost with the request and is ready again. Exclusions by refusals are kept."""
        self.lost.discard(node)

    def remove_node(self, node: NodeId) -> None:
        """Remove all state of a node that is no longer a member."""
        self.lost.discard(node)
        self.refused.pop(node, None)
        self.never.pop(node, None)

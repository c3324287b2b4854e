"""States of a node in the cluster, and the sets of states that the coordinator and its commands distinguish."""

from enum import StrEnum


class NodeState(StrEnum):
    """State of a node in the cluster, as the coordinator computes it from links and reports."""

    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    ASLEEP = "asleep"
    LOST = "lost"
    DRAINING = "draining"
    PAUSED = "paused"
    LEFT = "left"


LINKED = frozenset({NodeState.READY, NodeState.SUSPECT, NodeState.DRAINING, NodeState.PAUSED})
"""States that have a link. A joining node may have a link."""
GONE = frozenset({NodeState.ASLEEP, NodeState.LOST, NodeState.LEFT})
"""States that have no link."""
ALIVE = LINKED - {NodeState.SUSPECT}
"""States in which reports arrive in time."""
SERVING = LINKED - {NodeState.PAUSED}
"""States in which a node can hold requests."""
SILENT = GONE | {NodeState.SUSPECT}
"""States in which the last report is too old to be shown as current."""
SCRAPABLE = LINKED | {NodeState.JOINING}
"""States in which a node's metrics are served."""

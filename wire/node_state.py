"""States of a node in the cluster, stages of its engine process, and sets of the states of a node."""

from enum import StrEnum


class NodeState(StrEnum):
    """State of a node in the cluster, as the coordinator computes it from links and reports."""

    JOINING = "joining"
    """The node has joined or linked again, and has not reported since."""
    READY = "ready"
    """The node is linked, its reports arrive in time, and it accepts requests."""
    SUSPECT = "suspect"
    """Reports are late. The node gets no new requests."""
    ASLEEP = "asleep"
    """The node has announced a sleep."""
    LOST = "lost"
    """The link ended, the node stopped, or its reports were missing for too long.

    Also: no link since the coordinator started.
    """
    DRAINING = "draining"
    """The node accepts no new requests, by its own report."""
    PAUSED = "paused"
    """The node does not share its memory now, by its own report."""
    LEFT = "left"
    """The node has left the cluster or was removed."""


class EngineStage(StrEnum):
    """Stage of the engine process of a node, in `EngineState.state`."""

    STARTING = "starting"
    """A process starts, and has not reported with memory limits in force."""
    READY = "ready"
    """The process has reported with memory limits in force, and accepts requests."""
    HUNG = "hung"
    """The process does not answer pings, or exceeds the time of a call, and is ended."""
    RESTARTING = "restarting"
    """The process has ended or is being ended. Another process starts after a delay."""
    FAILED = "failed"
    """The process died several times in a row, or ended engines left too much wired memory behind.

    After several deaths, another process starts after the longest delay.
    """


LINKED = frozenset({NodeState.READY, NodeState.SUSPECT, NodeState.DRAINING, NodeState.PAUSED})
"""States that have a link. A joining node may have a link."""
GONE = frozenset({NodeState.ASLEEP, NodeState.LOST, NodeState.LEFT})
"""States that have no link."""
ALIVE = LINKED - {NodeState.SUSPECT}
"""States in which reports arrive in time."""
SERVING = LINKED - {NodeState.PAUSED}
"""States in which a node can hold requests."""
SILENT = GONE | {NodeState.SUSPECT}
"""States in which the newest report is too old to be shown as current."""
SCRAPABLE = LINKED | {NodeState.JOINING}
"""States in which a node's metrics are served."""

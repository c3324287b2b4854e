"""Plan of a pull: the nodes that get a model, and the reason for every node that does not. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from router.placement.cluster_view import ClusterView, NodeView
from wire.capacity.arithmetic import compute_max_context, compute_most_bytes, estimate_alone_bytes
from wire.identity import NodeId
from wire.node_state import LINKED, NodeState
from wire.report import Model
from wire.units import GIB, show_size

MIN_CONTEXT_TOKENS = 4096
"""Tokens of context for which a node needs memory with `ALL` and `AUTO`.

If the model's context is smaller, that context applies. A named node with too little memory only gets a warning.
"""
MAX_RESERVE_BYTES, RESERVE_SHARE = 5 * GIB, 0.05
"""Disk space that a pull must leave free: a share of the disk, and the maximum of that share in bytes.

`node.hub.download.disk_space` has the same values.
"""


class NodeSelection(StrEnum):
    """Selection of the nodes of a pull.

    A node that already has the model needs no room on its disk. A node with an unknown cap counts as one with enough
    memory. A linked node with an unknown disk is not selected, because its version cannot pull models or the disk
    cannot be read. An unlinked node with an unknown disk counts as one with room.
    """

    NAMED = "named"
    """Named nodes with room on their disks. Memory is not required, and a node may be absent."""
    ALL = "all"
    """Every member with room on its disk and in its memory, including absent members."""
    AUTO = "auto"
    """Every linked member with room on its disk and in its memory."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node in the plan of a pull. Sizes are bytes."""

    node: NodeId
    name: str
    state: str
    is_chosen: bool
    has_model: bool
    """Whether the node has a model of this name that can be loaded, at any revision."""
    free: int
    """Free bytes of the disk; 0 if unknown."""
    context: int
    """Maximum tokens of one row on the idle node, at most the context length of the model.

    The value is 0 if the model does not fit, or if its context length or the memory of the node is unknown.
    """
    reason: str
    """Why the node is not chosen, or a warning about a chosen node; empty if there is neither."""

    def to_row(self) -> dict[str, object]:
        """Return the plan as a row of the API."""
        return {
            "id": self.node,
            "name": self.name,
            "state": self.state,
            "chosen": self.is_chosen,
            "has_model": self.has_model,
            "disk_free": self.free,
            "max_context": self.context,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class PullPlan:
    """Plan of a pull: whether each node of the pool gets the model, and why not."""

    nodes: tuple[NodePlan, ...]

    @property
    def chosen(self) -> tuple[NodeId, ...]:
        """Ids of the nodes that get the model.

        Nodes that have a model of this name come first, because they may already have files of the wanted revision.
        """
        return tuple(node.node for node in sorted(self.nodes, key=lambda node: not node.has_model) if node.is_chosen)

    def explain(self) -> str:
        """Return why no node is chosen, as text with the reason of each node."""
        reasons = "; ".join(f"{node.name}: {node.reason}" for node in self.nodes if node.reason)
        return f"no node can get the model: {reasons or 'the pool has no nodes'}"


def plan_pull(
    view: ClusterView, model: Model, size: int, selection: NodeSelection, named: Collection[NodeId] = ()
) -> PullPlan:
    """Choose the nodes of a pull of `size` bytes, and return the plan.

    `model` describes the model, from which its memory is predicted. `named` are the nodes for `NodeSelection.NAMED`.
    Nodes in the states left and joining are omitted.
    """
    nodes = [node for node in view.nodes if node.state not in (NodeState.LEFT, NodeState.JOINING)]
    return PullPlan(tuple(_plan_node(node, model, size, selection, named) for node in nodes))


def _plan_node(
    node: NodeView, model: Model, size: int, selection: NodeSelection, named: Collection[NodeId]
) -> NodePlan:
    context = compute_max_context(node.memory, model)
    has_model = model.name in node.models and not node.models[model.name].cause
    away = "" if node.state in LINKED else f"is {node.state}, and starts the pull when it is back"
    unable = "" if away or node.disk.total else _explain_unknown_disk(node)
    disk = "" if has_model else _explain_disk(node, size)
    memory = _explain_memory(node, model, context)
    match selection:
        case NodeSelection.NAMED:
            chosen = node.id in named and not (unable or disk)
            reason = (unable or disk or memory or away) if node.id in named else "was not named"
        case NodeSelection.ALL:
            chosen = not (unable or disk or memory)
            reason = unable or disk or memory or away
        case NodeSelection.AUTO:
            chosen = not (unable or disk or memory or away)
            reason = unable or disk or memory or (f"is {node.state}" if away else "")
    return NodePlan(node.id, node.name, str(node.state), chosen, has_model, node.disk.free, context, reason)


def _explain_unknown_disk(node: NodeView) -> str:
    """Return why the size of a node's disk is unknown. Only a node that can pull models reports a folder for them."""
    if node.disk.folder:
        return f"the disk of {node.disk.folder} cannot be read there: check it"
    return "its version of Macpool cannot pull models: update it"


def _explain_disk(node: NodeView, size: int) -> str:
    """Return why the disk of a node has no room for `size` bytes; empty if it has, or if its size is unknown."""
    disk = node.disk
    reserve = min(MAX_RESERVE_BYTES, int(disk.total * RESERVE_SHARE))
    if not disk.total or size <= disk.free - reserve:
        return ""
    return f"needs {show_size(size)} of disk, has {show_size(disk.free)} free and keeps {show_size(reserve)}"


def _explain_memory(node: NodeView, model: Model, context: int) -> str:
    """Return why the memory of a node has no room for the model; empty if it has, or if its cap is unknown."""
    wanted = min(MIN_CONTEXT_TOKENS, model.context)
    if context >= wanted or not node.memory.cap:
        return ""
    needed, room = estimate_alone_bytes(model, max(0, wanted - 1), 1), compute_most_bytes(node.memory)
    return f"needs {show_size(needed)} of memory with {wanted} tokens, has {show_size(room)} below its cap"

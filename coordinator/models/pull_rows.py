"""Rows of pulls for the API and the page. Pure."""

from collections.abc import Callable

from coordinator.models.pull_records import PullRecord
from coordinator.models.pull_values import ENDED, NodePull, PullStage
from wire.identity import NodeId


def build_pull_row(record: PullRecord, get_name: Callable[[NodeId], str]) -> dict[str, object]:
    """Return a pull as a row of the API. `get_name` returns the display name of a node.

    Sizes are bytes, times are Unix seconds, speeds are bytes per second.
    """
    manifest, nodes = record.manifest, record.state.nodes
    mirror = record.state.mirror
    return {
        "id": record.id,
        "repo": manifest.repo,
        "revision": manifest.revision or "main",
        "commit": manifest.commit,
        "size": manifest.size,
        "files": len(manifest.files),
        "state": summarize_state(record),
        "started": record.started,
        "ended": record.ended,
        "actor": record.actor,
        "mirror": get_name(mirror.node) if mirror is not None and mirror.addresses else None,
        "nodes": [_build_node_row(name, node, get_name(name)) for name, node in nodes.items()],
    }


def summarize_state(record: PullRecord) -> str:
    """Return the state of a pull as a word: `pulling` while it is open on at least one node.

    An ended pull is `failed` if it failed on a node, else `cancelled` if it was cancelled on a node, else `completed`.
    """
    stages = {node.stage for node in record.state.nodes.values()}
    if stages - ENDED:
        return "pulling"
    if PullStage.FAILED in stages:
        return "failed"
    return "cancelled" if PullStage.CANCELLED in stages else "completed"


def _build_node_row(node: NodeId, pull: NodePull, name: str) -> dict[str, object]:
    left = pull.total - pull.done
    return {
        "id": node,
        "name": name,
        "state": str(pull.stage),
        "phase": pull.phase,
        "source": str(pull.source) if pull.order else "",
        "linked": pull.is_linked,
        "done": pull.done,
        "total": pull.total,
        "speed": round(pull.speed),
        "seconds_left": round(left / pull.speed, 1) if pull.speed > 0 else None,
        "fetched": pull.fetched,
        "retries": pull.retries,
        "message": pull.message,
    }

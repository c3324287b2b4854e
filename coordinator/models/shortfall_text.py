"""Text of a shortfall: current actions for an unmet wish, and the missing nodes or bytes. Pure."""

from coordinator.models.replica_search import NodeOption, Obstacle
from coordinator.models.wishes import LoadWish, PoolState, WishState
from wire.identity import NodeId
from wire.units import show_count, show_size

MAX_NAMED_NODES = 3
"""Maximum number of nodes that a text names."""
_DETAILED = (Obstacle.BACKOFF, Obstacle.SPACED, Obstacle.BUSY, Obstacle.CANNOT_LOAD, Obstacle.OTHER_MODEL)
"""Obstacles whose details are part of the text, in this order."""


def describe_shortfall(state: WishState, options: list[NodeOption], chosen: list[NodeOption], pool: PoolState) -> str:
    """Return the text of the shortfall of an unmet wish.

    `options` are the nodes that the lists and labels of the wish allow. `chosen` are the nodes that act now.
    """
    progress = _describe_progress(state, chosen, pool)
    missing = state.wanted - len(state.ready) - len(state.coming) - len(state.away) - len(chosen)
    if missing <= 0:
        return progress
    lack = _describe_lack(state, options, missing)
    return f"{progress}; {lack}" if progress else lack


def _describe_progress(state: WishState, chosen: list[NodeOption], pool: PoolState) -> str:
    parts: list[str] = []
    loads = [option.node.name for option in chosen if isinstance(option.action, LoadWish)]
    loads += _get_names(state.coming, pool)
    unloads = [f"{option.node.name} unloads {', '.join(option.victims)} for it" for option in chosen if option.victims]
    if loads:
        parts.append(f"{', '.join(loads)} {'loads' if len(loads) == 1 else 'load'} it")
    parts += unloads
    if state.away:
        parts.append(f"the return of {', '.join(_get_names(state.away, pool))} is awaited")
    return "; ".join(parts)


def _get_names(nodes: tuple[NodeId, ...], pool: PoolState) -> list[str]:
    views = (pool.view.find_node(node) for node in nodes)
    return [view.name for view in views if view is not None]


def _describe_lack(state: WishState, options: list[NodeOption], missing: int) -> str:
    wish, wanted = state.wish, state.wanted
    if len(options) < wanted:
        if wish.labels or wish.allow or wish.deny:
            return (
                f"needs {show_count(wanted, 'node')}, its labels and node lists allow {len(options)}: change the wish"
            )
        return (
            f"needs {show_count(wanted, 'node')}, the pool has {len(options)}: join another Mac, or want fewer replicas"
        )
    holders = [option for option in options if option.obstacle is not Obstacle.NOT_ON_DISK]
    if len(holders) < wanted:
        have = f"{len(holders)} has it" if len(holders) == 1 else f"{len(holders) or 'none'} have it"
        return f"needs {show_count(wanted, 'node')} with the model on disk, {have}: pull it to another node"
    return _describe_blocked(holders, missing)


def _describe_blocked(holders: list[NodeOption], missing: int) -> str:
    """Return why the nodes that have the model do not load it."""
    short = [option for option in holders if option.obstacle is Obstacle.MEMORY]
    detailed = [option for kind in _DETAILED for option in holders if option.obstacle is kind]
    if short and len(detailed) < missing:
        best = max(short, key=lambda option: (option.obtainable - option.need, option.node.name))
        return (
            f"needs {show_size(best.need)}, best node {best.node.name} has {show_size(max(0, best.obtainable))}: "
            "unload a model there, raise memory.cap, or want a smaller variant"
        )
    if not detailed:
        detailed = [option for option in holders if option.obstacle is Obstacle.UNAVAILABLE]
    named = "; ".join(
        option.why if option.obstacle is Obstacle.BACKOFF else f"{option.node.name} {option.why}"
        for option in detailed[:MAX_NAMED_NODES]
    )
    return f"needs {missing} more {'node' if missing == 1 else 'nodes'}: {named}"

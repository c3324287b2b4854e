"""Choose the node that loads a model on an administrator's order. Pure; uses placement's arithmetic for one token.

Candidates, in this order:

1. Nodes that have the model's files, have not begun to load it and can hold it. The node that would answer first is
   chosen.
2. A node that has the model loaded or is loading it.
3. A full node that is large enough for the weights, without the margin that a request needs
   (`wire.capacity.arithmetic.judge_load`). Its engine may unload idle models, and only the engine can know that.
4. A node that could not load the model before, because an order by name tries again.
"""

from collections.abc import Callable, Mapping

import msgspec

from router.placement.candidate import (
    AttemptHistory,
    Candidate,
    HeadroomCorrection,
    NoPlacement,
    Placement,
    ResourceDemand,
)
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.place import place
from router.placement.policies import Policy
from router.placement.reservations import ReservationLedger
from wire.capacity.arithmetic import compute_most_weights
from wire.identity import NodeId
from wire.models.version import ModelVersion
from wire.refusals import RefusalCode, Refused
from wire.units import show_size

_MEMORY = frozenset({RefusalCode.NO_ROOM, RefusalCode.TOO_LARGE})


class LoadPlacement(msgspec.Struct, frozen=True, gc=False):
    """Node chosen to load a model."""

    node: NodeId
    """Id of the node."""
    name: str
    """Display name of the node."""
    loaded: bool = False
    """Whether the node has the model loaded already, according to its report."""


def choose_load_node(
    view: ClusterView,
    model: str,
    ledger: ReservationLedger,
    *,
    now: float,
    draw: Callable[[], float],
    policy: Policy,
    corrections: Mapping[NodeId, HeadroomCorrection],
    tried: Mapping[NodeId, Refused],
    version: ModelVersion | None = None,
) -> LoadPlacement | Refused:
    """Return the node that should load a model, or the refusal if there is none.

    A node that has loaded or is loading the model is chosen only if no other node can load it.

    `ledger` has the reservations on the nodes, and `corrections` limit the headroom of nodes that have just refused.
    `tried` maps nodes that have refused this load to their refusals. Only nodes with this `version` of the model are
    considered; None allows any. `now` is in monotonic seconds. `draw()` returns random numbers in [0, 1) for ties.
    """

    def place_among(nodes: tuple[NodeView, ...]) -> Placement | NoPlacement:
        return place(
            ClusterView(nodes),
            ResourceDemand(model, 0, 1, 1),
            ledger,
            now=now,
            draw=draw,
            policy=policy,
            corrections=corrections,
            trials=AttemptHistory(never=tried, version=version),
        )

    fresh = place_among(tuple(node for node in view.nodes if not _has_or_loads(node, model)))
    if isinstance(fresh, Placement):
        return LoadPlacement(fresh.chosen.node, fresh.chosen.name)
    result = place_among(view.nodes)
    able = [candidate for candidate in result.candidates if candidate.node not in tried]
    best = max(able, key=_rank, default=None)
    if best is not None and _rank(best) > (0,):
        return LoadPlacement(best.node, best.name, best.model is not None and best.model.loaded)
    assert isinstance(result, NoPlacement)  # noqa: S101  a candidate that may be picked has a rank
    return _rewrite_refusal(result, model)


def _has_or_loads(node: NodeView, name: str) -> bool:
    model = node.models.get(name)
    return model is not None and (model.loaded or model.loading)


def _rank(candidate: Candidate) -> tuple[int, ...]:
    """Rank a node for a load; 0 excludes it.

    The rank is 4 if the model is loaded, 3 if it is loading. It is 2 if the node is large enough once emptied, and 1 if
    an earlier load failed.
    """
    model, code = candidate.model, candidate.code
    if model is None:
        return (0,)
    if code in (None, RefusalCode.NO_ROOM, RefusalCode.UNREADABLE) and (model.loaded or model.loading):
        return (4 if model.loaded else 3, candidate.headroom or 0)
    if code in _MEMORY and candidate.weights and candidate.weights <= compute_most_weights(candidate.memory):
        return (2, (candidate.headroom or 0) - candidate.need)
    return (1, candidate.headroom or 0) if code is RefusalCode.LOAD_FAILED else (0,)


def _rewrite_refusal(result: NoPlacement, model: str) -> Refused:
    """Rewrite a placement refusal for a load, which has no prompt to shorten."""
    refused = result.refused
    offers = [candidate for candidate in result.candidates if candidate.model is not None]
    if refused.code not in _MEMORY or not offers:
        return refused
    best = max(offers, key=lambda candidate: compute_most_weights(candidate.memory))
    most = show_size(max(0, compute_most_weights(best.memory)))
    text = (
        f"{model} needs {show_size(best.weights or best.need)} in memory, {best.name} can give "
        f"{most} at most and has {show_size(best.headroom)} now: use a smaller "
        "variant, or raise memory.cap"
    )
    return Refused(refused.code, text, best.build_memory_numbers(), refused.retry_after, best.name)

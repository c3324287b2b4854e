"""Which node loads a model that a person wants in memory. Pure; the arithmetic is placement's, for one token.

The node that would answer first is asked, among those that have not got the model yet and can hold it. Is there none,
one that has it already, or is loading it, will do. Then a node that is full but large enough for the weights, without
the margin that a request needs (`wire.capacity.arithmetic.judge_load`): its engine may unload idle models, and only it
knows. A node that could not load it before comes last: an order by name tries again.
"""

from collections.abc import Callable, Mapping

import msgspec

from router.placement.cluster_view import ClusterView, NodeView
from router.placement.place import Candidate, Correction, Demand, NoPlacement, Placement, Policy, Trials, place
from router.placement.reservations import Ledger
from wire.capacity.arithmetic import most_weights
from wire.identity import NodeId
from wire.refusals import Code, Refused
from wire.units import show_size

_MEMORY = frozenset({Code.NO_ROOM, Code.TOO_LARGE})


class Choice(msgspec.Struct, frozen=True, gc=False):
    """A node to ask. `loaded`: by its report it has the model already."""

    node: NodeId
    name: str
    loaded: bool = False


def choose(
    view: ClusterView,
    model: str,
    ledger: Ledger,
    *,
    now: float,
    draw: Callable[[], float],
    policy: Policy,
    corrections: Mapping[NodeId, Correction],
    tried: Mapping[NodeId, Refused],
    fingerprint: str = "",
) -> Choice | Refused:
    """Return the node that should load a model, or why there is none. `tried` are those that have refused; only the
    model of the `fingerprint` counts, empty: any."""

    def placed(nodes: tuple[NodeView, ...]) -> Placement | NoPlacement:
        return place(ClusterView(nodes), Demand(model, 0, 1, 1), ledger, now=now, draw=draw, policy=policy,
                     corrections=corrections, trials=Trials(never=tried, fingerprint=fingerprint))  # fmt: skip

    fresh = placed(tuple(node for node in view.nodes if not _here(node, model)))
    if isinstance(fresh, Placement):
        return Choice(fresh.chosen.node, fresh.chosen.name)
    whole = placed(view.nodes)
    able = [candidate for candidate in whole.candidates if candidate.node not in tried]
    best = max(able, key=_rank, default=None)
    if best is not None and _rank(best) > (0,):
        return Choice(best.node, best.name, best.model is not None and best.model.loaded)
    assert isinstance(whole, NoPlacement)  # noqa: S101  a candidate that may be picked has a rank
    return _explained(whole, model)


def _here(node: NodeView, name: str) -> bool:
    model = node.models.get(name)
    return model is not None and (model.loaded or model.loading)


def _rank(candidate: Candidate) -> tuple[int, ...]:
    """Rank what is left: loaded, on its way, large enough when emptied, broken before; 0 for the rest."""
    model, code = candidate.model, candidate.code
    if model is None:
        return (0,)
    if code in (None, Code.NO_ROOM, Code.UNREADABLE) and (model.loaded or model.loading):
        return (4 if model.loaded else 3, candidate.headroom or 0)
    if code in _MEMORY and candidate.weights and candidate.weights <= most_weights(candidate.memory):
        return (2, (candidate.headroom or 0) - candidate.need)
    return (1, candidate.headroom or 0) if code is Code.LOAD_FAILED else (0,)


def _explained(whole: NoPlacement, model: str) -> Refused:
    """Give placement's refusal in the words of somebody who has no prompt to shorten."""
    refused = whole.refused
    offers = [candidate for candidate in whole.candidates if candidate.model is not None]
    if refused.code not in _MEMORY or not offers:
        return refused
    best = max(offers, key=lambda one: most_weights(one.memory))
    text = (
        f"{model} needs {show_size(best.weights or best.need)} in memory, {best.name} can give "
        f"{show_size(max(0, most_weights(best.memory)))} at most and has {show_size(best.headroom)} now: use a smaller "
        "variant, or raise memory.cap"
    )
    return Refused(refused.code, text, best.numbers(), refused.retry_after, best.name)

"""Candidates of the alias that a request names: its models in order, and its upstream, if it has one.

This module stores the state of the request for each candidate, and the reason why a candidate was passed over. In
`router.placement.candidate`, a candidate is a node instead.

A request uses one candidate at a time: its `spec`, `demand` and tried nodes belong to this candidate. The state for the
other candidates is stored here. Prompt tokens and refusals of nodes belong to one model and are never used for another
model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from router.aliases import UPSTREAM_PREFIX
from router.dispatch.aliases.tried_nodes import TriedNodes
from router.dispatch.request import RequestSpec
from router.placement.candidate import NoPlacement, Placement, ResourceDemand
from router.placement.prefix_affinity import PrefixHashChain
from wire.identity import NodeId
from wire.refusals import RefusalCode, Refused

MUST_WAIT = "many prompts are ahead of it on its node, and this API key already uses more than its share"


class PassedOver(msgspec.Struct, frozen=True, gc=False):
    """Candidate of an alias that a request did not use."""

    model: str
    reason: str


@dataclass(slots=True)
class CandidateState:
    """State of a request for one candidate of its alias."""

    spec: RequestSpec
    demand: ResourceDemand
    tried: TriedNodes
    chain: PrefixHashChain | None
    """Hashes of the prompt for this model; None if placement does not use them."""
    cached_shares: Mapping[NodeId, float]
    """Share of the prompt in the prefix cache of each node, 0 to 1."""

    def remove_node(self, node: NodeId) -> None:
        """Remove all state of a node that is no longer a member."""
        self.tried.remove_node(node)
        self.cached_shares = {other: share for other, share in self.cached_shares.items() if other != node}


@dataclass(frozen=True, slots=True)
class UnusedCandidate:
    """State of a request for a candidate of its alias that it has not used yet."""

    spec: RequestSpec
    demand: ResourceDemand
    lost: set[NodeId]
    """Nodes that were lost while they had the request: its `TriedNodes.lost`, one set for all candidates."""

    def prepare(self, chain: PrefixHashChain | None, cached_shares: Mapping[NodeId, float]) -> CandidateState:
        """Return the state with which the request uses this candidate for the first time.

        `chain` has the prefix hashes of the prompt for this model; None if placement does not use them.
        `cached_shares` maps nodes to the share of the prompt in their prefix cache, 0 to 1.
        """
        return CandidateState(self.spec, self.demand, TriedNodes(self.lost), chain, cached_shares)


class AliasCandidates:
    """Candidates of the alias `name` for one request, with `models` in order. At first, the first model is in use.

    `upstream` is the name of the upstream that is the last candidate; empty if the alias has none. `forbidden` is the
    reason why the upstream can never take this request; empty if it can.
    """

    __slots__ = (
        "at",
        "forbidden",
        "models",
        "name",
        "obstacle",
        "reasons",
        "refused",
        "results",
        "stored",
        "unused",
        "upstream",
    )

    def __init__(self, name: str, models: Sequence[str], upstream: str = "", forbidden: str = "") -> None:
        self.name = name
        self.upstream = upstream
        self.forbidden = forbidden
        self.obstacle = forbidden
        """Reason why the upstream cannot take the request now; empty if it can."""
        self.refused: Refused | None = None
        """Newest refusal of `combine_refusals`; None before the first."""
        self.models = tuple(models)
        self.at = 0
        """Position in `models` of the candidate in use; for the upstream the number of models."""
        self.unused: dict[int, UnusedCandidate] = {}
        """Candidates that were not used yet, by position."""
        self.stored: dict[int, CandidateState] = {}
        """States of the candidates that were used before, by position."""
        self.results: list[Placement | NoPlacement] = []
        """Placement of each model, in order, when last none of them could start; empty before."""
        self.reasons: dict[str, str] = {}
        """Newest reason why each model was passed over, by model."""

    def add_unused(self, spec: RequestSpec, demand: ResourceDemand, lost: set[NodeId]) -> None:
        """Add all models but the first as unused. `spec` and `demand` belong to the first model.

        `lost` is the set `TriedNodes.lost` of the request. All candidates share this set.
        """
        for at, model in enumerate(self.models[1:], 1):
            own_spec = replace(spec, demand=replace(spec.demand, model=model))
            self.unused[at] = UnusedCandidate(own_spec, replace(demand, model=model), lost)

    def take(self, at: int) -> CandidateState | UnusedCandidate:
        """Remove and return the state of the candidate at position `at`. The caller must call `store` next.

        Raise `KeyError` if that candidate is in use or does not exist.
        """
        return self.unused.pop(at) if at in self.unused else self.stored.pop(at)

    def store(self, at: int, former: CandidateState) -> None:
        """Store the state `former` of the candidate in use, and mark the candidate at position `at` as in use."""
        self.stored[self.at] = former
        self.at = at

    def set_results(self, results: Sequence[Placement | NoPlacement]) -> None:
        """Set the placement of each model, in order, after none of them could start."""
        self.results = list(results)

    def list_waitable(self) -> list[int]:
        """Return the positions of the candidates whose result in `results` is not a final refusal."""
        return [at for at, result in enumerate(self.results) if not _is_final(result)]

    def choose(self) -> int:
        """Return the position of the model with which the request waits, or whose refusal ends the request.

        This is the first model whose result in `results` is not a final refusal. If all refusals are final, it is the
        first model that a node serves, because the refusal of such a model says what to change. If no node serves any
        model, it is the first model.
        """
        served = (at for at, result in enumerate(self.results) if not _is_without_node(result))
        return next(iter(self.list_waitable()), next(served, 0))

    def set_reason(self, model: str, reason: str) -> bool:
        """Set the reason why a model was passed over. Return whether it differs from the former reason."""
        is_new = self.reasons.get(model) != reason
        self.reasons[model] = reason
        return is_new

    def use_upstream(self, former: CandidateState) -> None:
        """Record that the upstream is in use, and store the state of the former candidate."""
        self.store(len(self.models), former)

    @property
    def uses_upstream(self) -> bool:
        """Whether the upstream is in use."""
        return self.at == len(self.models)

    def list_passed_over(self) -> tuple[PassedOver, ...]:
        """Return the models before the candidate in use, in order, with the newest reason of each.

        Omit models that were not passed over.
        """
        before = self.models[: self.at]
        return tuple(PassedOver(model, self.reasons[model]) for model in before if model in self.reasons)

    def list_states(self) -> Iterable[CandidateState]:
        """Return the states of the candidates that were used before and are not in use now."""
        return self.stored.values()

    def set_obstacle(self, obstacle: str) -> None:
        """Set the reason why the upstream cannot take the request now; empty if it can. `forbidden` has precedence."""
        self.obstacle = self.forbidden or obstacle

    def combine_refusals(self, best: NoPlacement) -> Refused:
        """Return one refusal with the reasons of all candidates, and with the code and the numbers of `best`.

        The refusal is also stored in `refused`. If the upstream has an obstacle, this is one of the reasons.
        """
        parts = [
            f"{model}: {get_reason(result, model)}" for model, result in zip(self.models, self.results, strict=False)
        ]
        parts += [describe_upstream(self.upstream, self.obstacle)] if self.obstacle else []
        text = f"no candidate of {self.name} can start now: {'; '.join(parts)}"
        self.refused = replace(best.refused, message=text)
        return self.refused


def get_reason(result: Placement | NoPlacement, model: str) -> str:
    """Return why `model` was passed over, from the result of its placement.

    Unlike the refusal of an unknown model, the reason does not list other models, which the key may not be allowed to
    use.
    """
    if isinstance(result, Placement):
        return MUST_WAIT
    return f"no node serves {model}" if _is_without_node(result) else result.refused.message


def describe_upstream(name: str, text: str) -> str:
    """Return the part of a refusal about the upstream `name`. `text` says why the upstream takes no request."""
    return f"{UPSTREAM_PREFIX}{name}: {text}"


def _is_final(result: Placement | NoPlacement) -> bool:
    return isinstance(result, NoPlacement) and result.refused.final


def _is_without_node(result: Placement | NoPlacement) -> bool:
    return isinstance(result, NoPlacement) and result.refused.code is RefusalCode.NO_MODEL

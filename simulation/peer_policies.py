"""Placement rules of other projects, as far as scores of single nodes can express them."""

from router.placement.candidate import Candidate, ResourceDemand
from wire.capacity.arithmetic import compute_occupied
from wire.identity import NodeId
from wire.report import Memory


class RoundRobin:
    """Policy that prefers the node to which the fewest requests were sent so far."""

    def __init__(self) -> None:
        self._turns: dict[NodeId, int] = {}

    def count_request(self, node: NodeId) -> None:
        """Count a request that is sent to a node."""
        self._turns[node] = self._turns.get(node, 0) + 1

    def score(self, candidate: Candidate, request: ResourceDemand) -> tuple[float, ...]:
        """Return the number of requests that were sent to the node; less is better."""
        return (self._turns.get(candidate.node, 0),)


class LeastInFlight:
    """Policy that prefers the node with the fewest requests of this router, running or queued there."""

    def score(self, candidate: Candidate, request: ResourceDemand) -> tuple[float, ...]:
        """Return the number of requests in flight on the node; less is better."""
        return (candidate.in_flight,)


class LeastLoad:
    """Policy `least_load` of SMG (sglang-router): seconds of queued tokens, plus a term for the memory in use.

    For the share k of memory in use, the term is 0.15 s × k/(1−k).
    """

    def score(self, candidate: Candidate, request: ResourceDemand) -> tuple[float, ...]:
        """Return the load of the node in seconds; less is better."""
        used = min(0.99, _compute_used_share(candidate.memory))
        return (_estimate_queued_tokens(candidate) / _get_prefill_speed(candidate) + 0.15 * used / (1 - used),)


class LinearCost:
    """Policy of Dynamo: tokens that the node has to prefill, plus tokens of decode batches. Speeds are ignored."""

    def score(self, candidate: Candidate, request: ResourceDemand) -> tuple[float, ...]:
        """Return the cost of the node in tokens; less is better."""
        groups = candidate.model.groups if candidate.model is not None else ()
        prefill = _estimate_queued_tokens(candidate) + candidate.prompt_tokens * (1 - candidate.cached_share)
        return (prefill + sum(group.tokens for group in groups),)


class WeightedScorers:
    """Policy of llm-d (Gateway API inference extension) with its weights: prefix cache 3, queue 2, memory 2.

    The score of the queue is 0.5 without requests in flight, and decreases to 0 at 128 requests.
    """

    def score(self, candidate: Candidate, request: ResourceDemand) -> tuple[float, ...]:
        """Return the negative weighted sum of scores between 0 and 1; less is better."""
        queue = 0.5 * (1 - min(1.0, candidate.in_flight / 128))
        return (-(3 * candidate.cached_share + 2 * queue + 2 * (1 - _compute_used_share(candidate.memory))),)


def _get_prefill_speed(candidate: Candidate) -> float:
    return candidate.model.prefill_speed if candidate.model is not None else 1.0


def _estimate_queued_tokens(candidate: Candidate) -> float:
    """Return the prompt tokens ahead of this request."""
    model = candidate.model
    load = model.load_seconds if model is not None and not model.loaded else 0.0
    mine = candidate.prompt_tokens * (1 - candidate.cached_share)
    return max(0.0, (candidate.expected_ttft - load) * _get_prefill_speed(candidate) - mine)


def _compute_used_share(memory: Memory) -> float:
    return ((compute_occupied(memory) or 0) + memory.reserved) / max(1, memory.ceiling - memory.margin)

"""Placement policies, which order the feasible nodes. No policy can override the filter of `place`."""

from collections.abc import Mapping
from math import floor, log2
from types import MappingProxyType
from typing import Protocol

from router.placement.candidate import Candidate, ResourceDemand
from router.placement.weights import (
    ANSWER_WEIGHT,
    BUSY_STEPS,
    HEADROOM_SATURATION,
    PREFIX_HIT_SHARE,
    TTFT_STEP_SECONDS,
)


class Policy(Protocol):
    """Policy that orders feasible nodes. The node with the smallest tuple wins; chance decides between equal tuples."""

    def score(self, candidate: Candidate, request: ResourceDemand) -> tuple[float, ...]:
        """Return the rank of a feasible node for a request, as a tuple that is compared by its elements in order."""
        ...


class Balanced:
    """Policy `balanced`: sufficient headroom first, then the shortest time, including the delay of other requests."""

    def score(self, candidate: Candidate, request: ResourceDemand) -> tuple[float, ...]:
        """Rank by headroom, counted up to `HEADROOM_SATURATION` requests like this one, then by time.

        A node that is idle, or has cached `PREFIX_HIT_SHARE` of the prompt, counts as one with that headroom. Further
        criteria are requests in flight relative to speed, cached share of the prompt, and share of headroom.
        """
        headroom, need, memory, model = candidate.headroom or 0, candidate.need, candidate.memory, candidate.model
        marks, cached_share = HEADROOM_SATURATION, candidate.cached_share
        if headroom < marks * need and cached_share < PREFIX_HIT_SHARE and not candidate.idle:
            marks = headroom // need
        fraction = headroom / max(1, memory.ceiling - memory.margin)
        time = candidate.expected_ttft + candidate.delay + ANSWER_WEIGHT * candidate.expected_answer
        speed = 1.0 if model is None else model.decode_speed
        busy = floor(BUSY_STEPS * log2((candidate.in_flight + 1) / speed))
        return (-marks, time // TTFT_STEP_SECONDS, busy, -cached_share, -fraction)


class MostHeadroom:
    """Policy `most_headroom`: the node with the most bytes of headroom wins."""

    def score(self, candidate: Candidate, request: ResourceDemand) -> tuple[float, ...]:
        """Rank by headroom in bytes, then by the fewest requests in flight."""
        return (-(candidate.headroom or 0), candidate.in_flight)


POLICIES: Mapping[str, Policy] = MappingProxyType({"balanced": Balanced(), "most_headroom": MostHeadroom()})

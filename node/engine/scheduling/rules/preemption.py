"""Choices of preemption: the requests that lose memory or rows, and the request that returns next. Pure.

- Victim: If a row must grow and has no room, one request loses its memory. Requests without a cache and without
  delivered tokens are candidates first, because they lose no work, then requests with a cache. Of the candidates, the
  newest request of the key with the most rows for its weight is chosen.
- Outcome: A request without room is preempted if some of its tokens were delivered, and memory may become free or
  cannot be read now. Otherwise it ends. If it was refused, the router places it again.
- Return: The oldest preempted request returns first. A request that was preempted for another key returns only while
  rows are free.
- Sharing: A key that holds fewer rows or bytes for its weight than another key gets rows or bytes of that key
  (`wire.capacity.fairness`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from wire.capacity.fairness import RunningRequest, WeightedKey, choose_preemptions


class LiveRequest(Protocol):
    """Properties of a live request that determine its preemption."""

    @property
    def weighted_key(self) -> WeightedKey:
        """API key of the request."""
        ...

    @property
    def age(self) -> tuple[float, int]:
        """Sort key that orders requests from oldest to newest: monotonic time of arrival, and number of the request."""
        ...

    @property
    def width(self) -> int:
        """Number of the request's rows that have not ended."""
        ...

    @property
    def holds_memory(self) -> bool:
        """Whether any row that has not ended has tokens in a cache."""
        ...

    @property
    def delivered(self) -> bool:
        """Whether any token that this node generated was sent."""
        ...

    @property
    def yielded(self) -> bool:
        """Whether the request was preempted for another key."""
        ...


R = TypeVar("R", bound=LiveRequest)


def find_newest_holder(live: Iterable[R]) -> R | None:
    """Return the newest request that has tokens in a cache; None if there is none."""
    return max((request for request in live if request.holds_memory), key=_get_age, default=None)


def choose_victim(live: Sequence[R]) -> R | None:
    """Return the request whose memory is released for a row that grows; None if no request can lose its memory.

    `live` are the requests that are not preempted. The rule is "Victim" in the module's docstring.
    """
    rows, waiting, holding = Counter[str](), list[R](), list[R]()
    for request in live:
        rows[request.weighted_key.name] += request.width
        (holding if request.holds_memory else waiting).append(request)
    waiting = [request for request in waiting if not request.delivered]

    def compute_loss(request: R) -> tuple[float, float, int]:
        return request.weighted_key.load(rows[request.weighted_key.name]), *request.age

    return max(waiting or holding, key=compute_loss, default=None)


def should_preempt(request: LiveRequest, *, unreadable: bool, others: bool) -> bool:
    """Return whether to preempt a request that has no room; if False, the request must end. The rule is "Outcome" in
    the module's docstring.

    `unreadable`: the memory cannot be read now. `others`: memory may become free, because another request ends or the
    recent peak falls. Return True if the request has delivered tokens and one of the two applies.
    """
    return request.delivered and (unreadable or others)


def next_to_return(preempted: Iterable[R], free_rows: int) -> R | None:
    """Return the oldest preempted request that may return; None if no request may. A request that was preempted for
    another key may return only if it has at most `free_rows` rows."""
    ready = (request for request in preempted if not request.yielded or free_rows >= request.width)
    return min(ready, key=_get_age, default=None)


def find_first_preempted(preempted: Iterable[R], key: str | None) -> R | None:
    """Return the oldest preempted request that precedes new requests of the API key `key`; None if no request does.

    Requests that were preempted for another key precede only requests of their own key. With `key` None, all preempted
    requests count.
    """
    ahead = (request for request in preempted if key in (None, request.weighted_key.name) or not request.yielded)
    return min(ahead, key=_get_age, default=None)


def choose_for_key(key: WeightedKey, need: int, missing: int, holding: Sequence[tuple[R, int]]) -> list[R]:
    """Return the requests to preempt for a request of `key`; an empty list if fair shares do not allow enough
    preemptions.

    The request needs `need` rows or bytes, of which `missing` are not free. `holding` are the running requests in order
    of arrival, each with the rows or bytes that it holds.
    """
    held = [(request, size) for request, size in holding if size]
    places = choose_preemptions(
        key, need, missing, [RunningRequest(request.weighted_key, size) for request, size in held]
    )
    return [held[place][0] for place in places]


def _get_age(request: LiveRequest) -> tuple[float, int]:
    return request.age

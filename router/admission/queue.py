"""Bounded queue before placement: order of attempts, shares of API keys, and deadlines.

Theory. A queued request has no node: each attempt to place it uses current numbers. Between keys, the queue is a
deficit round robin over tokens: every key earns `QUANTUM_TOKENS` times its weight per round. A key with long prompts or
with many requests gets no more than its share of work, and no key starves. Within a key the order is first in, first
out, but a request that does not fit now does not block later requests. After `MAX_OVERTAKES` overtakes or
`HOLD_HEADROOM_AFTER_SECONDS`, room is kept for a large request (argument `keep` of `attempt`). Otherwise smaller
requests could overtake it without end.

The queue is short on purpose: max(64, 4 × nodes) requests without a setting, and per key a quarter of that, at least
16. A longer queue would only turn an immediate refusal into a refusal after the deadline. A request whose answer has
begun is always accepted. While no other key waits, a key may fill the queue except for one share. At the recent pace,
all its requests must then leave in time. In simulated bursts of 30 requests by one key, this rule reduces refusals by a
third.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from wire.refusals import RefusalCode, Refused

QUANTUM_TOKENS = 256
"""Tokens that a key of weight 1 earns per round.

A key of normal priority has weight 4 and earns 1,024 tokens, the size of a common request.
"""
MAX_OVERTAKES = 8
"""Number of overtakes after which room is kept for a request."""
HOLD_HEADROOM_AFTER_SECONDS = 5.0
"""Seconds in the queue after which room is kept for a request."""
MIN_QUEUE_LENGTH = 64
"""Minimum number of requests that the queue can hold."""
ENTRIES_PER_NODE = 4
"""Number of requests that the queue can hold for each node, if that is more than `MIN_QUEUE_LENGTH` in total."""
KEY_SHARE_DIVISOR = 4
"""Divisor of the queue's maximum length that results in the share of one key."""
MIN_KEY_SHARE = 16
"""Minimum share of one key, in queued requests."""
PACE_ROUNDS = 4
"""Length of the moving average of the pace, which is the seconds per placed request.

A new value has the weight 1/`PACE_ROUNDS`.
"""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class QueuedRequest(Generic[T]):
    """Request in the queue, with its cost and deadline. `AdmissionQueue.offer` creates it."""

    item: T
    """Object of the caller that represents the request."""
    key: str
    """Id of the API key."""
    cost: int
    """Expected tokens of the prompt and of all answers, at least 1."""
    arrived: float
    """Time at which the request entered the queue, in monotonic seconds."""
    deadline: float
    """Monotonic time in seconds from which `expire` removes the request."""
    number: int
    """Number of the request in the order of entry into the queue."""
    overtaken: int = 0
    """Number of later requests that were placed before this one."""

    def extend(self, deadline: float) -> float:
        """Set the deadline to `deadline` (monotonic seconds) if that is later. Return the deadline in force."""
        self.deadline = max(self.deadline, deadline)
        return self.deadline

    def count_overtake(self) -> None:
        """Count a later request that was placed before this one."""
        self.overtaken += 1


@dataclass(slots=True)
class _KeyQueue(Generic[T]):
    entries: deque[QueuedRequest[T]] = field(default_factory=deque[QueuedRequest[T]])
    deficit: int = 0
    quantum: int = QUANTUM_TOKENS

    def append(self, entry: QueuedRequest[T], weight: int) -> None:
        """Append a request of a key with this weight."""
        self.entries.append(entry)
        self.quantum = QUANTUM_TOKENS * weight

    def add_credit(self, rounds: int) -> None:
        """Credit the tokens of `rounds` rounds."""
        self.deficit += rounds * self.quantum

    def charge(self, cost: int) -> None:
        """Charge the tokens of a request that leaves the queue."""
        self.deficit -= cost


class AdmissionQueue(Generic[T]):
    """Bounded queue of requests before placement, fair between API keys. The caller passes times and places requests.

    `limit` is the maximum length of the queue; 0 computes it from the number of nodes (`compute_limit`).
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._lanes: dict[str, _KeyQueue[T]] = {}
        self._count = 0
        self._number = 0
        self._pace: float | None = None
        self._left_at = 0.0

    def __len__(self) -> int:
        return self._count

    def get_longest_wait(self, now: float) -> float:
        """Return the seconds for which the oldest queued request has waited at `now` (monotonic seconds).

        Return 0 for an empty queue.
        """
        return max((now - lane.entries[0].arrived for lane in self._lanes.values()), default=0.0)

    def count_queued(self, key: str) -> int:
        """Return the number of queued requests of one key."""
        return len(self._lanes[key].entries) if key in self._lanes else 0

    def compute_limit(self, nodes: int) -> int:
        """Return the maximum length of the queue for this number of nodes; the configured length if one is set."""
        return self._limit or max(MIN_QUEUE_LENGTH, ENTRIES_PER_NODE * nodes)

    def compute_share(self, nodes: int) -> int:
        """Return the share of one key: its maximum number of queued requests in a cluster with this number of nodes."""
        return max(MIN_KEY_SHARE, self.compute_limit(nodes) // KEY_SHARE_DIVISOR)

    def offer(
        self,
        item: T,
        key: str,
        cost: int,
        now: float,
        deadline: float,
        nodes: int,
        *,
        weight: int = 1,
        share: int | None = None,
        begun: bool = False,
    ) -> QueuedRequest[T] | Refused:
        """Enqueue a request (`item`) of an API key. Return the queued request, or the refusal.

        Refuse a request above the share of its key (429), and any request to a full queue (503). `cost` is in tokens,
        `now` and `deadline` in monotonic seconds. `nodes` is the number of nodes, from which the limits follow.
        `weight` is the weight of the key in the round robin.

        `share` is the key's maximum number of queued requests, without exceptions; None for `compute_share`. A key may
        exceed `compute_share` while no other key waits, the places of one share stay free, and the recent pace meets
        the deadline. Requests with `begun`, which were on a node before, have no limit.
        """
        if begun:
            return self._enqueue(item, key, cost, now, deadline, weight)
        most = self.compute_share(nodes) if share is None else share
        if self.count_queued(key) >= most and (
            share is not None or not self._may_exceed_share(key, nodes, now, deadline)
        ):
            queued = self.count_queued(key)
            text = f"{queued} requests of this API key are queued, which is its share: wait for their answers"
            return Refused(RefusalCode.OVER_SHARE, text, None, self._compute_retry_after(queued, now))
        if self._count >= self.compute_limit(nodes):
            text = f"the queue is full with {self._count} requests: retry later, or add a machine (`cluster join`)"
            return Refused(RefusalCode.QUEUE_FULL, text, None, self._compute_retry_after(self._count, now))
        return self._enqueue(item, key, cost, now, deadline, weight)

    def _may_exceed_share(self, key: str, nodes: int, now: float, deadline: float) -> bool:
        """Return whether a key may have queued requests beyond its share.

        No other key may be waiting, and more than `compute_share` places must be free. At the recent pace all requests
        before the new one must leave by its deadline.
        """
        alone = self.count_queued(key) == self._count < self.compute_limit(nodes) - self.compute_share(nodes)
        return alone and self._estimate_wait(self._count + 1, now) <= deadline - now

    def _enqueue(self, item: T, key: str, cost: int, now: float, deadline: float, weight: int) -> QueuedRequest[T]:
        if not self._count and self._left_at:
            self._left_at = now  # the time without queued requests is not part of the pace
        self._number += 1
        entry = QueuedRequest(item, key, max(1, cost), now, deadline, self._number)
        self._lanes.setdefault(key, _KeyQueue()).append(entry, weight)
        self._count += 1
        return entry

    def _compute_retry_after(self, before: int, now: float) -> float:
        """Return the seconds until `before` requests have left at the recent pace, at least 1 and at most 60.

        Without a known pace, return half the time until the earliest deadline, within the same limits.
        """
        oldest = min((lane.entries[0].deadline for lane in self._lanes.values()), default=now)
        return min(60.0, max(1.0, (oldest - now) / 2 if self._pace is None else self._estimate_wait(before, now)))

    def _estimate_wait(self, places: int, now: float) -> float:
        """Return the seconds until `places` requests have left at the recent pace, infinite without a known pace."""
        return math.inf if self._pace is None else places * max(self._pace, now - self._left_at)

    def _update_pace(self, left: int, now: float) -> None:
        """Update the average pace, in seconds per placed request."""
        if left and self._left_at:
            pace = (now - self._left_at) / left
            self._pace = pace if self._pace is None else self._pace + (pace - self._pace) / PACE_ROUNDS
        if left:
            self._left_at = now

    def remove(self, entry: QueuedRequest[T]) -> bool:
        """Remove a request from the queue. Return False if it is not queued."""
        lane = self._lanes.get(entry.key)
        if lane is None or entry not in lane.entries:
            return False
        lane.entries.remove(entry)
        self._count -= 1
        if not lane.entries:
            del self._lanes[entry.key]
        return True

    def list_entries(self) -> list[QueuedRequest[T]]:
        """Return all queued requests, grouped by API key; the requests of a key are oldest first."""
        return [entry for lane in self._lanes.values() for entry in lane.entries]

    def expire(self, now: float) -> list[T]:
        """Remove all requests whose deadline has passed at `now` (monotonic seconds).

        Return their items, oldest first.
        """
        late = sorted((entry for entry in self.list_entries() if entry.deadline <= now), key=lambda entry: entry.number)
        for entry in late:
            self.remove(entry)
        return [entry.item for entry in late]

    def place_waiting(self, now: float, attempt: Callable[[T, bool], bool]) -> int:
        """Try to place every queued request once in fair order. Remove placed requests, and return their number.

        `attempt(item, keep)` tries to place a request and returns whether it succeeded. With `keep`, it should keep
        room on a node for a request that does not fit yet. Only the first request of a key can have `keep`. For each
        placed request, all older requests that were tried before without success count an overtake. `now` is in
        monotonic seconds.
        """
        untried = {key: deque(lane.entries) for key, lane in self._lanes.items()}
        passed: list[QueuedRequest[T]] = []
        tried: set[str] = set()
        left = 0
        while (turn := self._choose_next(untried)) is not None:
            entry, rounds = turn
            keep = entry.key not in tried and self.needs_room(entry, now)
            placed = attempt(entry.item, keep)
            tried.add(entry.key)
            if placed:
                left += 1
                self._charge_placed(entry, rounds, untried)
                self._remove_placed(entry, passed)
            else:
                passed.append(entry)
            untried[entry.key].popleft()
        self._update_pace(left, now)
        return left

    def needs_room(self, entry: QueuedRequest[T], now: float) -> bool:
        """Return whether room must be kept for a request, because it was overtaken too often or has waited too long.

        `now` is in monotonic seconds.
        """
        return entry.overtaken >= MAX_OVERTAKES or now - entry.arrived >= HOLD_HEADROOM_AFTER_SECONDS

    def count_overtake(self) -> None:
        """Count an overtake for every queued request, because another request was placed without being queued."""
        if self._count:
            for entry in self.list_entries():
                entry.count_overtake()

    def _choose_next(self, untried: dict[str, deque[QueuedRequest[T]]]) -> tuple[QueuedRequest[T], int] | None:
        """Return the next request, and the number of rounds that every key must earn first.

        This method changes no credit: only a placed request is charged (`_charge_placed`).
        """
        heads = [untried[key][0] for key in self._lanes if untried.get(key)]
        if not heads:
            return None
        rounds = min(self._count_rounds(head) for head in heads)
        return next(head for head in heads if self._count_rounds(head) == rounds), rounds

    def _count_rounds(self, head: QueuedRequest[T]) -> int:
        return max(0, -(-(head.cost - self._lanes[head.key].deficit) // self._lanes[head.key].quantum))

    def _charge_placed(self, entry: QueuedRequest[T], rounds: int, untried: dict[str, deque[QueuedRequest[T]]]) -> None:
        """Credit `rounds` to every competing key, and charge the request's key.

        That key stays at the front until its credit is spent.
        """
        if entry.key not in self._lanes:
            return
        for key in list(self._lanes):
            if key == entry.key:
                break
            self._lanes[key] = self._lanes.pop(key)
        for key, lane in self._lanes.items():
            if untried.get(key):
                lane.add_credit(rounds)
        self._lanes[entry.key].charge(entry.cost)

    def _remove_placed(self, entry: QueuedRequest[T], passed: list[QueuedRequest[T]]) -> None:
        for other in passed:
            if other.number < entry.number:
                other.count_overtake()
        self.remove(entry)

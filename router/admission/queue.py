"""The bounded line before placement: who waits, in which order they are tried, and when they must give up.

Theory. Nothing is placed at the door and kept: an entry is placed at the moment it is tried, on fresh numbers. Between
keys the line is a deficit round robin over tokens: every key earns QUANTUM times its weight in its turn, so a key with
long prompts or with many requests gets no more than its share of work, and nobody starves. Within a key it is first in,
first out, except that an entry that does not fit now does not block the ones behind it. So that a large request is not
overtaken for ever, room is kept for it (`keep` of an attempt) after MOST_OVERTAKES or PATIENCE seconds.

The line is short on purpose: max(64, 4 × nodes) entries, a quarter of that per key but at least 16. A longer line only
turns a refusal now into a refusal after the deadline. So a key that waits alone may have three quarters of it as long
as all of them get their turn in time at the pace of late (simulated, bursts of thirty by one key: a third fewer are
refused).
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from wire.refusals import Code, Refused

QUANTUM = 256
"""Tokens that a key of weight 1 earns in its turn: with normal priority, whose weight is 4, a common request."""
MOST_OVERTAKES = 8
PATIENCE = 5.0
"""Seconds in line after which room is kept for a request."""
LEAST_LIMIT = 64
PER_NODE = 4
SHARE = 4
"""One key may hold one part in this many of the line."""
LEAST_SHARE = 16
PACES = 4
"""Rounds over which the pace of the line is averaged."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One request in line. `cost` in tokens, times in monotonic seconds, `number` in order of arrival."""

    item: T
    key: str
    cost: int
    arrived: float
    deadline: float
    number: int
    overtaken: int = 0


@dataclass(slots=True)
class _Lane(Generic[T]):
    entries: deque[Entry[T]] = field(default_factory=deque[Entry[T]])
    deficit: int = 0
    quantum: int = QUANTUM


class AdmissionQueue(Generic[T]):
    """The line. It knows nothing of nodes: the caller says for each entry whether it could be placed."""

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._lanes: dict[str, _Lane[T]] = {}
        self._count = 0
        self._number = 0
        self._pace: float | None = None
        self._left_at = 0.0

    def __len__(self) -> int:
        return self._count

    def oldest(self, now: float) -> float:
        """Give for how many seconds the one in line waits that came first; 0 while nobody does."""
        return max((now - lane.entries[0].arrived for lane in self._lanes.values()), default=0.0)

    def depth(self, key: str) -> int:
        """Give how many requests of one key wait."""
        return len(self._lanes[key].entries) if key in self._lanes else 0

    def limit(self, nodes: int) -> int:
        """Give how many may wait in a cluster of this many nodes."""
        return self._limit or max(LEAST_LIMIT, PER_NODE * nodes)

    def share(self, nodes: int) -> int:
        """Give how many may wait for one key."""
        return max(LEAST_SHARE, self.limit(nodes) // SHARE)

    def offer(
        self, item: T, key: str, cost: int, now: float, deadline: float, nodes: int, *, weight: int = 1,
        share: int | None = None, begun: bool = False,
    ) -> Entry[T] | Refused:  # fmt: skip
        """Take a place in line, or be refused: over the key's share (429) or the line is full (503). `weight` is the
        key's part beside the others' when all have something in line, `share` the most that it may have there. What was
        `begun` already is never refused: it had been let in."""
        if begun:
            return self._enter(item, key, cost, now, deadline, weight)
        most = self.share(nodes) if share is None else share
        if self.depth(key) >= most and (share is not None or not self._lends(key, nodes, now, deadline)):
            text = f"{self.depth(key)} requests of this key wait already, its share: wait for their answers"
            return Refused(Code.OVER_SHARE, text, None, self._patience(self.depth(key), now))
        if self._count >= self.limit(nodes):
            text = f"{self._count} requests wait already for a node with room: retry later or join another machine"
            return Refused(Code.QUEUE_FULL, text, None, self._patience(self._count, now))
        return self._enter(item, key, cost, now, deadline, weight)

    def _lends(self, key: str, nodes: int, now: float, deadline: float) -> bool:
        """Whether a key may have places beyond its share: nobody else waits, a share's worth is left for others, and at
        the pace of late the line is through with all before it by its deadline."""
        alone = self.depth(key) == self._count < self.limit(nodes) - self.share(nodes)
        return alone and self._wait(self._count + 1, now) <= deadline - now

    def _enter(self, item: T, key: str, cost: int, now: float, deadline: float, weight: int) -> Entry[T]:
        self._number += 1
        entry = Entry(item, key, max(1, cost), now, deadline, self._number)
        lane = self._lanes.setdefault(key, _Lane())
        lane.entries.append(entry)
        lane.quantum = QUANTUM * weight
        self._count += 1
        return entry

    def _patience(self, before: int, now: float) -> float:
        """Give seconds until so many have left at the pace of late; until something is known of that, until the oldest
        must have left. At least 1, at most 60."""
        oldest = min((lane.entries[0].deadline for lane in self._lanes.values()), default=now)
        return min(60.0, max(1.0, (oldest - now) / 2 if self._pace is None else self._wait(before, now)))

    def _wait(self, places: int, now: float) -> float:
        """Give the seconds until so many have left at the pace of late, infinite before anybody has."""
        return math.inf if self._pace is None else places * max(self._pace, now - self._left_at)

    def _note_leaving(self, left: int, now: float) -> None:
        """Keep the pace, in seconds for each that was placed, of the last few times."""
        if left and self._left_at:
            pace = (now - self._left_at) / left
            self._pace = pace if self._pace is None else self._pace + (pace - self._pace) / PACES
        if left:
            self._left_at = now

    def remove(self, entry: Entry[T]) -> bool:
        """Leave the line; False when the entry is not in it (any more)."""
        lane = self._lanes.get(entry.key)
        if lane is None or entry not in lane.entries:
            return False
        lane.entries.remove(entry)
        self._count -= 1
        if not lane.entries:
            del self._lanes[entry.key]
        return True

    def entries(self) -> list[Entry[T]]:
        """Return all entries, the oldest of each key first."""
        return [entry for lane in self._lanes.values() for entry in lane.entries]

    def expire(self, now: float) -> list[T]:
        """Take out everybody whose deadline has passed, oldest first."""
        late = sorted((entry for entry in self.entries() if entry.deadline <= now), key=lambda one: one.number)
        for entry in late:
            self.remove(entry)
        return [entry.item for entry in late]

    def wake(self, now: float, attempt: Callable[[T, bool], bool]) -> int:
        """Try everybody once in fair order; give how many left the line.

        `attempt(item, keep)` places the item or answers False; with `keep` it should keep room for what did not fit.
        """
        untried = {key: deque(lane.entries) for key, lane in self._lanes.items()}
        passed: list[Entry[T]] = []
        tried: set[str] = set()
        left = 0
        while (turn := self._turn(untried)) is not None:
            entry, rounds = turn
            keep = entry.key not in tried and self.overdue(entry, now)
            placed = attempt(entry.item, keep)
            tried.add(entry.key)
            if placed:
                left += 1
                self._pay(entry, rounds, untried)
                self._leave(entry, passed)
            else:
                passed.append(entry)
            untried[entry.key].popleft()
        self._note_leaving(left, now)
        return left

    def overdue(self, entry: Entry[T], now: float) -> bool:
        """Say whether room must now be kept for an entry."""
        return entry.overtaken >= MOST_OVERTAKES or now - entry.arrived >= PATIENCE

    def overtake(self) -> None:
        """Note that somebody who did not wait was placed before all who do."""
        for entry in self.entries():
            entry.overtaken += 1

    def _turn(self, untried: dict[str, deque[Entry[T]]]) -> tuple[Entry[T], int] | None:
        """Give the entry whose turn it is, and how many rounds every key must earn first. Changes nothing: a turn that
        ends without a place has cost nobody anything."""
        heads = [untried[key][0] for key in self._lanes if untried.get(key)]
        if not heads:
            return None
        rounds = min(self._rounds(head) for head in heads)
        return next(head for head in heads if self._rounds(head) == rounds), rounds

    def _rounds(self, head: Entry[T]) -> int:
        return max(0, -(-(head.cost - self._lanes[head.key].deficit) // self._lanes[head.key].quantum))

    def _pay(self, entry: Entry[T], rounds: int, untried: dict[str, deque[Entry[T]]]) -> None:
        """Let every key that is in the running earn its rounds, and this one pay; it stays at the front until it has
        spent what it earned."""
        if entry.key not in self._lanes:
            return
        for key in list(self._lanes):
            if key == entry.key:
                break
            self._lanes[key] = self._lanes.pop(key)
        for key, lane in self._lanes.items():
            if untried.get(key):
                lane.deficit += rounds * lane.quantum
        self._lanes[entry.key].deficit -= entry.cost

    def _leave(self, entry: Entry[T], passed: list[Entry[T]]) -> None:
        for other in passed:
            if other.number < entry.number:
                other.overtaken += 1
        self.remove(entry)

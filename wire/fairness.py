"""Whose turn it is on a node, where requests of several owners wait for rows to decode in, or to be read. Pure.

Theory. The line before placement is fair between API keys; but what has left it waits on its node until rows are free.
First come, first served there lets one key with a hundred short requests keep every other waiting until all of them
have been answered (simulated: 140 s to the first token of a chat beside such a key, 4 s with what follows). So a free
row goes to the owner who has fewest for his weight, and of his requests to the first. Who is alone notices nothing:
nothing is kept free for others.

Prompts that have their rows take turns, the shortest and the oldest. That is best for all together, but where an owner
has a CROWD of them everybody else's long prompt waits until all of these are read (simulated: half of the first tokens
of an agent beside a batch take 324 s; 87 s with what follows). So there the second turn is not the oldest's, but goes
to the owner who has had least read for his weight while others waited, too.

A free row is of no use to a key for which none comes free: one with long answers holds them all for minutes. So where a
key waits that holds less, requests of the key that holds most for its weight give way, the youngest first, as long as
that key still holds at least as much as the waiting one then does (`giving_way`). Each exchange makes the shares more
equal, so none is ever taken back. The same rule holds for rows and for bytes.

An owner is a name that means nothing here, and a weight. The empty name is one owner like any other.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from wire.bounds import Natural, Word
from wire.report import Part

CROWD = 8
"""Prompts of one owner on one node, above which the second turn goes by owners. Always going by them lets a household's
slowest prompts wait longer: they are one family's, read at half speed beside an agent (simulated, eight seeds: p95 57 s
instead of 54, and 51 with this)."""


class Owner(Part, frozen=True, array_like=True, gc=False):
    """Whose a request is, and its part beside others: one of weight 4 may have four times as many rows."""

    name: Word = ""
    weight: Natural = 1

    def load(self, much: float) -> float:
        """Give how much so many rows, or tokens, are for him."""
        return much / max(1, self.weight)


class Waiting(NamedTuple):
    """A request that waits: whose it is, the rows that it needs, and whether its answer was begun already."""

    owner: Owner
    rows: int = 1
    begun: bool = False


def in_turn(waiting: Sequence[Waiting], taken: Mapping[str, int]) -> Iterator[int]:
    """Give the places of requests, in the order in which they came, in the order in which to serve them: answers that
    were begun, then fairly. `taken` are the rows that owners have already."""
    lanes: dict[str, deque[int]] = {}
    for place, one in enumerate(waiting):
        if one.begun:
            yield place
        else:
            lanes.setdefault(one.owner.name, deque()).append(place)
    had = {name: waiting[lane[0]].owner.load(taken.get(name, 0)) for name, lane in lanes.items()}
    while lanes:
        name = min(lanes, key=lambda name: (had[name], lanes[name][0]))
        place = lanes[name].popleft()
        yield place
        had[name] += waiting[place].owner.load(waiting[place].rows)
        if not lanes[name]:
            del lanes[name]


class Holding(NamedTuple):
    """A request that holds rows or bytes, so many of them."""

    owner: Owner
    size: int


def giving_way(asking: Owner, need: int, lacking: int, holding: Sequence[Holding]) -> list[int]:
    """Return the places of the requests that give way so that a request of `asking`, which needs `need`, gets the
    `lacking` part of that; none where the shares do not allow for so much. `holding` is in order of arrival."""
    held, weights, lanes = Counter[str](), dict[str, Owner](), dict[str, list[int]]()
    for place, one in enumerate(holding):
        held[one.owner.name] += one.size
        weights[one.owner.name] = one.owner
        lanes.setdefault(one.owner.name, []).append(place)
    wanted, found = asking.load(held[asking.name] + need), list[int]()
    lanes.pop(asking.name, None)
    while lacking > 0 and lanes:
        name = max(lanes, key=lambda name: weights[name].load(held[name]))
        place = lanes[name].pop()
        if weights[name].load(held[name] - holding[place].size) < wanted:
            return []
        found.append(place)
        held[name] -= holding[place].size
        lacking -= holding[place].size
        if not lanes[name]:
            del lanes[name]
    return found if lacking <= 0 else []


class Reading:
    """Whose prompt is read in the turns that are not the shortest's. One per node."""

    def __init__(self) -> None:
        self._read: dict[str, float] = {}
        """What was read of each owner who has prompts here, for his weight, from what the least of them had when he
        came: who was away saves nothing up."""

    def has_read(self, owner: Owner, tokens: float) -> None:
        """So many tokens of one of his prompts were read."""
        if owner.name in self._read:
            self._read[owner.name] += owner.load(tokens)

    def next(self, waiting: Sequence[Owner]) -> int:
        """Give the place of the prompt to be read, of those that wait, the oldest first; nothing must not wait."""
        prompts = Counter(one.name for one in waiting)
        least = min((self._read[name] for name in prompts if name in self._read), default=0.0)
        self._read = {name: self._read.get(name, least) for name in prompts}
        if max(prompts.values()) <= CROWD:
            return 0
        return min(range(len(waiting)), key=lambda place: self._read[waiting[place].name])

"""Whose turn it is on a node, where requests of several owners wait for rows to decode in. Pure.

Theory. The line before placement is fair between API keys; but what has left it waits on its node until rows are free.
First come, first served there lets one key with a hundred short requests keep every other waiting until all of them
have been answered (simulated: 140 s to the first token of a chat beside such a key, 4 s with what follows). So a free
row goes to the owner who has fewest for his weight, and of his requests to the first. Who is alone notices nothing:
nothing is kept free for others.

An owner is a name that means nothing here, and a weight. The empty name is one owner like any other.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from wire.report import Part


class Owner(Part, frozen=True, array_like=True, gc=False):
    """Whose a request is, and its part beside others: one of weight 4 may have four times as many rows."""

    name: str = ""
    weight: int = 1

    def load(self, rows: int) -> float:
        """Give how much so many rows are for him."""
        return rows / max(1, self.weight)


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

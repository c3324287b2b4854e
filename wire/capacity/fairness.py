"""Divide rows, prefill turns and memory of a node fairly between API keys, and choose rows to preempt. Pure.

The queue before placement is fair between keys, but placed requests wait again on their node until rows are free.
A field `weighted_key` is an API key: an opaque name and a weight. The empty name is a key of its own. Three rules apply
on the node.

Rows. A row is one sequence of a decode batch. A free row goes first to a request whose answer has begun. Otherwise the
row goes to the key with the lowest number of rows divided by its weight, and to the oldest request of that key. First
come, first served would let a key with a hundred short requests delay the requests of all other keys. Simulated time to
first token of a chat at the same time (`chatty.toml`): 140 s first come, first served, 4 s with this rule. Rows are not
reserved for absent keys. docs/simulation.md describes the scenarios.

Prefill. Turns alternate between the shortest and the oldest prompt: short prompts start soon, and long prompts do not
starve. A key with more than CROWDED_PROMPTS prompts would however delay the long prompts of other keys. On such a node
the second turn goes by key: to the lowest number of prefilled tokens divided by weight, counted while other keys
waited. Simulated median time to first token of an agent during a batch (`agent.toml`): 324 s without, 87 s with this
rule.

Preemption. Long answers of one key can hold all rows for minutes. A waiting request therefore preempts the youngest
requests of the key that holds most for its weight (`choose_preemptions`). For its weight, that key keeps at least as
much as the waiting key then has. The shares therefore become more equal, and no exchange is reversed. The rule holds
for rows and for bytes.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from wire.bounds import Natural, Word
from wire.report import WireStruct

CROWDED_PROMPTS = 8
"""Prompts of one key on a node above which the second prefill turn alternates between keys.

Simulated p95 time to first token of a household with an agent, eight seeds: 51 s with this number. If the turn never
alternated, the time was 54 s; if it always did, 57 s.
"""


class WeightedKey(WireStruct, frozen=True, array_like=True, gc=False):
    """API key of a request and its weight: weight 4 may hold four times as many rows as weight 1."""

    name: Word = ""
    """Opaque name of the key. The empty name is a key of its own."""
    weight: Natural = 1
    """Weight of the key, at least 1 in all computations."""

    def load(self, much: float) -> float:
        """Return `much` (rows, tokens or bytes) divided by the weight of this key."""
        return much / max(1, self.weight)


class WaitingRequest(NamedTuple):
    """A queued request: its key, the rows that it needs, and whether part of its answer was already generated."""

    weighted_key: WeightedKey
    rows: int = 1
    begun: bool = False


def compute_service_order(waiting: Sequence[WaitingRequest], taken: Mapping[str, int]) -> Iterator[int]:
    """Yield the indices of all waiting requests in the order in which they get rows.

    `waiting` is in order of arrival; `taken` are the rows that each key holds. Begun answers come first. Then the key
    with the lowest number of rows divided by its weight is next, with its oldest request.
    """
    lanes: dict[str, deque[int]] = {}
    for place, request in enumerate(waiting):
        if request.begun:
            yield place
        else:
            lanes.setdefault(request.weighted_key.name, deque()).append(place)
    had = {name: waiting[lane[0]].weighted_key.load(taken.get(name, 0)) for name, lane in lanes.items()}
    while lanes:
        name = min(lanes, key=lambda name: (had[name], lanes[name][0]))
        place = lanes[name].popleft()
        yield place
        had[name] += waiting[place].weighted_key.load(waiting[place].rows)
        if not lanes[name]:
            del lanes[name]


class RunningRequest(NamedTuple):
    """A running request: its key, and the rows or bytes that it holds."""

    weighted_key: WeightedKey
    size: int


def choose_preemptions(key: WeightedKey, need: int, missing: int, holding: Sequence[RunningRequest]) -> list[int]:
    """Return the indices in `holding` of the requests to preempt for a waiting request of `key`.

    The waiting request needs `need` rows or bytes, of which `missing` are not free. `holding` are the running requests
    in order of arrival. The list is empty if nothing is missing, or fair shares do not allow enough preemptions.
    """
    used, weights, lanes = Counter[str](), dict[str, WeightedKey](), dict[str, list[int]]()
    for place, request in enumerate(holding):
        used[request.weighted_key.name] += request.size
        weights[request.weighted_key.name] = request.weighted_key
        lanes.setdefault(request.weighted_key.name, []).append(place)
    wanted, chosen = key.load(used[key.name] + need), list[int]()
    lanes.pop(key.name, None)
    while missing > 0 and lanes:
        name = max(lanes, key=lambda name: weights[name].load(used[name]))
        place = lanes[name].pop()
        if weights[name].load(used[name] - holding[place].size) < wanted:
            return []
        chosen.append(place)
        used[name] -= holding[place].size
        missing -= holding[place].size
        if not lanes[name]:
            del lanes[name]
    return chosen if missing <= 0 else []


class PrefillFairness:
    """Chooser of the prompt for every second prefill turn of a node. Other turns prefill the shortest prompt."""

    def __init__(self) -> None:
        self._read: dict[str, float] = {}
        """Prefilled tokens of each key divided by its weight.

        A key that returns starts at the current minimum, because idle time earns no credit.
        """

    def count_prefilled(self, key: WeightedKey, tokens: float) -> None:
        """Count prefilled tokens of a key. Tokens of a key without a prompt in the last `choose_next` do not count."""
        if key.name in self._read:
            self._read[key.name] += key.load(tokens)

    def choose_next(self, waiting: Sequence[WeightedKey]) -> int:
        """Return the index of the prompt to prefill next. `waiting` has the key of each waiting prompt, oldest first.

        The oldest prompt is next, unless a key has more than CROWDED_PROMPTS prompts. Then the oldest prompt of the key
        with the fewest prefilled tokens per weight is next. Keys without a waiting prompt lose their count, and new
        keys start at the lowest count. `waiting` must not be empty.
        """
        prompts = Counter(key.name for key in waiting)
        least = min((self._read[name] for name in prompts if name in self._read), default=0.0)
        self._read = {name: self._read.get(name, least) for name in prompts}
        if max(prompts.values()) <= CROWDED_PROMPTS:
            return 0
        return min(range(len(waiting)), key=lambda place: self._read[waiting[place].name])

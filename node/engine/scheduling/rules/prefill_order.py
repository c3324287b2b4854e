"""Order of prefills: which queued prompts get rows, and how long prompts wait to be packed. Pure.

`chunk_policy` chooses among several started prompts, and determines the size of the chunk.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from wire.capacity.fairness import WaitingRequest, WeightedKey, compute_service_order

COALESCE_SECONDS, MAX_COALESCE_SECONDS, AFTER_BURST_SECONDS = 0.01, 0.03, 30.0
"""Times for packing prompts while no row decodes. `COALESCE_SECONDS`: wait after each arrival for the next prompt.
`MAX_COALESCE_SECONDS`: maximum wait in total. `AFTER_BURST_SECONDS`: time after several concurrent requests during
which prompts wait for packing, because such clients send in bursts."""


class QueuedPrompt(Protocol):
    """Properties of a queued prompt that determine its place in the order."""

    @property
    def weighted_key(self) -> WeightedKey:
        """API key of the request."""
        ...

    @property
    def width(self) -> int:
        """Number of rows that the prompt needs."""
        ...

    @property
    def started(self) -> bool:
        """Whether the prompt has a cache. Its rows then count as rows of the decode batch."""
        ...

    @property
    def answered(self) -> bool:
        """Whether the prompt precedes new requests, because part of its answer was generated and its request was not
        preempted for another key."""
        ...


P = TypeVar("P", bound=QueuedPrompt)


def count_started_rows(queue: Sequence[QueuedPrompt]) -> int:
    """Return the number of rows of all started prompts."""
    return sum(prompt.width for prompt in queue if prompt.started)


def iterate_in_service_order(queue: Sequence[P], decoding: Mapping[str, int]) -> Iterator[P]:
    """Yield the prompts that have not started, in the order in which they get rows.

    Answers that have started come first (`QueuedPrompt.answered`), then the oldest prompt of the API key with the
    fewest rows divided by its weight. The rows of a key are its decoding rows (`decoding`) and the rows of its started
    prompts. Rows of prompts that this function has already yielded count as well.
    """
    taken, waiting = dict(decoding), list[P]()
    for prompt in queue:
        if prompt.started:
            taken[prompt.weighted_key.name] = taken.get(prompt.weighted_key.name, 0) + prompt.width
        else:
            waiting.append(prompt)
    for place in compute_service_order(
        [WaitingRequest(prompt.weighted_key, prompt.width, prompt.answered) for prompt in waiting], taken
    ):
        yield waiting[place]


def select_startable(queue: Sequence[P], free_rows: int, decoding: Callable[[], Mapping[str, int]]) -> list[P]:
    """Return the started prompts, which may continue, then the prompts that may start because rows are free.

    Prompts start in service order. A prompt that needs more rows than are free is not overtaken. `free_rows` is the
    number of rows that neither decode nor belong to a started prompt. `decoding()` returns the number of decoding rows
    of each API key.
    """
    found = [prompt for prompt in queue if prompt.started]
    if free_rows > 0 and len(found) < len(queue):
        for prompt in iterate_in_service_order(queue, decoding()):
            free_rows -= prompt.width
            if free_rows < 0:
                break
            found.append(prompt)
    return found


def compute_packing_time(arrivals: Sequence[float], crowded_at: float) -> float:
    """Return the time until which prompts wait for packing; 0.0 if they do not wait.

    `arrivals` are the times at which the prompts arrived. `crowded_at` is the time at which several requests were last
    live. All times are monotonic seconds.
    """
    first, last = min(arrivals), max(arrivals)
    if first >= crowded_at + AFTER_BURST_SECONDS:
        return 0.0
    return min(first + MAX_COALESCE_SECONDS, last + COALESCE_SECONDS)

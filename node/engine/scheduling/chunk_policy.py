"""Chunk policy of prefill: choose the next prompt and the size of its chunk. Pure.

Prefills alternate between the shortest and the oldest prompt. A huge prompt therefore neither delays short ones nor
starves. Where an API key has many prompts, the second choice is fair between keys
(`wire.capacity.fairness.PrefillFairness`). The size of a chunk follows from the time of earlier chunks (`ChunkPace`).

- Alone: A lone prefill may take `IDLE_CHUNK_SECONDS` per chunk, because a cancel takes effect between chunks.
- Decoding: While rows decode, a chunk may take `CHUNK_PER_STEP` times their step. The gap between two of their tokens
then stays
  below three times the undisturbed gap.
- Bursts: A prompt that takes `WHOLE_PROMPT_SECONDS` in all is prefilled at once: one gap for each new chat, as
in other
  engines.
- Packing: Several such prompts are prefilled in one forward (`packed_prefill`) of at most `PACKED_FORWARD_SECONDS`
seconds. Longer ones
  save little more, and the first prompt would wait for all. While rows decode, one such forward merges the gaps that
  the prompts would have caused. It is shorter where fewer prompts wait than rows decode.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wire.capacity.fairness import PrefillFairness, WeightedKey

CHUNK_PER_STEP = 1.6
"""Seconds of a chunk per second of a decode step: 1 + 1.6 leaves room below 3 for noise."""
WHOLE_PROMPT_SECONDS = 0.25
"""Seconds up to which a whole prompt is prefilled at once."""
IDLE_CHUNK_SECONDS = 1.0
"""Seconds of a chunk while no row decodes."""
"""Tokens of the smallest chunk: prefill always makes progress, at any cost of a chunk."""
PACKED_FORWARD_SECONDS = 0.6
"""Seconds of a forward over several prompts."""
MIN_CHUNK_TOKENS = 4
"""Tokens of the smallest chunk: prefill makes progress at any cost of a chunk."""

MAX_PADDING_SHARE = 0.15
"""Largest share of padding in a shared forward: about the saving of a shared forward in its worst case."""

NEAR_PAST_TOKENS = 512
"""Mean past of a chunk in tokens: from it on, the time updates `ChunkPace.far`, below it `ChunkPace.each`."""
_NEWEST_WEIGHT = 0.3
"""Weight of the newest measurement in the running mean."""
OUTLIER_FACTOR = 4.0
"""Largest factor by which one measurement may exceed the running mean."""
RECOVERY_SECONDS = 300.0
"""Seconds of rest after which a machine is expected to reach its best speed again."""


def mean(before: float, newest: float) -> float:
    """Return the running mean; `before` is 0 if nothing was measured before."""
    return newest if before == 0 else before + _NEWEST_WEIGHT * (newest - before)


@dataclass(slots=True)
class PrefillSpeed:
    """Tokens per second: running mean and best value.

    A node with a low speed gets no requests and would therefore keep that speed. One cause is a video job during one
    answer. After a rest the best value counts again: the node gets requests and is measured afresh.
    """

    late: float = 0.0
    """Running mean."""
    best: float = 0.0
    """Highest running mean."""

    def learn(self, newest: float) -> None:
        """Record a measurement. Implausible values (a clock jumped, or tokens were counted twice) are limited, because
        the best value is never lowered."""
        self.late = mean(self.late, min(newest, OUTLIER_FACTOR * self.late) if self.late else newest)
        self.best = max(self.best, self.late)

    def after(self, rest: float) -> float:
        """Return the expected speed after `rest` seconds without a measurement."""
        return self.best if rest >= RECOVERY_SECONDS else self.late


@dataclass(slots=True)
class ChunkPace:
    """Duration of a model's chunks, in seconds. The terms separate short prompts from chunks far into a long prompt."""

    fixed: float = 0.0
    """Seconds of any chunk: the weights are read once."""
    each: float = 0.0
    """Seconds per token."""
    far: float = 0.0
    """Seconds per token and per token of the past that it attends to."""

    def seconds(self, tokens: int, past: int) -> float:
        """Return the seconds of a chunk of `tokens` after `past` cached tokens."""
        return self.fixed + tokens * (self.each + self.far * (past + tokens / 2))

    def tokens(self, seconds: float, past: int, most: int) -> int:
        """Return the tokens after `past` cached ones that fit into `seconds`, from `MIN_CHUNK_TOKENS` to `most`."""
        spare, first = max(0.0, seconds - self.fixed), self.each + self.far * past
        root = math.sqrt(first * first + 2 * self.far * spare)
        return max(MIN_CHUNK_TOKENS, min(most, int(2 * spare / max(first + root, 1e-9))))

    def learn(self, tokens: int, back: float, seconds: float) -> None:
        """Record a chunk that took `seconds`; its tokens attended to `back` earlier tokens on average."""
        rest = max(seconds - self.fixed, seconds / 4) / tokens
        if back < NEAR_PAST_TOKENS:
            self.each = mean(self.each, max(rest - self.far * back, rest / 4))
        else:
            self.far = mean(self.far, max(0.0, rest - self.each) / back)


def next_prefill(waiting: Sequence[tuple[int, float, WeightedKey]], turn: int, reading: PrefillFairness) -> int:
    """Choose the next prefill among `(tokens left, time of arrival, API key)`; return its index. `turn` counts the
    choices."""
    if turn % 2:
        return min(range(len(waiting)), key=lambda place: waiting[place][0])
    aged = sorted(range(len(waiting)), key=lambda place: waiting[place][1])
    return aged[reading.next([waiting[place][2] for place in aged])]


def budget(step: float, whole: float) -> float:
    """Return the seconds that a chunk may take while rows decode. `step` is the duration of their step (0: no row
    decodes). `whole` is the time that the rest of the prompt would take."""
    if not step:
        return IDLE_CHUNK_SECONDS
    return WHOLE_PROMPT_SECONDS if whole <= WHOLE_PROMPT_SECONDS else CHUNK_PER_STEP * step


def shared_budget(step: float, waiting: int, decoding: int) -> float:
    """Return the seconds that a forward over several prompts may take while `decoding` rows decode."""
    return (
        max(WHOLE_PROMPT_SECONDS, PACKED_FORWARD_SECONDS * min(1.0, waiting / decoding))
        if step and decoding
        else PACKED_FORWARD_SECONDS
    )


def select_batch(lengths: Sequence[int], most: int) -> list[int]:
    """Choose the prompts to prefill with the first one, itself included, in their order. Padded to the longest, they
    have at most `most` tokens, of which few are padding."""
    chosen, longest, whole = [0], lengths[0], lengths[0]
    for place, length in enumerate(lengths[1:], 1):
        size = max(longest, length) * (len(chosen) + 1)
        if size <= most and size - whole - length <= MAX_PADDING_SHARE * size:
            chosen.append(place)
            longest, whole = max(longest, length), whole + length
    return chosen


def chunk_sizes(tokens: int, floor: int) -> Iterator[int]:
    """Yield the sizes to try for a chunk: as wanted, then the powers of two below, and finally `floor`."""
    yield tokens
    size = 1 << (max(1, tokens - 1).bit_length() - 1)
    while size > floor:
        yield size
        size //= 2
    if floor < tokens:
        yield floor

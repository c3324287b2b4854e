"""Chunk policy of prefill: choose the next prompt and the size of its chunk. Pure.

Prefills alternate between the shortest and the oldest prompt. A huge prompt therefore neither blocks short prompts nor
starves. If an API key has many prompts, the choice by age is also fair between keys
(`wire.capacity.fairness.PrefillFairness`). The durations of earlier chunks determine the size of a chunk (`ChunkPace`).

- Idle: While no row decodes, a chunk may take `IDLE_CHUNK_SECONDS`. It is bounded because a cancel takes effect between
  chunks.
- Decoding: While rows decode, a chunk may take `CHUNK_PER_STEP` times their step. If the estimate is right, the gap
  between two of their tokens stays below three times the undisturbed gap. The next two rules are exceptions.
- Bursts: A prompt whose rest takes at most `FULL_PROMPT_SECONDS` is prefilled at once, which causes one gap for each
  new chat, as in other engines.
- Packing: Several prompts that fit together into `PACKED_FORWARD_SECONDS` are prefilled in one forward
  (`packed_prefill`). Longer forwards save little more, and the first prompt would wait for all. While rows decode, one
  packed forward merges the gaps that the prompts would have caused. The forward is shorter if fewer prompts wait than
  rows decode (`compute_shared_budget`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wire.capacity.fairness import PrefillFairness, WeightedKey

CHUNK_PER_STEP = 1.6
"""Expected seconds of a chunk while rows decode, per second of their decode step (`compute_budget`). The gap between
two tokens is then 2.6 steps, which leaves room for noise below the limit of 3."""
FULL_PROMPT_SECONDS = 0.25
"""Maximum expected seconds of the rest of a prompt that is prefilled at once while rows decode. A forward over several
prompts may take at least as long."""
IDLE_CHUNK_SECONDS = 1.0
"""Maximum expected seconds of a chunk while no row decodes, and of any forward for embeddings."""
PACKED_FORWARD_SECONDS = 0.6
"""Maximum expected seconds of a forward over several prompts."""
MIN_CHUNK_TOKENS = 4
"""Minimum tokens of a chunk that is sized by time, so that a prefill makes progress even if they take longer. The rest
of a prompt may be smaller."""

MAX_CACHED_SHARE = 0.5
"""Cached share of a prompt, 0 to 1, from which the prompt is not packed. It is then prefilled alone, from its first
token that is not cached. Below this share, a packed prefill of the whole prompt costs less. A prompt with such a share
in common with another prompt is not packed with it, and later finds the tokens in the prefix cache."""
MAX_PADDING_SHARE = 0.15
"""Maximum share of padding in a forward over several prompts, 0 to 1. In the worst case, such a forward saves about
this share of the time of separate forwards."""

NEAR_PAST_TOKENS = 512
"""Mean number of earlier tokens to which a token of a chunk attends, from which the duration of the chunk updates
`ChunkPace.far`. Below this number, it updates `ChunkPace.each`."""
_NEWEST_WEIGHT = 0.3
"""Weight of the newest measurement in the running mean."""
OUTLIER_FACTOR = 4.0
"""Maximum factor by which one measurement may exceed the running mean."""
RECOVERY_SECONDS = 300.0
"""Seconds without a measurement after which a machine is expected to reach its best speed again."""


def update_mean(before: float, newest: float) -> float:
    """Return the running mean including the measurement `newest`. `before` is the running mean without it, in the same
    unit; 0 if `newest` is the first measurement."""
    return newest if before == 0 else before + _NEWEST_WEIGHT * (newest - before)


@dataclass(slots=True)
class PrefillSpeed:
    """Speed of prefill or decode of a model in tokens per second: running mean and best value.

    A node with a low measured speed gets no requests, and the measurement would therefore stay low. A video job during
    one answer is enough to cause this. After a pause the best value counts again, so that the node gets requests and is
    measured again.
    """

    late: float = 0.0
    """Running mean; 0 before the first measurement."""
    best: float = 0.0
    """Highest running mean so far."""

    def learn(self, newest: float) -> None:
        """Record the measurement `newest`, in tokens per second. It is capped at `OUTLIER_FACTOR` times the mean,
        because a higher value is implausible, and the best value is never lowered."""
        self.late = update_mean(self.late, min(newest, OUTLIER_FACTOR * self.late) if self.late else newest)
        self.best = max(self.best, self.late)

    def predict_speed(self, rest: float) -> float:
        """Return the expected tokens per second after `rest` seconds without a measurement: the running mean, and from
        `RECOVERY_SECONDS` on the best value. Return 0 before the first measurement."""
        return self.best if rest >= RECOVERY_SECONDS else self.late


@dataclass(slots=True)
class ChunkPace:
    """Fitted duration of a model's chunks. The terms separate short prompts from chunks far into a long prompt."""

    fixed: float = 0.0
    """Seconds of any chunk, for reading the weights once."""
    each: float = 0.0
    """Seconds per token."""
    far: float = 0.0
    """Seconds for each pair of a token of the chunk and an earlier token to which it attends."""

    def estimate_seconds(self, tokens: int, past: int) -> float:
        """Return the expected seconds of a chunk of `tokens` after `past` cached tokens."""
        return self.fixed + tokens * (self.each + self.far * (past + tokens / 2))

    def fit_tokens(self, seconds: float, past: int, most: int) -> int:
        """Return the size in tokens of a chunk after `past` cached tokens that takes at most `seconds`. The size is at
        least `MIN_CHUNK_TOKENS`, even if these take longer, but never above `most`."""
        spare, first = max(0.0, seconds - self.fixed), self.each + self.far * past
        root = math.sqrt(first * first + 2 * self.far * spare)
        return min(most, max(MIN_CHUNK_TOKENS, int(2 * spare / max(first + root, 1e-9))))

    def learn(self, tokens: int, back: float, seconds: float) -> None:
        """Record that a chunk of `tokens` took `seconds`, and update `each` or `far`. `fixed` does not change.

        `back` is the mean number of earlier tokens to which a token of the chunk attended. From `NEAR_PAST_TOKENS` on,
        `far` is updated; below, `each`.
        """
        rest = max(seconds - self.fixed, seconds / 4) / tokens
        if back < NEAR_PAST_TOKENS:
            self.each = update_mean(self.each, max(rest - self.far * back, rest / 4))
        else:
            self.far = update_mean(self.far, max(0.0, rest - self.each) / back)


def next_prefill(waiting: Sequence[tuple[int, float, WeightedKey]], turn: int, reading: PrefillFairness) -> int:
    """Return the index in `waiting` of the next prefill. Each item is (remaining tokens, monotonic time of arrival, API
    key).

    `turn` counts the choices. Every second choice is the shortest prompt. The other choices follow age and the fairness
    between keys (`reading`).
    """
    if turn % 2:
        return min(range(len(waiting)), key=lambda place: waiting[place][0])
    aged = sorted(range(len(waiting)), key=lambda place: waiting[place][1])
    return aged[reading.choose_next([waiting[place][2] for place in aged])]


def compute_budget(step: float, total: float) -> float:
    """Return the seconds that the next chunk of a prompt may take.

    `step` is the duration of a decode step in seconds (0: no row decodes). `total` is the expected seconds of the rest
    of the prompt.
    """
    if not step:
        return IDLE_CHUNK_SECONDS
    return FULL_PROMPT_SECONDS if total <= FULL_PROMPT_SECONDS else CHUNK_PER_STEP * step


def compute_affordable_tokens(pace: ChunkPace, left: int, past: int, step: float, most: int) -> int:
    """Return the number of tokens that fit into the time of the next chunk of a prompt (`compute_budget`), from
    `MIN_CHUNK_TOKENS` to `most`.

    `left` is the number of tokens that are not prefilled yet, and `past` the number of prefilled tokens. `step` is the
    duration of a decode step in seconds (0: no row decodes).
    """
    return pace.fit_tokens(compute_budget(step, pace.estimate_seconds(left, past)), past, most)


def compute_shared_budget(step: float, waiting: int, decoding: int) -> float:
    """Return the seconds that a forward over several of `waiting` prompts may take. `decoding` rows decode in steps of
    `step` seconds (0: none)."""
    return (
        max(FULL_PROMPT_SECONDS, PACKED_FORWARD_SECONDS * min(1.0, waiting / decoding))
        if step and decoding
        else PACKED_FORWARD_SECONDS
    )


def select_batch(lengths: Sequence[int], most: int) -> list[int]:
    """Return the indices of the prompts to prefill in one forward. `lengths` are the lengths of all prompts in tokens.

    Several chosen prompts, padded to the longest of them, have at most `most` tokens in total. At most
    `MAX_PADDING_SHARE` of these are padding. The first prompt is always chosen, even if it is longer than `most`.
    """
    chosen, longest, total = [0], lengths[0], lengths[0]
    for place, length in enumerate(lengths[1:], 1):
        size = max(longest, length) * (len(chosen) + 1)
        if size <= most and size - total - length <= MAX_PADDING_SHARE * size:
            chosen.append(place)
            longest, total = max(longest, length), total + length
    return chosen


def generate_chunk_sizes(tokens: int, floor: int) -> Iterator[int]:
    """Yield the sizes to try for a chunk, in tokens: `tokens`, then the powers of two between `tokens` and `floor`,
    largest first, and finally `floor`. Yield only `tokens` if `floor` is not smaller."""
    yield tokens
    size = 1 << (max(1, tokens - 1).bit_length() - 1)
    while size > floor:
        yield size
        size //= 2
    if floor < tokens:
        yield floor

"""Which prompt is written next, and how much of it: pure, and all there is of scheduling.

Prefills take turns, the shortest, then the oldest: a huge prompt holds nobody back and is never starved. A chunk is
sized by time. While others decode it may take CHUNK_STEPS of their step, so that the gap between two of their tokens
stays below three times the quiet one; alone it may take LONE_CHUNK, so that a cancel is heard soon.
"""

from collections.abc import Sequence

CHUNK_STEPS = 1.6
"""Decode steps that a chunk may take while others decode: 1 + 1.6 leaves room below 3 for noise."""
LONE_CHUNK = 1.0
"""Seconds that a chunk may take when nobody decodes."""
LEAST_CHUNK = 32
"""Tokens below which a chunk costs nearly as much as a longer one: the weights are read once either way."""


def next_prefill(waiting: Sequence[tuple[int, float]], turn: int) -> int:
    """Choose among prefills, each `(tokens left, when it arrived)`; `turn` counts the choices."""
    return min(range(len(waiting)), key=lambda place: waiting[place][turn % 2 == 0])


def chunk_tokens(speed: float, steps: float, most: int) -> int:
    """Size a chunk for a prefill of `speed` tokens per second; `steps` are the seconds that one decode step of all that
    decodes takes (0: nothing does)."""
    budget = CHUNK_STEPS * steps if steps else LONE_CHUNK
    return max(LEAST_CHUNK, min(most, int(speed * budget)))

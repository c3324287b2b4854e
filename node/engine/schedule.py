"""Which prompt is written next, and how much of it: pure, and all there is of scheduling.

Prefills take turns, the shortest, then the oldest: a huge prompt holds nobody back and is never starved. A chunk is
sized by time, from what chunks have cost: a fixed part (the weights are read once) and a part for each token.

- Alone it may take LONE seconds, so that a cancel is heard soon.
- While others decode it may take STEPS of their step, so that the gap between two of their tokens stays below three
  times the quiet one.
- A prompt that takes BURST seconds in all is written at once: one gap for each new chat, as everywhere.
"""

from collections.abc import Iterator, Sequence

STEPS = 1.6
"""1 + 1.6 leaves room below 3 for noise."""
BURST = 0.25
LONE = 1.0
LEAST = 4
"""Tokens of the smallest chunk: what is written moves on, whatever it costs."""


def next_prefill(waiting: Sequence[tuple[int, float]], turn: int) -> int:
    """Choose among prefills, each `(tokens left, when it arrived)`; `turn` counts the choices."""
    return min(range(len(waiting)), key=lambda place: waiting[place][turn % 2 == 0])


def budget(step: float, whole: float) -> float:
    """Give the seconds that a chunk may take beside rows whose step takes `step` seconds (0: nobody decodes); `whole`
    are the seconds that all the rest of its prompt would take."""
    if not step:
        return LONE
    return BURST if whole <= BURST else STEPS * step


def chunk_tokens(seconds: float, fixed: float, each: float, most: int) -> int:
    """Give the tokens that fit into `seconds`, where a chunk costs `fixed` and `each` token more."""
    return max(LEAST, min(most, int((seconds - fixed) / max(each, 1e-9))))


def shrunk(tokens: int, floor: int) -> Iterator[int]:
    """Give the sizes to try for a chunk that does not fit: as wanted, then the powers of two below, `floor` at last."""
    yield tokens
    size = 1 << (max(1, tokens - 1).bit_length() - 1)
    while size > floor:
        yield size
        size //= 2
    if floor < tokens:
        yield floor

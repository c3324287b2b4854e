"""Which prompt is written next, and how much of it: pure, and all there is of scheduling.

Prefills take turns, the shortest, then the oldest: a huge prompt holds nobody back and is never starved. Where an owner
has many, the second turn goes by owners (`wire.capacity.fairness.Reading`). The size of a chunk follows from the time
of earlier chunks (`Pace`).

- Alone it may take LONE seconds, so that a cancel is heard soon.
- While others decode it may take STEPS of their step, so that the gap between two of their tokens stays below three
  times the quiet one.
- A prompt that takes BURST seconds in all is written at once: one gap for each new chat, as everywhere.
- Several such prompts are read in one forward (`together`), of SHARED seconds at most: longer ones save little more,
  and the first of them would wait for all. Beside rows that decode the gaps that each of them would have caused are put
  together so, too; into shorter ones where fewer wait than decode.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wire.capacity.fairness import Owner, Reading

STEPS = 1.6
"""1 + 1.6 leaves room below 3 for noise."""
BURST = 0.25
LONE = 1.0
SHARED = 0.6
LEAST = 4
"""Tokens of the smallest chunk: what is written moves on, whatever it costs."""

PADDING = 0.15
"""Most of a shared forward that may be padding: about what reading together saves where it saves least."""

NEAR = 512
"""Tokens looked back at, from which what a chunk takes tells of looking back, and below which of its own tokens."""
_MEMORY = 0.3
"""Weight of the newest measurement in the running mean."""
LEAP = 4.0
"""By how much one measurement may be faster than those before it."""
RECOVERS = 300.0
"""Seconds of rest after which a machine is expected to be as fast as it ever was."""


def mean(before: float, newest: float) -> float:
    """Give the running mean; 0: nothing was measured before."""
    return newest if before == 0 else before + _MEMORY * (newest - before)


@dataclass(slots=True)
class Speed:
    """Tokens per second, as of late and at their best.

    Who is known as slow is asked nothing, and so would be known as slow for ever, because its owner once cut a film
    beside an answer. After a rest the best counts again: then it is asked, and measured anew."""

    late: float = 0.0
    best: float = 0.0

    def learn(self, newest: float) -> None:
        """Hear of a measurement. One that is beyond belief, because a clock jumped or something was counted twice, must
        not be told as the best for ever."""
        self.late = mean(self.late, min(newest, LEAP * self.late) if self.late else newest)
        self.best = max(self.best, self.late)

    def after(self, rest: float) -> float:
        """Give what to expect after so many seconds without a measurement."""
        return self.best if rest >= RECOVERS else self.late


@dataclass(slots=True)
class Pace:
    """What the chunks of a model take, in seconds: `fixed` for each (the weights are read once), `each` for a token,
    and `far` for a token and each other one that it looks back at. So a chunk far into a long prompt is not sized as
    one at its beginning, nor the next short prompt as one far into a long one."""

    fixed: float = 0.0
    each: float = 0.0
    far: float = 0.0

    def seconds(self, tokens: int, past: int) -> float:
        """Give what a chunk behind `past` written tokens takes."""
        return self.fixed + tokens * (self.each + self.far * (past + tokens / 2))

    def tokens(self, seconds: float, past: int, most: int) -> int:
        """Give the tokens behind `past` written ones that fit into `seconds`, from LEAST to `most`."""
        spare, first = max(0.0, seconds - self.fixed), self.each + self.far * past
        root = math.sqrt(first * first + 2 * self.far * spare)
        return max(LEAST, min(most, int(2 * spare / max(first + root, 1e-9))))

    def learn(self, tokens: int, back: float, seconds: float) -> None:
        """Hear what a chunk took whose tokens looked back at `back` others on the average."""
        rest = max(seconds - self.fixed, seconds / 4) / tokens
        if back < NEAR:
            self.each = mean(self.each, max(rest - self.far * back, rest / 4))
        else:
            self.far = mean(self.far, max(0.0, rest - self.each) / back)


def next_prefill(waiting: Sequence[tuple[int, float, Owner]], turn: int, reading: Reading) -> int:
    """Choose among prefills, each `(tokens left, when it arrived, whose it is)`; `turn` counts the choices."""
    if turn % 2:
        return min(range(len(waiting)), key=lambda place: waiting[place][0])
    aged = sorted(range(len(waiting)), key=lambda place: waiting[place][1])
    return aged[reading.next([waiting[place][2] for place in aged])]


def budget(step: float, whole: float) -> float:
    """Give the seconds that a chunk may take beside rows whose step takes `step` seconds (0: nobody decodes); `whole`
    are the seconds that all the rest of its prompt would take."""
    if not step:
        return LONE
    return BURST if whole <= BURST else STEPS * step


def shared_budget(step: float, waiting: int, decoding: int) -> float:
    """Give the seconds that a forward over several prompts may take beside `decoding` rows."""
    return max(BURST, SHARED * min(1.0, waiting / decoding)) if step and decoding else SHARED


def company(lengths: Sequence[int], most: int) -> list[int]:
    """Choose which prompts are read with the first of them, itself included: in their order, as long as all of them,
    padded to the longest, have `most` tokens and few of these are padding."""
    chosen, longest, whole = [0], lengths[0], lengths[0]
    for place, length in enumerate(lengths[1:], 1):
        size = max(longest, length) * (len(chosen) + 1)
        if size <= most and size - whole - length <= PADDING * size:
            chosen.append(place)
            longest, whole = max(longest, length), whole + length
    return chosen


def shrunk(tokens: int, floor: int) -> Iterator[int]:
    """Give the sizes to try for a chunk that does not fit: as wanted, then the powers of two below, `floor` at last."""
    yield tokens
    size = 1 << (max(1, tokens - 1).bit_length() - 1)
    while size > floor:
        yield size
        size //= 2
    if floor < tokens:
        yield floor

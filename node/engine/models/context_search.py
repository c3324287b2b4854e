"""The longest row that a fit promises, held against a reading: 5 % less until it passes, then the knobs by name.

A promise is arithmetic over a fit; a reading sees what no fit does (the process's own growth, a system that is short of
memory). So the promise is tried, with the largest forward that was measured, and made smaller where it does not hold.
Pure; what a pass is, is the caller's.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass

SHRINK, ATTEMPTS = 0.95, 4
KNOBS = (
    "lower engine.mlx.chunk, engine.mlx.chunk_floor, engine.mlx.batch or engine.mlx.context, raise memory.cap, set a "
    "smaller memory.margin, or take a variant of the model with a smaller quantization"
)


@dataclass(frozen=True, slots=True)
class Settled:
    """The tokens of the last attempt, of how many wanted, after how many attempts, and whether it passed."""

    tokens: int
    wanted: int
    attempts: int
    ok: bool

    @property
    def share(self) -> float:
        """How much of what was wanted passed."""
        return min(1.0, self.tokens / self.wanted) if self.tokens > 0 else 1.0


def settle(tokens: int, passes: Callable[[int], bool], *, search: bool) -> Generator[None, None, Settled]:
    """Take 5 % less until it passes, in four attempts at most, one at a step; without `search` there is one."""
    wanted, attempts = tokens, ATTEMPTS if search else 1
    for attempt in range(1, attempts + 1):
        if tokens > 0 and passes(tokens):
            return Settled(tokens, wanted, attempt, True)
        yield
        if attempt < attempts:
            tokens = int(tokens * SHRINK)
    return Settled(tokens, wanted, attempts, False)


def diagnosis(model: str, settled: Settled) -> str:
    """Say what can be done when no attempt passed."""
    attempts = "1 attempt" if settled.attempts == 1 else f"{settled.attempts} attempts"
    return f"the profile of {model} failed after {attempts}, the last with a row of {settled.tokens} tokens: {KNOBS}"

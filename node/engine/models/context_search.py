"""Search for the longest row that passes a memory check, with fewer tokens at each attempt. Pure.

A failed search has a diagnosis, which names the settings to change. The first length follows from the fitted memory
costs of the model. A memory reading also includes costs that no fit covers, such as growth of the process or other
programs. The caller therefore provides a check against a reading. A length from the settings is tried only once, not
reduced.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass

SHRINK, ATTEMPTS = 0.95, 4
"""Factor from the tokens of an attempt to those of the next, and maximum number of attempts."""
KNOBS = (
    "lower engine.mlx.prefill_step_size, engine.mlx.min_prefill_step, engine.mlx.max_batch_size or "
    "engine.mlx.max_context, raise memory.cap, set a smaller memory.margin, or take a variant of the model with a "
    "smaller quantization"
)
"""Advice at the end of a failed profile's diagnosis: the settings to change so that a longer row passes the memory
check."""


@dataclass(frozen=True, slots=True)
class ContextSearchResult:
    """Result of the search for the longest row of a model."""

    tokens: int
    """Tokens of the last attempt."""
    wanted: int
    """Tokens of the first attempt."""
    attempts: int
    """Number of attempts."""
    ok: bool
    """Whether the last attempt passed."""

    @property
    def share(self) -> float:
        """Tokens of the last attempt as a share of the first, 0 to 1; 1.0 if there were no tokens to try."""
        return min(1.0, self.tokens / self.wanted) if self.tokens > 0 else 1.0


def search_context(
    tokens: int, passes: Callable[[int], bool], *, search: bool
) -> Generator[None, None, ContextSearchResult]:
    """Try a row of `tokens` tokens, then of 5 % fewer at each attempt, until `passes(tokens)` is true. Return the
    result.

    There are at most four attempts; without `search`, only one. The generator yields after each failed attempt.
    """
    wanted, attempts = tokens, ATTEMPTS if search else 1
    for attempt in range(1, attempts + 1):
        if tokens > 0 and passes(tokens):
            return ContextSearchResult(tokens, wanted, attempt, True)
        yield
        if attempt < attempts:
            tokens = int(tokens * SHRINK)
    return ContextSearchResult(tokens, wanted, attempts, False)


def describe_failed_search(model: str, result: ContextSearchResult) -> str:
    """Return the diagnosis after a search in which no attempt passed, with the settings to change."""
    attempts = "1 attempt" if result.attempts == 1 else f"{result.attempts} attempts"
    return f"the profile of {model} failed after {attempts}, the last with a row of {result.tokens} tokens: {KNOBS}"

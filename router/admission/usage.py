"""Count requests and tokens by API key and model. The coordinator moves the counts to the database."""

from collections.abc import Mapping

import msgspec


class UsageTotals(msgspec.Struct, gc=False):
    """Requests and tokens of one API key with one model."""

    requests: int = 0
    failed: int = 0
    """Requests of `requests` that ended without a complete answer: refused, failed or cancelled."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of `prompt_tokens` that came from the prefix cache."""
    completion_tokens: int = 0

    def add(self, other: "UsageTotals") -> None:
        """Add the totals of `other`."""
        self.requests += other.requests
        self.failed += other.failed
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens

    def count(self, prompt: int, cached: int, completion: int, *, failed: bool) -> None:
        """Add one ended request with its prompt tokens, cached tokens and generated tokens (`completion`).

        `failed` is whether the request ended without a complete answer.
        """
        self.requests += 1
        self.failed += failed
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.completion_tokens += completion


class UsageCounter:
    """Usage since the last `drain`, by API key and model."""

    def __init__(self) -> None:
        self._used: dict[tuple[str, str], UsageTotals] = {}

    def get_totals(self, key: str, model: str) -> UsageTotals:
        """Return the mutable totals of a key and model, to which the caller adds; new totals of 0 for a new pair."""
        totals = self._used.get((key, model))
        if totals is None:
            totals = self._used[key, model] = UsageTotals()
        return totals

    def drain(self) -> Mapping[tuple[str, str], UsageTotals]:
        """Return all totals by pair of key and model, and start from 0 again."""
        used, self._used = self._used, {}
        return used

"""Who used how much: tokens and requests by key and model, counted as requests end, drained into the database."""

from collections.abc import Mapping

import msgspec


class Used(msgspec.Struct, gc=False):
    """Totals. `cached_tokens` are those of `prompt_tokens` that were not read anew."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: "Used") -> None:
        """Add another's totals to these."""
        self.requests += other.requests
        self.failed += other.failed
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens


class Usage:
    """What was used since the last `drain`, by (key, model)."""

    def __init__(self) -> None:
        self._used: dict[tuple[str, str], Used] = {}

    def of(self, key: str, model: str) -> Used:
        """Give the totals to count in."""
        found = self._used.get((key, model))
        if found is None:
            found = self._used[key, model] = Used()
        return found

    def drain(self) -> Mapping[tuple[str, str], Used]:
        """Give all that was counted, and begin anew."""
        used, self._used = self._used, {}
        return used

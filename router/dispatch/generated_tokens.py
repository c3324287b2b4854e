"""Token ids that a request has received, by choice. With them, another node can resume the answer."""

from router.placement.recovery import MAX_KNOWN_TOKENS
from wire.frames import Delta


class GeneratedTokens:
    """Received token ids of each of `choices` choices.

    `limit` is the requested maximum length of a choice in tokens; None, and more than `MAX_KNOWN_TOKENS`, count as
    `MAX_KNOWN_TOKENS`.
    """

    __slots__ = ("_choices", "_discarded", "_limit", "ids")

    def __init__(self, choices: int, limit: int | None) -> None:
        self._choices = choices if choices > 1 else 1
        self._limit = min(limit or MAX_KNOWN_TOKENS, MAX_KNOWN_TOKENS)
        self.ids: list[list[int]] = [[]] if choices <= 1 else [[] for _ in range(choices)]
        """Token ids by choice; empty after they were discarded."""
        self._discarded = 0

    @property
    def longest(self) -> int:
        """Number of received tokens in the longest choice; 0 after the ids were discarded."""
        return max(map(len, self.ids), default=0)

    @property
    def total(self) -> int:
        """Number of received tokens of all choices together, including discarded ids."""
        return self._discarded + sum(map(len, self.ids))

    @property
    def unbegun(self) -> bool:
        """Whether no token was received. False after the ids were discarded."""
        return bool(self.ids) and not self.longest

    def get_ids(self) -> tuple[tuple[int, ...], ...]:
        """Return the received token ids of each choice; empty before the first token, or if they were discarded."""
        return tuple(map(tuple, self.ids)) if self.longest else ()

    def discard_ids(self, delta: Delta | None = None) -> None:
        """Discard the stored ids and those of `delta`, and keep only their number.

        The answer can then no longer be resumed. None discards only the stored ids.
        """
        self._discarded = self.total + (0 if delta is None else len(delta.ids))
        self.ids = []

    def count_foreign(self, tokens: int) -> None:
        """Add the number of tokens that an upstream generated, whose ids are unknown."""
        self._discarded += tokens

    def discard_excess(self) -> None:
        """Discard the ids if a choice has more tokens than `limit` or `MAX_KNOWN_TOKENS`.

        More tokens than the limit are not credible. More than `MAX_KNOWN_TOKENS` are too many to store.
        """
        if self.longest > self._limit:
            self.discard_ids()

    def restart(self) -> None:
        """Discard the ids and their number, before the answer starts again from its beginning."""
        self._discarded = 0
        self.ids = [[] for _ in range(self._choices)]

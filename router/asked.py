"""What each key asks for, summed up as requests come and go: who asks for far more than its part of the work."""

from wire.fairness import Owner

HOG = 2
"""So many times its part of the work must a key ask for to wait in line before nodes are full of its requests, and to
be refused there while others have something open. Of two keys of one priority none ever does: one household, one long
prompt. One of low priority does beside one of normal from two fifths of the work."""


class Asked:
    """The work of all requests that are here, in tokens by key. A key's part of it is by its weight beside others."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._weights: dict[str, int] = {}
        self._whole = self._parts = 0

    def add(self, owner: Owner, tokens: int) -> None:
        """A request came."""
        name, weight = owner.name, owner.weight
        self._tokens[name] = self._tokens.get(name, 0) + tokens
        self._whole += tokens
        self._parts += weight - self._weights.get(name, 0)
        self._weights[name] = weight

    def drop(self, name: str, tokens: int) -> None:
        """It is gone: with as many as it came with."""
        self._whole -= tokens
        self._tokens[name] -= tokens
        if not self._tokens[name]:
            del self._tokens[name]
            self._parts -= self._weights.pop(name)

    def much(self, name: str) -> bool:
        """Whether a key asks for far more than its part."""
        return self._tokens.get(name, 0) * self._parts > HOG * self._whole * self._weights.get(name, 1)

"""What each key asks for, summed up as requests come and go: who asks for far more than its part of the work."""

from wire.capacity.fairness import Owner

HOG = 2
"""So many times its part of the work must a key ask for to wait in line before nodes are full of its requests, and to
be refused there while others have something open. Of two keys of one priority none ever does: one household, one long
prompt. One of low priority does beside one of normal from two fifths of the work."""

_NOTHING = 0, 0


class Asked:
    """The work of all requests that are here, in tokens by key. A key's part of it is by its weight beside others."""

    def __init__(self) -> None:
        self._tokens: dict[str, tuple[int, int]] = {}
        """By key, with its weight."""
        self._whole = self._parts = 0

    def add(self, owner: Owner, tokens: int) -> None:
        """A request came."""
        name, weight = owner.name, owner.weight
        here, before = self._tokens.get(name, _NOTHING)
        self._tokens[name] = here + tokens, weight
        self._whole += tokens
        self._parts += weight - before

    def drop(self, owner: Owner, tokens: int) -> None:
        """It is gone: with as many as it came with."""
        here, weight = self._tokens[owner.name]
        self._whole -= tokens
        if here > tokens:
            self._tokens[owner.name] = here - tokens, weight
        else:
            del self._tokens[owner.name]
            self._parts -= weight

    def much(self, name: str) -> bool:
        """Whether a key asks for far more than its part."""
        here, weight = self._tokens.get(name, _NOTHING)
        return here * self._parts > HOG * self._whole * weight

"""What each key asks for, summed up as requests come and go: who asks for far more than an equal part of the work."""

HOG = 2
"""So many times its equal part of the work must a key ask for to wait in line before nodes are full of its requests,
and to be refused there while others have something open. One of two keys never does: one household, one long prompt."""


class Asked:
    """The work of all requests that are here, in tokens by key."""

    def __init__(self) -> None:
        self._keys: dict[str, int] = {}
        self._whole = 0

    def add(self, key: str, tokens: int) -> None:
        """A request came."""
        self._keys[key] = self._keys.get(key, 0) + tokens
        self._whole += tokens

    def drop(self, key: str, tokens: int) -> None:
        """It is gone: with as many as it came with."""
        left = self._keys.pop(key, 0) - tokens
        if left:
            self._keys[key] = left
        self._whole -= tokens

    def much(self, key: str) -> bool:
        """Whether a key asks for far more than its part."""
        return self._keys.get(key, 0) * len(self._keys) > HOG * self._whole

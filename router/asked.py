"""What each key asks for, summed up as requests come and go: who asks for far more than an equal part of the work."""

HOG = 2
"""So many times its equal part of the work must a key ask for to be refused while others wait, and for the line to
decide who goes to a busy node."""


class Asked:
    """The prompts of all requests that are here, in bytes by key."""

    def __init__(self) -> None:
        self._keys: dict[str, int] = {}
        self._whole = 0

    def add(self, key: str, prompt_bytes: int) -> None:
        """A request came."""
        self._keys[key] = self._keys.get(key, 0) + prompt_bytes
        self._whole += prompt_bytes

    def drop(self, key: str, prompt_bytes: int) -> None:
        """It is gone: with the same bytes as it came."""
        left = self._keys.pop(key, 0) - prompt_bytes
        if left:
            self._keys[key] = left
        self._whole -= prompt_bytes

    def much(self, key: str) -> bool:
        """Whether a key asks for far more than its part."""
        return self._keys.get(key, 0) * len(self._keys) > HOG * self._whole

    def unequal(self) -> bool:
        """Whether some key does."""
        return max(self._keys.values(), default=0) * len(self._keys) > HOG * self._whole

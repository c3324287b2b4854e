"""Sum the expected tokens of the open requests of each API key, to find greedy keys.

A key is greedy if its open requests have more than `FAIR_SHARE_FACTOR` times its share of the tokens of all keys. The
weight of the key divided by the sum of all weights is its share.
"""

from wire.capacity.fairness import WeightedKey

FAIR_SHARE_FACTOR = 2
"""Multiple of its share of all requested tokens above which a key is greedy.

A request of a greedy key is queued even if a node has room, if many prompt tokens wait on that node. At its deadline,
the request is refused if it would use the last half of the node's memory (`CrowdRules`). Both rules apply only while
other keys have open requests. Of two keys with equal priority, neither can be greedy, because each has a share of one
half. A low-priority key next to a normal one is greedy above two fifths of all tokens.
"""

_NOTHING = 0, 0


class KeyLoad:
    """Counter of the tokens of all open requests by API key, to find keys far above their weighted share."""

    def __init__(self) -> None:
        self._tokens: dict[str, tuple[int, int]] = {}
        """Tokens and weight by key."""
        self._total = self._parts = 0

    def add(self, key: WeightedKey, tokens: int) -> None:
        """Add the expected tokens of a new request of a key. `key.weight` becomes the weight of the key."""
        name, weight = key.name, key.weight
        here, before = self._tokens.get(name, _NOTHING)
        self._tokens[name] = here + tokens, weight
        self._total += tokens
        self._parts += weight - before

    def drop(self, key: WeightedKey, tokens: int) -> None:
        """Remove an ended request of a key. `tokens` is the number that was passed to `add` for the request.

        Raise `KeyError` for a key without open requests.
        """
        here, weight = self._tokens[key.name]
        self._total -= tokens
        if here > tokens:
            self._tokens[key.name] = here - tokens, weight
        else:
            del self._tokens[key.name]
            self._parts -= weight

    def exceeds_share(self, name: str) -> bool:
        """Return whether the open requests of a key exceed `FAIR_SHARE_FACTOR` times its share of all tokens.

        Return False for a key without open requests.
        """
        here, weight = self._tokens.get(name, _NOTHING)
        return here * self._parts > FAIR_SHARE_FACTOR * self._total * weight

"""What is kept of ended rows: whole sequences with their caches, by model, least recently used first to go. Pure.

    kept:   ids of prompt and answer  →  the row's cache, of exactly these ids
    asked:  a prompt  →  the longest beginning of it that some kept sequence shares

Of caches that can be cut (keys and values of every token) any shared beginning serves. States of hybrids and windows
that have turned cannot be cut: there only a kept sequence that is *wholly* a beginning of the prompt serves.

At least one token of a prompt is always left to compute: its logits are kept nowhere.

Every sequence belongs to a scope, the name of an API key: a prompt finds those of its own scope alone, so that neither
a count nor a time shows what another key has asked.

The caches themselves are opaque here (`value`), their bytes are what the caller counted. Whoever keeps an `Entry` asks
`alive` before using it: one that was given back holds nothing any more, so that nobody keeps its memory by accident.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, Protocol, TypeVar

from node.engine.kv.radix_trie import WIDTH, Trie
from wire.report import CacheState

BLOCK = 256
"""Tokens of a block of the hash."""
LEAST = 16
"""Tokens below which a beginning is neither kept nor used: templates alone share as much."""
TOLD = 64
"""Evictions of which the hash is told."""

V = TypeVar("V")


def hash_of(fingerprint: str, key: bytes) -> bytes:
    """Give 16 bytes that name a prompt (packed ids) of a model: blake2b, chained over blocks of 256 tokens.

    h₀ = blake2b(fingerprint), hₙ = blake2b(hₙ₋₁ ‖ block n), the last block as long as it is. So two prompts have the
    same hash after each block that they share, and who has only whole blocks finds them by the same chain.
    """
    chained = blake2b(fingerprint.encode(), digest_size=16).digest()
    for start in range(0, len(key), BLOCK * WIDTH):
        chained = blake2b(chained + key[start : start + BLOCK * WIDTH], digest_size=16).digest()
    return chained


@dataclass(slots=True, eq=False)
class Entry(Generic[V]):
    """A kept sequence: packed ids, its cache (None once given back), its bytes, the hash of its prompt, and its scope.
    A `snapshot` was taken within a prompt, for many to begin with."""

    model: str
    key: bytes
    value: V | None
    nbytes: int
    prompt_hash: bytes = b""
    snapshot: bool = False
    scope: str = ""

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.key) // WIDTH

    @property
    def alive(self) -> bool:
        """Whether it is still kept."""
        return self.value is not None


@dataclass(frozen=True, slots=True)
class Found(Generic[V]):
    """The first `length` tokens of a prompt are those of `entry` (None: nothing serves). `shared`: with how many tokens
    of it any kept sequence begins, whether it serves or not."""

    entry: Entry[V] | None = None
    length: int = 0
    shared: int = 0


class PrefixStore(Protocol[V]):
    """What a place for sequences must give: this one in RAM, others later."""

    def find(self, model: str, key: bytes, *, cut: bool, scope: str = "") -> Found[V]:
        """Find the longest beginning of a prompt in a scope; `cut`: whether the model's caches can be cut."""
        ...

    def store(self, entry: Entry[V]) -> None:
        """Keep a sequence."""
        ...

    def evict(self, size: int) -> int:
        """Give back at least `size` bytes if there are so many; say how many it were."""
        ...


class PrefixCache(Generic[V]):
    """All kept sequences of all models. Bytes are those that were said at `store`."""

    def __init__(self) -> None:
        self._tries: dict[tuple[str, str], Trie[Entry[V]]] = {}
        """By model and scope."""
        self._order: dict[Entry[V], None] = {}
        self._nbytes = self._hits = self._hit_tokens = self._stores = self._evictions = 0
        self._evicted: deque[bytes] = deque(maxlen=TOLD)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return self._nbytes

    def __len__(self) -> int:
        return len(self._order)

    @property
    def entries(self) -> tuple[Entry[V], ...]:
        """Kept entries, least recently used first."""
        return tuple(self._order)

    @property
    def scopes(self) -> frozenset[tuple[str, str]]:
        """Pairs of model and scope with kept entries."""
        return frozenset(self._tries)

    def find(self, model: str, key: bytes, *, cut: bool, scope: str = "") -> Found[V]:
        """See PrefixStore. What is found was used just now."""
        trie = self._tries.get((model, scope))
        if trie is None:
            return Found()
        most = len(key) // WIDTH - 1
        match = trie.match(key, most)
        length = min(match.shared, most)
        entry = match.whole
        if cut and (entry is None or entry.length < length):
            entry = match.below
        elif entry is not None:
            length = entry.length
        if entry is None or length < LEAST:
            return Found(shared=match.shared)
        self._order[entry] = self._order.pop(entry)
        return Found(entry, length, match.shared)

    def hit(self, tokens: int) -> None:
        """Count a beginning that was used."""
        self._hits += 1
        self._hit_tokens += tokens

    def covers(self, model: str, key: bytes, *, cut: bool, scope: str = "") -> bool:
        """Return whether a kept sequence of the scope already serves every prompt that this one would serve."""
        trie = self._tries.get((model, scope))
        if trie is None:
            return False
        size = len(key) // WIDTH
        match = trie.match(key, size)
        return match.shared == size and (cut or (match.whole is not None and match.whole.length == size))

    def replaced(self, model: str, key: bytes, scope: str = "") -> list[Entry[V]]:
        """List what a sequence makes needless, where caches can be cut: its own beginnings."""
        trie = self._tries.get((model, scope))
        return [] if trie is None else trie.beginnings(key)

    def store(self, entry: Entry[V]) -> None:
        """Keep a sequence, in the place of one with the same ids."""
        trie = self._tries.setdefault((entry.model, entry.scope), Trie())
        same = trie.match(entry.key, entry.length).whole
        if same is not None and same.key == entry.key:
            self.take(same)
            trie = self._tries.setdefault((entry.model, entry.scope), Trie())
        trie.put(entry.key, entry)
        self._order[entry] = None
        self._nbytes += entry.nbytes
        self._stores += 1

    def take(self, entry: Entry[V]) -> V:
        """Take a sequence out; its cache belongs to the caller now."""
        value = entry.value
        assert value is not None  # noqa: S101  who takes has looked that it is alive
        entry.value = None
        del self._order[entry]
        place = entry.model, entry.scope
        self._tries[place].remove(entry.key)
        if self._tries[place].empty:
            del self._tries[place]
        self._nbytes -= entry.nbytes
        return value

    def evict(self, size: int) -> int:
        """Give back the least recently used until `size` bytes are free, or nothing is left; say how many it were."""
        before = self._nbytes
        while self._order and before - self._nbytes < size:
            self._evict(next(iter(self._order)))
        return before - self._nbytes

    def drop(self, model: str) -> None:
        """Give back all of a model."""
        for entry in [entry for entry in self._order if entry.model == model]:
            self._evict(entry)

    def discard(self, entries: Iterable[Entry[V]]) -> None:
        """Give back what something better takes the place of: no eviction, since nobody loses by it."""
        for entry in entries:
            if entry.alive:
                self.take(entry)

    def _evict(self, entry: Entry[V]) -> None:
        self._evictions += 1
        self._evicted.append(entry.prompt_hash)
        self.take(entry)

    def state(self) -> CacheState:
        """Say what is kept, and what it was good for."""
        return CacheState(
            self._nbytes, len(self._order), self._hits, self._hit_tokens, self._stores, self._evictions,
            tuple(self._evicted),
        )  # fmt: skip

"""Prefix cache: token sequences with their caches, per model and scope, evicted least recently used first. Pure.

    stored:    ids of prompt and answer  →  the row's cache, of exactly these ids
    looked up: a prompt  →  its longest prefix that some stored sequence shares

If caches can be cut (keys and values of every token), any shared prefix is usable. Sliding windows can be cut to the
lengths for which their history is stored (`window_history`, `CachedPrefix.cuts`). States of hybrids cannot be cut: only
a stored sequence that is *wholly* a prefix of the prompt is usable.

At least one token of a prompt is always computed, because no logits are stored.

Every sequence belongs to a scope: the name of an API key, or the scope of all keys. That scope has the shared system
prompts, and with `cache.share = "pool"` all sequences. A lookup finds only sequences of one scope. With `"key"`,
neither a count nor a time therefore reveals the requests of another key, except for shared system prompts.

The caches are opaque here (`value`); the caller counts their bytes. Code that keeps a `CachedPrefix` must check
`is_stored` before each use. A removed entry has no value, so that a remaining reference keeps no memory.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, Protocol, TypeVar

from node.engine.kv.radix_trie import ID_BYTES, RadixTrie
from wire.report import CacheState, ModelCache

BLOCK_TOKENS = 256
"""Tokens of a block, the unit of the hash of a prompt and of the files of the disk cache."""
MIN_PREFIX_TOKENS = 16
"""Minimum tokens of a prefix that is stored or used, because chat templates alone share this many."""
MAX_EVICTIONS_REPORTED = 64
"""Maximum number of evictions whose prompt hashes are reported, and of disk copies that are recorded for one file."""


@dataclass(slots=True, eq=False)
class DiskCopy:
    """Copy of a stored sequence on the disk. The eviction of the sequence is reported when neither memory nor disk has
    it any longer."""

    prompt_hash: bytes
    """Hash of the prompt, as in `CachedPrefix`."""
    in_memory: bool = True
    on_disk: bool = True

    def leave_memory(self) -> None:
        """Record that the sequence was evicted from memory."""
        self.in_memory = False

    def leave_disk(self) -> None:
        """Record that the copy was deleted."""
        self.on_disk = False


MAX_ARRAYS = 200_000
"""Maximum arrays of all entries. MLX refuses more than 499,000 buffers in a process, of any size (mlx#1718).
Thousands of short prompts of a small model reach that limit on a Mac with much memory."""

V = TypeVar("V")
Cuts = tuple[tuple[int, int], ...]
"""Ranges of lengths in tokens, both ends included."""


def hash_prompt(fingerprint: str, key: bytes) -> bytes:
    """Return 16 bytes that identify a prompt: blake2b, chained over blocks of 256 tokens. `fingerprint` names the model
    and the scope of the prompt, `key` has the packed ids.

    The chain starts with h₀ = blake2b(fingerprint). It continues with hₙ = blake2b(hₙ₋₁ ‖ block n). The last block may
    be shorter. Two prompts have the same hash after a block if they are equal up to its end. The disk cache chains its
    blocks in the same way, from another first hash (`block_chain.compute_root`).
    """
    chained = blake2b(fingerprint.encode(), digest_size=16).digest()
    for start in range(0, len(key), BLOCK_TOKENS * ID_BYTES):
        chained = blake2b(chained + key[start : start + BLOCK_TOKENS * ID_BYTES], digest_size=16).digest()
    return chained


@dataclass(slots=True, eq=False)
class CachedPrefix(Generic[V]):
    """Stored token sequence with the cache of exactly these tokens."""

    model: str
    """Name of the model."""
    key: bytes
    """Packed ids (`radix_trie.pack`)."""
    value: V | None
    """Cache of the sequence; None once the entry is removed, and for an entry made only for the disk cache."""
    nbytes: int
    """Bytes of the cache, as counted by the caller."""
    prompt_hash: bytes = b""
    """Hash of the whole prompt of the row (`hash_prompt`), also for a snapshot within the prompt. Empty for a shared
    system prompt and for a shared beginning of texts. Reports name the hash after the eviction of its last entry."""
    snapshot: bool = False
    """Whether the cache was copied within a prefill (`rules.snapshots`) or is that of a shared system prompt. A prefill
    that uses all of such an entry copies the cache, and leaves the entry in the prefix cache."""
    scope: str = ""
    """Name of the API key, or the scope of all keys."""
    cuts: Cuts | None = None
    """Lengths in tokens to which the cache can be cut, besides its full length; None: the mode of the model's caches
    (`CacheTrimMode`) decides."""
    copy: DiskCopy | None = None
    """Copy of the entry on the disk; None if the disk cache has not copied all of the entry for its writer."""
    arrays: int = 0
    """Number of arrays of the cache, as counted by the caller."""

    @property
    def length(self) -> int:
        """Number of tokens of the sequence."""
        return len(self.key) // ID_BYTES

    @property
    def is_stored(self) -> bool:
        """Whether the entry is in memory: False once it is removed. Also False for an entry that never had a cache,
        because it only lets the disk cache write the prompt of a decoding row (`DiskTier.offer_row`)."""
        return self.value is not None

    def find_cut(self, length: int) -> int:
        """Return the greatest length in tokens, at most `length`, to which the cache can be cut; 0 if there is none.
        May only be called for models whose caches can be cut."""
        if self.cuts is None or length == self.length:
            return min(length, self.length)
        return max((min(length, last) for first, last in self.cuts if first <= length), default=0)

    def covers_cuts(self, other: "CachedPrefix[V]") -> bool:
        """Return whether this cache can be cut to the length of its prefix `other` and to all lengths in `other.cuts`.

        A cache with `cuts` None can be cut to every length. May only be called for models whose caches can be cut.
        """
        if self.cuts is None:
            return True
        wanted = (*(other.cuts or ()), (other.length, other.length))
        return all(any(a <= first and last <= b for a, b in self.cuts) for first, last in wanted)

    def set_copy(self, copy: DiskCopy | None) -> None:
        """Set the copy of the entry on the disk; None if it has none."""
        self.copy = copy

    def clear(self) -> None:
        """Release the cache, because the entry is removed."""
        self.value = None


@dataclass(frozen=True, slots=True)
class PrefixHit(Generic[V]):
    """Result of the lookup of a prompt."""

    entry: CachedPrefix[V] | None = None
    """Entry that starts with the first `length` tokens of the prompt; None if none is usable."""
    length: int = 0
    """Tokens of the prompt that the entry provides; 0 without an entry."""
    shared: int = 0
    """Length in tokens of the longest prefix of the prompt with which any stored sequence starts, usable or not."""


class PrefixStore(Protocol[V]):
    """Interface of a store of token sequences. The only implementation is `PrefixCache`, in RAM."""

    def find(self, model: str, key: bytes, *, cut: bool, scope: str = "") -> PrefixHit[V]:
        """Return the longest stored prefix of a prompt in a scope. `key` has the packed ids of the prompt.

        `cut`: the model's caches can be cut. If False, only a sequence that is itself a prefix of the prompt is usable.
        """
        ...

    def store(self, entry: CachedPrefix[V]) -> None:
        """Store a sequence, in place of an entry of the same model and scope with the same ids."""
        ...

    def evict(self, size: int) -> int:
        """Evict entries until at least `size` bytes are evicted or no entry is left. Return the evicted bytes."""
        ...


class PrefixCache(Generic[V]):
    """Store of token sequences of all models, in RAM. Values are opaque: the bytes of an entry are its `nbytes`, which
    must not change while the entry is stored."""

    def __init__(self) -> None:
        self._tries: dict[tuple[str, str], RadixTrie[CachedPrefix[V]]] = {}
        """Tries by model and scope."""
        self._order: dict[CachedPrefix[V], None] = {}
        self._nbytes = self._arrays = self._hits = self._hit_tokens = self._stores = self._evictions = 0
        self._model_hits: Counter[str] = Counter()
        self._evicted: deque[bytes] = deque(maxlen=MAX_EVICTIONS_REPORTED)
        self._prompts: Counter[bytes] = Counter()
        """Entries by prompt hash: the prompt itself, and snapshots within it."""

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, as counted by the callers of `store`."""
        return self._nbytes

    def __len__(self) -> int:
        return len(self._order)

    @property
    def entries(self) -> tuple[CachedPrefix[V], ...]:
        """Entries, least recently used first."""
        return tuple(self._order)

    @property
    def scopes(self) -> frozenset[tuple[str, str]]:
        """Pairs of model and scope that have entries."""
        return frozenset(self._tries)

    def find(self, model: str, key: bytes, *, cut: bool, scope: str = "") -> PrefixHit[V]:
        """Return the longest stored prefix of a prompt in a scope, and mark its entry as the most recently used. `key`
        has the packed ids of the prompt. `cut`: the model's caches can be cut.

        The prefix leaves out at least the last token of the prompt. A prefix below `MIN_PREFIX_TOKENS` is not used.
        """
        trie = self._tries.get((model, scope))
        if trie is None:
            return PrefixHit()
        most = len(key) // ID_BYTES - 1
        match = trie.match(key, most)
        entry = match.exact
        length = 0 if entry is None else entry.length
        if cut and match.below is not None and (longer := match.below.find_cut(min(match.shared, most))) > length:
            entry, length = match.below, longer
        if entry is None or length < MIN_PREFIX_TOKENS:
            return PrefixHit(shared=match.shared)
        self._order[entry] = self._order.pop(entry)
        return PrefixHit(entry, length, match.shared)

    def count_hit(self, model: str, tokens: int) -> None:
        """Count a hit for the model named `model`, of which `tokens` cached tokens are used."""
        self._hits += 1
        self._model_hits[model] += 1
        self._hit_tokens += tokens

    def covers(self, model: str, key: bytes, *, cut: bool, scope: str = "") -> bool:
        """Return whether a stored sequence of the scope already serves every prompt that the sequence `key` (packed
        ids) would serve. `cut`: the model's caches can be cut."""
        trie = self._tries.get((model, scope))
        if trie is None:
            return False
        size = len(key) // ID_BYTES
        match = trie.match(key, size)
        if match.shared < size:
            return False
        whole = match.exact is not None and match.exact.length == size
        return whole or (cut and match.below is not None and match.below.find_cut(size) == size)

    def find_redundant(self, model: str, key: bytes, scope: str = "") -> list[CachedPrefix[V]]:
        """Return the stored entries that are proper prefixes of the sequence `key` (packed ids). Where caches can be
        cut, that sequence makes them redundant."""
        trie = self._tries.get((model, scope))
        return [] if trie is None else trie.find_proper_prefixes(key)

    def store(self, entry: CachedPrefix[V]) -> None:
        """Store an entry as the most recently used. Replace an entry of the same model and scope with the same ids.
        Evict the least recently used entries above `MAX_ARRAYS`."""
        trie = self._tries.setdefault((entry.model, entry.scope), RadixTrie())
        same = trie.match(entry.key, entry.length).exact
        if same is not None and same.key == entry.key:
            self.pop(same)
            trie = self._tries.setdefault((entry.model, entry.scope), RadixTrie())
        trie.put(entry.key, entry)
        self._order[entry] = None
        self._nbytes += entry.nbytes
        self._arrays += entry.arrays
        self._prompts[entry.prompt_hash] += 1
        self._stores += 1
        while self._arrays > MAX_ARRAYS:
            self.evict_entry(next(iter(self._order)))

    def pop(self, entry: CachedPrefix[V]) -> V:
        """Remove a stored entry (`is_stored`) and return its cache, which the caller then owns. This does not count as
        an eviction."""
        value = entry.value
        assert value is not None  # noqa: S101 the caller has checked `is_stored`
        entry.clear()
        del self._order[entry]
        place = entry.model, entry.scope
        self._tries[place].remove(entry.key)
        if self._tries[place].empty:
            del self._tries[place]
        self._nbytes -= entry.nbytes
        self._arrays -= entry.arrays
        self._prompts[entry.prompt_hash] -= 1
        if not self._prompts[entry.prompt_hash]:
            del self._prompts[entry.prompt_hash]
        return value

    def evict(self, size: int) -> int:
        """Evict the least recently used entries until at least `size` bytes are evicted or no entry is left. Return the
        evicted bytes."""
        before = self._nbytes
        while self._order and before - self._nbytes < size:
            self.evict_entry(next(iter(self._order)))
        return before - self._nbytes

    def evict_model(self, model: str) -> None:
        """Evict all entries of the model named `model` from memory, each as `evict_entry` does."""
        for entry in [entry for entry in self._order if entry.model == model]:
            self.evict_entry(entry)

    def remove_redundant(self, entries: Iterable[CachedPrefix[V]]) -> None:
        """Remove entries that are redundant, or whose request has failed or was cancelled. They do not count as
        evictions. Entries that have already been removed are ignored."""
        for entry in entries:
            if entry.is_stored:
                self.pop(entry)

    def evict_entry(self, entry: CachedPrefix[V]) -> None:
        """Remove an entry that is in memory. Its prompt counts as evicted, unless the disk has a copy of the entry, or
        memory has another entry of the prompt."""
        self.pop(entry)
        if entry.copy is not None and entry.copy.on_disk:
            entry.copy.leave_memory()
        else:
            self.count_eviction(entry.prompt_hash)

    def count_eviction(self, prompt_hash: bytes) -> None:
        """Count the prompt of an entry that neither memory nor the disk caches any longer, and keep its hash for the
        report. The prompt does not count while memory has another entry of the same prompt. An empty hash, which
        identifies no prompt, does not count."""
        if prompt_hash and prompt_hash not in self._prompts:
            self._evictions += 1
            self._evicted.append(prompt_hash)

    def describe_models(self) -> dict[str, ModelCache]:
        """Return the bytes and the numbers of entries and hits of each model that has entries or hits, by the name of
        the model."""
        nbytes, entries = Counter[str](), Counter[str]()
        for entry in self._order:
            nbytes[entry.model] += entry.nbytes
            entries[entry.model] += 1
        names = nbytes.keys() | self._model_hits.keys()
        return {name: ModelCache(name, nbytes[name], entries[name], self._model_hits[name]) for name in names}

    def get_state(self) -> CacheState:
        """Return the current bytes and number of entries, the counts since the start, and the prompt hashes of the last
        `MAX_EVICTIONS_REPORTED` evictions."""
        return CacheState(
            self._nbytes,
            len(self._order),
            self._hits,
            self._hit_tokens,
            self._stores,
            self._evictions,
            tuple(self._evicted),
        )

"""Shared beginnings of the texts of embedding and rerank requests, in the prefix cache of the engine.

The texts of a request often begin alike, such as with a query or an instruction. The cache of this beginning is kept
for later requests of the same scope (`PreparedEmbedding.cache_scope`), usually an API key:

    at admission          `count_cached` counts the cached tokens, for the cost of the request
    before the forwards   `restore` copies the cached part into the request
    after the forwards    `store` copies the complete beginning into the prefix cache

Rules
- Memory: A copy is made only if it fits now. The copy in a request counts against its reservation, the copy in the
  prefix cache as cached memory. Without room for a copy, the request computes the beginning, or does not store it.
- Scopes: A request finds beginnings of its own scope, as in the prefix cache of chats.
- Faults: After a fault, all entries of the model in memory are evicted, because the fault may be in an entry.
- Disk: Shared beginnings are not written to the disk cache, because they are short.
"""

from collections.abc import Sequence

from node.engine.embedding.request import EmbeddingRequest
from node.engine.kv.kv_cache import Layers, copy_prefix, count_arrays, materialize, sum_nbytes
from node.engine.kv.prefix_memory import PrefixMemory
from node.engine.kv.prefix_store import CachedPrefix, PrefixCache, PrefixHit
from node.engine.kv.radix_trie import pack
from node.engine.requests.prepared import PreparedEmbedding

_NEXT_TOKEN = 0
"""Token id that is appended to a beginning for its lookup, because a lookup leaves out the last token."""


class BeginningStore:
    """Prefix cache of shared beginnings (see the module's docstring).

    `store` contains the cached sequences of all models, and `memory` makes room for them.
    """

    def __init__(self, store: PrefixCache[Layers], memory: PrefixMemory) -> None:
        self._store = store
        self._memory = memory

    def count_cached(self, prepared: PreparedEmbedding) -> int:
        """Return the number of cached tokens with which the first text of a request begins; 0 if none is cached. The
        last token of the text never counts."""
        return self._find(prepared.request.model, prepared.inputs[0], prepared.cache_scope).length

    def restore(self, request: EmbeddingRequest) -> None:
        """Copy the cached part of a request's beginning into the request, and count a cache hit. Do nothing if no part
        is cached, or if the copy has no room in memory."""
        prepared, beginning = request.prepared, request.beginning
        hit = self._find(request.loaded_model.name, (*beginning, _NEXT_TOKEN), prepared.cache_scope)
        if hit.entry is None or hit.entry.value is None:
            return
        layers = copy_prefix(hit.entry.value, hit.length)
        if self._memory.has_room(sum_nbytes(layers)):
            request.restore_beginning(materialize(layers), hit.length)
            self._store.count_hit(request.loaded_model.name, hit.length)

    def store(self, request: EmbeddingRequest) -> None:
        """Store a copy of the complete beginning of a request, unless it is cached or memory does not suffice.

        Other cached prefixes are evicted to make room, even if the room then still does not suffice.
        """
        name, scope, key = request.loaded_model.name, request.prepared.cache_scope, pack(request.beginning)
        layers = copy_prefix(request.beginning_cache, len(request.beginning))
        size = sum_nbytes(layers)
        if not self._store.covers(name, key, cut=True, scope=scope) and self._memory.make_room(size):
            cache = materialize(layers)
            entry = CachedPrefix(name, key, cache, size, snapshot=True, scope=scope, arrays=count_arrays(cache))
            self._store.store(entry)

    def invalidate(self, model: str) -> None:
        """Remove all entries of a model after a fault."""
        self._store.evict_model(model)

    def _find(self, model: str, ids: Sequence[int], scope: str) -> PrefixHit[Layers]:
        return self._store.find(model, pack(ids), cut=True, scope=scope)

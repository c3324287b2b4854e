"""Packed prefill: several short prompts in one forward.

A forward reads the weights once for any number of rows, and rows that join together copy the decode batch once. Rows
that start together also decode together, which makes steps wider. Whole waiting prompts are therefore padded *right*
and written into one cache. Attention is causal: no token attends to its right, hence to no padding. Up to its end a
row's cache is the same as after a prefill of its own.

- Last token: The last token of each prompt is left out. It is the input of the row's first decode step, which computes
  the logits of all rows at once. A packed forward would compute logits of every token: a gigabyte with a large
  vocabulary.
- Caches: Only plain caches take part (`kv_cache.is_plain`): a window or a running state would include the padding.
- Prefixes: A prompt waits for a prefill of its own if much of it is cached, or if it starts like another member. Its
  prefix need not be computed again.
- Ledger: Prompts of one forward share a ledger batch, and rows × longest is therefore committed already.
- Faults: A fault here has no known culprit. All prompts are prefilled again one by one, and the faulty one fails alone.
  The crash recorder, as well, names no request for a packed forward.
"""

import time
from collections.abc import Sequence

import mlx.core as mx

from node.engine.kv.kv_cache import Layers, TextModel, capacity_of, evaluate, extent_of, new_cache
from node.engine.kv.prefix_store import MIN_PREFIX_TOKENS
from node.engine.memory.gate import GateSite
from node.engine.memory.gated_forward import GatedForwards
from node.engine.process.interface import NativeCallKind
from node.engine.scheduling.prefill import Prefill
from node.engine.scheduling.prefix_cache import PrefixCacheManager
from node.engine.scheduling.rules.chunk_policy import MAX_CACHED_SHARE, select_batch

PAD_TOKEN = 0


class PackedPrefill:
    """Selection of short prompts, and their prefill in one forward. `most` is the maximum size of that forward in
    tokens, with padding."""

    def __init__(self, forwards: GatedForwards, prefixes: PrefixCacheManager, most: int) -> None:
        self._forwards = forwards
        self._prefixes = prefixes
        self._most = most

    def select_batch(self, first: Prefill, waiting: Sequence[Prefill], most: int) -> list[Prefill]:
        """Return the prompts to prefill in one forward with `first`, which is the first of them, in at most `most`
        tokens. Return only `first` if it cannot be packed."""
        if not self._shares(first):
            return [first]
        batch, members = _batch(first), [first]
        for one in waiting:
            if (
                one.loaded_model is first.loaded_model
                and one is not first
                and _batch(one) == batch
                and self._shares(one)
            ):
                members += [one] * (not any(_alike(one, other) for other in members))
        places = select_batch([len(one.ids) - 1 for one in members], min(most, self._most))
        return [members[place] for place in places]

    def _shares(self, prefill: Prefill) -> bool:
        """Return whether a prompt may be packed: it is whole, and little of it is cached."""
        if prefill.alone or prefill.cache is not None or len(prefill.rows) > 1 or not prefill.loaded_model.plain:
            return False
        self._prefixes.find(prefill)
        return len(prefill.ids) > 1 and prefill.written < MAX_CACHED_SHARE * len(prefill.ids)

    def fitting(self, members: list[Prefill]) -> list[Prefill]:
        """Return the members that pass the gate in one forward: all, or the first half, halved as often as necessary.
        Return an empty list if no two prompts pass."""
        while len(members) > 1:
            estimate = members[0].loaded_model.estimator.packed(len(members), _longest(members))
            if self._forwards.check_optional(GateSite.PREFILL, estimate):
                return members
            self._forwards.count_shrink()
            members = members[: (len(members) + 1) // 2] if len(members) > 2 else []
        return []

    def read(self, members: Sequence[Prefill]) -> Layers:
        """Prefill all but the last token of each member; return the cache of all rows, in the order of `members`.

        Exceptions of the forward propagate. Raise `Halted` if the engine was halted.
        """
        loaded_model, longest = members[0].loaded_model, _longest(members)
        rows = [one.ids[:-1] + [PAD_TOKEN] * (longest + 1 - len(one.ids)) for one in members]
        cache, count = new_cache(loaded_model.model), len(rows) * longest
        expected = loaded_model.stats.expected_prefill_seconds(count)
        with self._forwards.native(NativeCallKind.PREFILL, loaded_model.name, 0, expected) as call:
            write(loaded_model.model, rows, cache)
        loaded_model.stats.record_prefill(count, time.monotonic() - call.since, longest / 2)
        loaded_model.estimator.observe_together(
            len(rows), longest, self._forwards.height.peak_above_mark() - extent_of(cache).size
        )
        for one in members:
            one.end_packed(capacity_of(cache))
        return cache


def write(model: TextModel, rows: list[list[int]], cache: Layers) -> None:
    """Prefill rows of equal length, padding included, into the cache of all rows; compute no logits."""
    model(mx.array(rows), cache=cache)
    evaluate([layer.state for layer in cache])


def _longest(members: Sequence[Prefill]) -> int:
    return max(len(one.ids) for one in members) - 1


def _batch(prefill: Prefill) -> int:
    return prefill.loaded_model.ledger.batch_of(prefill.rows[0].commitment)


def _alike(one: Prefill, other: Prefill) -> bool:
    """Return whether much of `one` will be cached after a prefill of `other`."""
    length = max(MIN_PREFIX_TOKENS, int(MAX_CACHED_SHARE * len(one.ids)))
    if one.past is None or other.past is None or len(one.ids) <= length or one.ids[:length] != other.ids[:length]:
        return False
    return one.past.scope == other.past.scope or length <= min(one.past.shared, other.past.shared)

"""Packed prefill: several short prompts in one forward.

A forward reads the weights once for any number of rows, and rows that join together copy the decode batch once. Rows
that start together also decode together, in steps with more rows. Waiting prompts are therefore padded on the *right*
and prefilled into one cache. Attention is causal: no token attends to the padding at its right. Without the padding, a
row's cache is the same as after a separate prefill.

- Last token: The last token of each prompt is left out. It is the input of the row's first decode step, which computes
  the logits of all rows at once. A packed forward would compute the logits of every token, which take a gigabyte with a
  large vocabulary.
- Caches: All layers must have plain caches (`kv_cache.is_plain`), because a window or a recurrent state would include
  the padding.
- Prefixes: A prompt waits for a separate prefill if much of it is cached, or if it starts like a packed prompt. Its
  prefix then need not be computed again.
- Commitments: All prompts of a packed forward are in one group of the `CommitmentLedger`. The KV of the padded forward
  (rows × longest row) is therefore already committed.
- Faults: A fault does not show which prompt caused it. All prompts are prefilled again one by one, and the faulty one
  fails alone. The crash recorder names no request for a packed forward.
"""

import time
from collections.abc import Sequence

import mlx.core as mx

from node.engine.kv.kv_cache import (
    Layers,
    TextModel,
    compute_mean_capacity,
    copy_state_views,
    create_cache,
    evaluate,
    measure_extent,
)
from node.engine.kv.prefix_store import MIN_PREFIX_TOKENS
from node.engine.memory.gate import GateSite
from node.engine.memory.gated_forward import GatedForwards
from node.engine.process.interface import NativeCallKind
from node.engine.scheduling.prefill import Prefill
from node.engine.scheduling.prefix_cache import PrefixCacheManager
from node.engine.scheduling.rules.chunk_policy import MAX_CACHED_SHARE, select_batch

PAD_TOKEN = 0
"""Token id of padding, to which no other token attends."""


class PackedPrefill:
    """Selection of short prompts, and their prefill in one forward. `max_tokens` is the maximum number of tokens of
    that forward, including padding."""

    def __init__(self, forwards: GatedForwards, prefixes: PrefixCacheManager, max_tokens: int) -> None:
        self._forwards = forwards
        self._prefixes = prefixes
        self._max_tokens = max_tokens

    def select_batch(self, first: Prefill, waiting: Sequence[Prefill], max_tokens: int) -> list[Prefill]:
        """Return the prompts to prefill in one forward: `first`, then prompts of the same decode batch from `waiting`.

        Several prompts have at most `max_tokens` tokens in total, with padding and without their last tokens, and at
        most the `max_tokens` of the class. A prompt is left out if the prefill of an earlier prompt will cache much of
        it. Return only `first` if it cannot be packed, or if no other prompt fits. The prefix cache is looked up for
        each prompt that is considered.
        """
        if not self._can_pack(first):
            return [first]
        batch, members = _get_batch_number(first), [first]
        for prefill in waiting:
            if (
                prefill.loaded_model is first.loaded_model
                and prefill is not first
                and _get_batch_number(prefill) == batch
                and self._can_pack(prefill)
            ):
                members += [prefill] * (not any(_is_covered_by(prefill, other) for other in members))
        places = select_batch([len(prefill.ids) - 1 for prefill in members], min(max_tokens, self._max_tokens))
        return [members[place] for place in places]

    def _can_pack(self, prefill: Prefill) -> bool:
        """Return whether a prompt may be packed, and find its cached prefix. Such a prompt has one row and plain
        caches, has not started, and need not run alone. Little of it is cached."""
        if prefill.alone or prefill.cache is not None or len(prefill.rows) > 1 or not prefill.loaded_model.plain:
            return False
        self._prefixes.find_prefix(prefill)
        return len(prefill.ids) > 1 and prefill.stored_tokens < MAX_CACHED_SHARE * len(prefill.ids)

    def select_fitting(self, members: list[Prefill]) -> list[Prefill]:
        """Return the leading prompts of `members` that pass the gate in one forward. After each refusal, try the first
        half of the refused prompts.

        Return an empty list if no two prompts pass. Each refusal is counted (`GatedForwards.count_shrink`).
        """
        while len(members) > 1:
            estimate = members[0].loaded_model.estimator.estimate_packed(len(members), _count_longest(members))
            if self._forwards.check_optional(GateSite.PREFILL, estimate):
                return members
            self._forwards.count_shrink()
            members = members[: (len(members) + 1) // 2] if len(members) > 2 else []
        return []

    def prefill_members(self, members: Sequence[Prefill]) -> Layers:
        """Prefill all tokens but the last of each prompt in one forward. Return the cache of all rows, padded on the
        right, in the order of `members`.

        Exceptions of the forward propagate. Raise `Halted` if the engine was halted.
        """
        loaded_model, longest = members[0].loaded_model, _count_longest(members)
        rows = [prefill.ids[:-1] + [PAD_TOKEN] * (longest + 1 - len(prefill.ids)) for prefill in members]
        cache, count = create_cache(loaded_model.model), len(rows) * longest
        expected = loaded_model.stats.estimate_prefill_seconds(count)
        tokens = sum(len(prefill.ids) for prefill in members)  # the join computes the last token of each
        with self._forwards.run_native(
            NativeCallKind.PREFILL, loaded_model.name, 0, expected, prefill_tokens=tokens
        ) as call:
            self._forwards.count_recomputed(sum(len(prefill.ids) for prefill in members if prefill.is_return))
            prefill_rows(loaded_model.model, rows, cache)
        loaded_model.stats.record_prefill(count, time.monotonic() - call.since, longest / 2)
        loaded_model.estimator.observe_packed(
            len(rows), longest, self._forwards.peak_tracker.measure_peak_above_mark() - measure_extent(cache).size
        )
        for prefill in members:
            prefill.end_packed(compute_mean_capacity(cache))
        return cache


def prefill_rows(model: TextModel, rows: list[list[int]], cache: Layers) -> None:
    """Prefill rows of token ids, padded to equal length, into `cache`, the cache of all rows. No logits are
    evaluated."""
    model(mx.array(rows), cache=cache)
    copy_state_views(cache)
    evaluate([layer.state for layer in cache])


def _count_longest(members: Sequence[Prefill]) -> int:
    return max(len(prefill.ids) for prefill in members) - 1


def _get_batch_number(prefill: Prefill) -> int:
    return prefill.loaded_model.ledger.get_batch_number(prefill.rows[0].commitment)


def _is_covered_by(prefill: Prefill, other: Prefill) -> bool:
    """Return whether much of `prefill` will be cached after a prefill of `other`."""
    length = max(MIN_PREFIX_TOKENS, int(MAX_CACHED_SHARE * len(prefill.ids)))
    if (
        prefill.past is None
        or other.past is None
        or len(prefill.ids) <= length
        or prefill.ids[:length] != other.ids[:length]
    ):
        return False
    return prefill.past.scope == other.past.scope or length <= min(prefill.past.shared, other.past.shared)

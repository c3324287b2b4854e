"""Logits mask of a grammar, for one row of a batch.

The mask is computed while the forward runs. A decode step with such rows waits for the previous forward, because the
mask needs its token ids. The first token of an answer that may start with reasoning also waits for the current forward.
A batch without a grammar does not wait.

If an answer may start with reasoning, the mask allows the start marker only where it is the most likely token without a
mask. Otherwise a grammar that excludes most other tokens would itself cause reasoning.
"""

from collections.abc import Iterable
from typing import Any, cast

import mlx.core as mx

from node.engine.grammar.matcher import allow_token
from node.engine.requests.prepared import GrammarCursor, GrammarFactory


class LogitsMask:
    """Last logits processor of a row with a grammar: masks all tokens that the grammar does not allow next.

    `known` are the token ids of the answer that have already been generated.
    """

    def __init__(self, grammar: GrammarFactory, known: Iterable[int]) -> None:
        self._grammar = grammar
        self._constraint: GrammarCursor | None = None
        self._new = list(known)

    def add_id(self, token: int) -> None:
        """Add the next token id of the answer. Must be called before the logits of the following token are masked."""
        self._new.append(token)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return logits (1, vocabulary) with −inf for tokens that the grammar does not allow next, in the type of
        `logits`.

        `tokens` is not read, because `add_id` provides the ids of the answer. Raise `matcher.GrammarFailed` if no token
        can follow, or if the grammar does not allow an added id.
        """
        cast("Any", mx).async_eval(logits)
        if self._constraint is None:
            self._constraint = self._grammar.create_cursor()
        new, self._new = self._new, []
        for token in new:
            self._constraint.feed(token)
        mask = self._constraint.compute_mask()
        if mask is None:
            return logits
        opener = self._constraint.opener
        if opener is not None and mx.argmax(logits).item() == opener:
            mask = allow_token(mask, opener)
        return apply_mask(logits, mask)


def apply_mask(logits: mx.array, mask: bytes) -> mx.array:
    """Return logits (1, vocabulary) with −inf for every token that the mask excludes, or whose id is beyond the mask.

    `mask` has one bit per token, lowest first, in whole words of 32 bits (`GrammarMatcher.compute_mask`).
    """
    words = mx.array(cast("Any", memoryview(mask).cast("I")))
    bits = mx.flatten((words[:, None] >> mx.arange(32, dtype=mx.uint32)) & 1)
    allowed = bits[None, : logits.shape[-1]].astype(mx.bool_)
    missing = logits.shape[-1] - allowed.shape[-1]
    if missing > 0:
        allowed = mx.pad(allowed, [(0, 0), (0, missing)])
    return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))

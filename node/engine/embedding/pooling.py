"""Pooling: reduce the hidden states of texts to one vector each, chunk by chunk.

Padded states are never read: a text of a batch ends at its own length. A chunk adds to sums and maxima in single
precision, so that the states of earlier chunks need not be kept.
"""

from collections.abc import Sequence

import mlx.core as mx

from node.models.embedding_layout import Pooling

_SUMS = frozenset({Pooling.MEAN, Pooling.MEAN_SQRT_LENGTH})


class PooledTexts:
    """Pooled states of the texts of one batch, whose tokens arrive in chunks.

    `poolings` are the kinds of pooling, whose results are concatenated in this order. `lengths`: tokens of each text.
    """

    def __init__(self, poolings: Sequence[Pooling], lengths: Sequence[int]) -> None:
        self._poolings = tuple(dict.fromkeys(poolings))
        self._order = poolings
        self.lengths = lengths
        """Tokens of each text."""
        self._lengths = mx.array(list(lengths))[:, None]
        self._start = 0
        self._parts: dict[Pooling, mx.array] = {}

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Lazy arrays with the results so far. Evaluation of these arrays releases the states that were added."""
        return tuple(self._parts.values())

    def add(self, states: mx.array) -> None:
        """Add the hidden states of the next tokens of all texts, shape (texts, tokens, features), without evaluation.

        States after the end of a text are padding, and are ignored.
        """
        places = mx.arange(self._start, self._start + states.shape[1])[None]
        own = places < self._lengths
        for pooling in self._poolings:
            part, before = _compute_part(pooling, states, places, own, self._lengths), self._parts.get(pooling)
            if before is not None:
                part = mx.maximum(before, part) if pooling is Pooling.MAX else before + part
            self._parts[pooling] = part
        self._start += states.shape[1]

    def compute(self) -> mx.array:
        """Return the pooled states: a lazy array in single precision, shape (texts, features × poolings)."""
        count = self._lengths.astype(mx.float32)
        divisors = {
            Pooling.MEAN: count,
            Pooling.MEAN_SQRT_LENGTH: mx.sqrt(count),
            Pooling.WEIGHTED_MEAN: count * (count + 1) / 2,
        }
        parts = [
            self._parts[pooling] / divisors[pooling] if pooling in divisors else self._parts[pooling]
            for pooling in self._order
        ]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def _compute_part(pooling: Pooling, states: mx.array, places: mx.array, own: mx.array, lengths: mx.array) -> mx.array:
    """Return the share of one chunk in the pooled states of each text, shape (texts, features)."""
    if pooling is Pooling.MAX:
        return mx.where(own[..., None], states.astype(mx.float32), -mx.inf).max(axis=1)
    if pooling in _SUMS:
        weights = own
    elif pooling is Pooling.WEIGHTED_MEAN:
        weights = mx.where(own, places + 1, 0)
    else:
        return _take_state(states, places, 0 if pooling is Pooling.CLS else lengths - 1)
    return (mx.where(own[..., None], states.astype(mx.float32), 0) * weights[..., None]).sum(axis=1)


def _take_state(states: mx.array, places: mx.array, wanted: mx.array | int) -> mx.array:
    """Return the state at the place `wanted` of each text; 0 if the place is in another chunk."""
    first = places[0, 0]
    at = mx.clip(mx.broadcast_to(wanted - first, (states.shape[0], 1)), 0, states.shape[1] - 1)
    found = mx.take_along_axis(states, at[..., None], axis=1)[:, 0].astype(mx.float32)
    inside = (wanted >= first) & (wanted < first + states.shape[1])
    return mx.where(mx.broadcast_to(inside, (states.shape[0], 1)), found, 0)

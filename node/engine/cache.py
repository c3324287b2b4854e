"""What we use of mlx-lm's models and caches, as types, and what a cache says about the bytes that a row takes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from wire.report import Kv

STEP = 256
"""Tokens by which mlx-lm's caches grow (`KVCache.step`)."""


evaluate = cast("Callable[..., None]", mx.eval)
"""`mx.eval`, with a type."""


class Layer(Protocol):
    """The cache of one layer, of one row or of a batch."""

    @property
    def state(self) -> object:
        """All its arrays, for mx.eval."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        ...

    def merge(self, caches: "Sequence[Layer]") -> "Layer":
        """Make a batch of rows."""
        ...


Layers = list[Layer]


class TextModel(Protocol):
    """A model of mlx-lm: tokens (rows, length) to logits (rows, length, vocabulary), writing into the caches."""

    def __call__(self, tokens: mx.array, cache: "Sequence[Layer]") -> mx.array:
        """Run a forward."""
        ...


def new_cache(model: TextModel) -> Layers:
    """Make an empty cache for one row."""
    return cast("Layers", make_prompt_cache(cast("Any", model)))


def nbytes_of(layers: Iterable[Layer]) -> int:
    """Give the bytes of all layers."""
    return sum(layer.nbytes for layer in layers)


def kv_of(layers: Iterable[Layer]) -> Kv:
    """Say what a row takes, from a cache that a short forward has filled.

    Layers with keys and values take bytes for each token; those with a `max_size` only for their window; all others
    (states of hybrids) are as large for one token as for many.
    """
    fixed = per_token = windowed = window = 0
    for layer in _leaves(layers):
        keys = getattr(layer, "keys", None)
        if keys is None:
            fixed += layer.nbytes
            continue
        held: int = keys.shape[2]
        size: int | None = getattr(layer, "max_size", None)
        if size is None:
            per_token += layer.nbytes // held
        else:
            windowed += layer.nbytes // held
            window = max(window, size)
    return Kv(per_token, STEP, fixed, window, windowed)


def _leaves(layers: Iterable[Any]) -> Iterable[Any]:
    for layer in layers:
        inner = getattr(layer, "caches", None)
        if inner is None:
            yield layer
        else:
            yield from _leaves(inner)

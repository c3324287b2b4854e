"""Types for mlx-lm's models and caches, and operations on the caches: measure, grow, cut and copy."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx import utils as mlx_utils
from mlx_lm.models.cache import ArraysCache, BatchKVCache, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from wire.report import CACHE_STEP_TOKENS, KvParameters

evaluate = cast("Callable[..., None]", mx.eval)
"""`mx.eval`, with a type."""
launch_evaluation = cast("Callable[..., None]", mx.async_eval)
"""`mx.async_eval`, with a type."""


class LayerCache(Protocol):
    """Cache of one layer, for one row or for a batch."""

    @property
    def state(self) -> object:
        """All arrays of the cache, for `mx.eval`."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        ...

    def merge(self, caches: "Sequence[LayerCache]") -> "LayerCache":
        """Return a batch of these caches of single rows."""
        ...

    def extract(self, idx: int) -> "LayerCache":
        """Return the cache of row `idx` of a batch."""
        ...


Layers = list[LayerCache]
"""Caches of all layers of a model, in their order."""


class TextModel(Protocol):
    """Model of mlx-lm: computes logits of tokens and writes their keys and values into caches."""

    def __call__(self, tokens: mx.array, cache: "Sequence[LayerCache]") -> mx.array:
        """Run a forward over tokens (rows, length), lazily. Return logits (rows, length, vocabulary)."""
        ...


def create_cache(model: TextModel) -> Layers:
    """Return an empty cache for one row, with one element per layer."""
    return cast("Layers", make_prompt_cache(cast("Any", model)))


def sum_nbytes(layers: Iterable[LayerCache]) -> int:
    """Return the bytes of all layers of a cache."""
    return sum(layer.nbytes for layer in layers)


def count_arrays(layers: Iterable[LayerCache]) -> int:
    """Return the number of arrays of all layers of a cache. Each array takes one Metal buffer."""
    leaves = cast("Any", mlx_utils).tree_flatten([layer.state for layer in layers])
    return sum(isinstance(leaf, mx.array) for _, leaf in cast("list[tuple[str, object]]", leaves))


@dataclass(frozen=True, slots=True)
class CacheExtent:
    """Size of a row's cache, in bytes and tokens."""

    size: int
    """Bytes that count against the row's commitment. During a chunk, a layer with a window has more bytes than this."""
    capacity: int
    """Sum, over the growing layers, of the tokens for which a layer has room, including used tokens. The sum rises when
    a layer grows."""


def measure_extent(layers: Iterable[LayerCache]) -> CacheExtent:
    """Return the bytes and the capacity of a row's cache. Must be called between two forwards."""
    size = total = 0
    for layer in _iterate_leaves(layers):
        keys, window = getattr(layer, "keys", None), getattr(layer, "max_size", None)
        capacity = 0 if keys is None else keys.shape[2]
        if window is not None and capacity > window:
            size += layer.nbytes * window // capacity
            continue
        size += layer.nbytes
        total += capacity if window is None else 0
    return CacheExtent(size, total)


def grow_caches(layers: Iterable[LayerCache], tokens: int, max_tokens: int) -> None:
    """Prepare plain caches (`KVCache`) that have no room for `tokens` more tokens to grow at their next write.

    Such a cache then doubles, at most to room for `max_tokens`, but grows by at least `tokens`. With fixed steps,
    mlx-lm would copy all stored tokens at every step of a prompt.
    """
    for layer in _iterate_growing(layers):
        used: int = layer.offset
        if used + tokens > layer.keys.shape[2]:
            layer.keys, layer.values = layer.keys[..., :used, :], layer.values[..., :used, :]
            layer.step = _compute_step(used, tokens, max_tokens)


def grow_cache(layers: Iterable[LayerCache], tokens: int, max_tokens: int) -> bool:
    """Double the cache of the first layer that will soon have no room for `tokens` more tokens, at most to room for
    `max_tokens`. Copy its arrays at once. Return whether there was such a layer.

    One call grows one layer. While other rows decode, the pause between two of their tokens therefore contains the copy
    of only one layer.
    """
    growing = list(_iterate_growing(layers))
    for layer in growing:
        used: int = layer.offset
        capacity: int = layer.keys.shape[2]
        if used + tokens <= capacity < min(used + tokens * (len(growing) + 1), max_tokens):
            more = [(0, 0), (0, 0), (0, max(0, used + _compute_step(used, tokens, max_tokens) - capacity)), (0, 0)]
            layer.keys, layer.values = mx.pad(layer.keys, more), mx.pad(layer.values, more)
            evaluate(layer.keys, layer.values)
            return True
    return False


def _compute_step(used: int, tokens: int, max_tokens: int) -> int:
    return max(tokens, min(math.ceil(max(tokens, used) / CACHE_STEP_TOKENS) * CACHE_STEP_TOKENS, max_tokens - used))


def compute_mean_capacity(layers: Iterable[LayerCache]) -> int:
    """Return the mean capacity of the growing layers in tokens, including used tokens; 0 if no layer grows."""
    capacities = [layer.keys.shape[2] for layer in _iterate_growing(layers)]
    return sum(capacities) // len(capacities) if capacities else 0


def _iterate_growing(layers: Iterable[LayerCache]) -> Iterator[Any]:
    for layer in _iterate_leaves(layers):
        if type(layer) is KVCache and cast("Any", layer).keys is not None:
            yield layer


def measure_kv_parameters(layers: Iterable[LayerCache]) -> KvParameters:
    """Return the parameters of the KV memory of a row, from a cache that a short forward has filled.

    Layers with keys and values take bytes per token. Layers with a `max_size` take them only within their window. All
    other layers (states of hybrids) have a fixed size.
    """
    fixed = per_token = windowed = window = 0
    for layer in _iterate_leaves(layers):
        keys = getattr(layer, "keys", None)
        if keys is None:
            fixed += layer.nbytes
            continue
        capacity: int = keys.shape[2]
        size: int | None = getattr(layer, "max_size", None)
        if size is None:
            per_token += layer.nbytes // capacity
        else:
            windowed += layer.nbytes // capacity
            window = max(window, size)
    return KvParameters(per_token, CACHE_STEP_TOKENS, fixed, window, windowed)


def _iterate_leaves(layers: Iterable[Any]) -> Iterable[Any]:
    for layer in layers:
        inner = getattr(layer, "caches", None)
        if inner is None:
            yield layer
        else:
            yield from _iterate_leaves(inner)


def can_merge(layers: Iterable[LayerCache]) -> bool:
    """Return whether caches of several rows can be merged into a batch. Raise `UncountableCacheError` for a kind of
    cache that cannot be merged and whose bytes for a number of tokens are unknown."""
    kinds: list[type] = [type(layer) for layer in layers if not hasattr(layer, "merge")]
    for kind in kinds:
        if kind is not ChunkedKVCache:
            raise UncountableCacheError(f"the memory of its {kind.__name__} is unknown: choose another model")
    return not kinds


def is_plain(layers: Iterable[LayerCache]) -> bool:
    """Return whether all layers are plain caches, which store only keys and values by position. Right padding of a row
    has no effect in such caches."""
    return all(type(cast("object", layer)) is KVCache for layer in layers)


def view_row(layers: Iterable[LayerCache], place: int, end: int, start: int = 0) -> Layers:
    """Return a view of one row's cache, for the positions from `start` up to but not including `end`.

    `layers` are caches of several rows with keys and values of all tokens. `place` is the index of the row. Positions
    include padding.
    """
    return [_view_layer(layer, place, start, end) for layer in layers]


def _view_layer(layer: Any, place: int, start: int, end: int) -> LayerCache:
    return _create_plain(*(array[place : place + 1, :, start:end, :] for array in (layer.keys, layer.values)))


def repeat_row(layers: Iterable[LayerCache], rows: int) -> Layers:
    """Return plain caches of `rows` rows that all equal the row of the plain caches `layers`. The arrays are copied at
    the next write."""
    return [_repeat_layer(layer, rows) for layer in layers]


def _repeat_layer(layer: Any, rows: int) -> LayerCache:
    arrays = (array[..., : layer.offset, :] for array in (layer.keys, layer.values))
    return _create_plain(*(mx.broadcast_to(array, (rows, *array.shape[1:])) for array in arrays))


def _create_plain(keys: mx.array, values: mx.array) -> LayerCache:
    """Return the plain cache of a layer with these keys and values, shape (rows, heads, tokens, features)."""
    layer = cast("Any", KVCache)()
    layer.keys, layer.values, layer.offset = keys, values, keys.shape[2]
    return layer


class UncountableCacheError(Exception):
    """Raised by `can_merge` for a kind of cache whose memory cannot be committed."""


class CacheTrimMode(Enum):
    """Extent to which the caches of a model can be reused for another prompt that begins with the same tokens."""

    CUT = "cut"
    """Caches can be cut to any prefix."""
    WINDOW = "window"
    """Caches can be cut where the history of their sliding windows is known (`window_history`)."""
    EXACT = "exact"
    """Caches are usable only if the prompt starts with all of their tokens."""
    NEVER = "never"
    """Caches cannot be reused."""


def find_trim_mode(layers: Iterable[LayerCache]) -> CacheTrimMode:
    """Return the most restrictive mode of the layers of a cache. The mode of an unknown kind of layer is NEVER."""
    kinds = {_get_trim_mode(leaf, nested=leaf is not layer) for layer in layers for leaf in _iterate_leaves([layer])}
    strictest = (CacheTrimMode.NEVER, CacheTrimMode.EXACT, CacheTrimMode.WINDOW)
    return next((mode for mode in strictest if mode in kinds), CacheTrimMode.CUT)


def _get_trim_mode(layer: object, *, nested: bool) -> CacheTrimMode:
    if type(layer) is KVCache:
        return CacheTrimMode.CUT
    if type(layer) is RotatingKVCache and not layer.keep:
        return CacheTrimMode.EXACT if nested else CacheTrimMode.WINDOW
    return CacheTrimMode.EXACT if type(layer) is ArraysCache else CacheTrimMode.NEVER


def materialize(layers: Iterable[LayerCache]) -> Layers:
    """Return copies of a row's caches in arrays of their own, evaluated and without unused room.

    A lazy copy or a view would keep its source arrays in memory, possibly a whole batch.
    """
    mine = [deepcopy(layer) for layer in layers]
    copy_state_views(mine)
    for layer in _iterate_leaves(mine):
        _shrink(layer)
    evaluate([layer.state for layer in mine])
    return mine


def copy_state_views(layers: Iterable[LayerCache]) -> None:
    """Replace states that are views of larger arrays by copies (`ArraysCache`). Call this between a forward and its
    evaluation.

    Many models of mlx-lm keep the last part of an array with all tokens of the forward. Such a view keeps the memory of
    all tokens in use. For Jamba at 512 tokens, that is about 500 times the memory of the state.
    """
    for layer in _iterate_leaves(layers):
        if type(layer) is ArraysCache:
            layer.cache = [None if array is None else mx.contiguous(array) for array in layer.cache]


def _shrink(layer: Any) -> None:
    if type(layer) is not ArraysCache and layer.keys is not None:
        window: int = getattr(layer, "max_size", 0)
        end: int = layer.offset - getattr(layer, "start_position", 0)
        for name in ("keys", "values"):
            array: mx.array = getattr(layer, name)
            array = layer._temporal_order(array)[..., -window:, :] if window else array[..., :end, :]
            setattr(layer, name, mx.contiguous(array))
        if window:
            layer._idx = layer.keys.shape[2]


def create_window(max_size: int, keys: mx.array, values: mx.array, length: int) -> LayerCache:
    """Return the cache of a layer with a sliding window of `max_size` tokens, after `length` tokens of a row.

    `keys` and `values` belong to the last tokens of the row, at most `max_size`, oldest first. Their shape is (1,
    heads, tokens, features).
    """
    window = cast("Any", RotatingKVCache)(max_size)
    window.state = (keys, values, length, 0, max_size, keys.shape[2])
    return window


def copy_prefix(layers: Iterable[LayerCache], length: int) -> Layers:
    """Return copies of these caches with the first `length` tokens, for another row. The copies take no bytes until
    that row writes.

    Caches that cannot be cut must hold exactly these tokens.
    """
    mine = [deepcopy(layer) for layer in layers]
    for layer in _iterate_leaves(mine):
        if type(layer) is KVCache:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
            layer.offset = length
    return mine


def merge_copies(cache: Layers, count: int) -> list[LayerCache]:
    """Return the cache of a batch of `count` equal rows, copied layer by layer from the cache of one row.

    Remove each layer from `cache` before its copy, so that its arrays can be freed. `cache` is empty at the end.
    """
    merged: list[LayerCache] = []
    while cache:
        layer = cache.pop(0)
        both = layer.merge([layer] * count)
        evaluate(both.state)
        merged.append(both)
    return merged


def copy_single_row(cache: Layers) -> list[LayerCache]:
    """Return copies of one row's caches without unused room, made layer by layer, for a row that decodes alone.

    Remove each layer from `cache` before its copy, as `merge_copies` does. Plain caches then grow by fixed steps again
    (`grow_caches`).
    """
    separate: list[LayerCache] = []
    while cache:
        (layer,) = materialize([cache.pop(0)])
        for leaf in _iterate_growing([layer]):
            leaf.step = CACHE_STEP_TOKENS
        separate.append(layer)
    return separate


def align_rows(cache: Layers, lengths: Sequence[int]) -> list[LayerCache]:
    """Return the left-padded caches of a batch, made layer by layer from the right-padded plain caches of its rows.

    `lengths` are the tokens of each row without padding. Each layer is removed from `cache`, which is empty at the end.
    If all rows have the same length, no array is copied.
    """
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    aligned: list[LayerCache] = []
    while cache:
        plain = cast("Any", cache.pop(0))
        layer = cast("Any", BatchKVCache)([0] * len(lengths))
        layer.keys, layer.values, layer._idx = plain.keys, plain.values, longest
        layer.offset = layer.offset + longest
        del plain
        layer.prepare(right_padding=padding)
        layer.finalize()
        evaluate(layer.state)
        aligned.append(layer)
    return aligned

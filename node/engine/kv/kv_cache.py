"""What we use of mlx-lm's models and caches, as types, and what a cache says about the bytes that a row takes."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

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

    def extract(self, idx: int) -> "Layer":
        """Take one row out of a batch."""
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


@dataclass(frozen=True, slots=True)
class Extent:
    """What a row's cache takes of its promise in bytes (a window holds more than it shows, for a chunk), and the tokens
    that its growing layers have room for."""

    size: int
    room: int


def extent_of(layers: Iterable[Layer]) -> Extent:
    """Measure a cache, between two forwards."""
    size = room = 0
    for layer in _leaves(layers):
        keys, window = getattr(layer, "keys", None), getattr(layer, "max_size", None)
        held = 0 if keys is None else keys.shape[2]
        if window is not None and held > window:
            size += layer.nbytes * window // held
            continue
        size += layer.nbytes
        room += held if window is None else 0
    return Extent(size, room)


def stretch(layers: Iterable[Layer], tokens: int, most: int) -> None:
    """Let caches that the next `tokens` outgrow double at once, up to room for `most`. By steps of their own every
    growth copies all that is held: a prompt would be copied as often as it has steps."""
    for layer in _growing(layers):
        held: int = layer.offset
        if held + tokens > layer.keys.shape[2]:
            layer.keys, layer.values = layer.keys[..., :held, :], layer.values[..., :held, :]
            layer.step = _step(held, tokens, most)


def widen(layers: Iterable[Layer], tokens: int, most: int) -> bool:
    """Double one of the caches that soon have no room for another `tokens`, and say if there was one. Beside rows that
    decode each is copied in a turn of its own, so that none of their gaps is as long as the copies of all."""
    growing = list(_growing(layers))
    for layer in growing:
        held: int = layer.offset
        room: int = layer.keys.shape[2]
        if held + tokens <= room < min(held + tokens * (len(growing) + 1), most):
            more = [(0, 0), (0, 0), (0, max(0, held + _step(held, tokens, most) - room)), (0, 0)]
            layer.keys, layer.values = mx.pad(layer.keys, more), mx.pad(layer.values, more)
            evaluate(layer.keys, layer.values)
            return True
    return False


def _step(held: int, tokens: int, most: int) -> int:
    return max(tokens, min(math.ceil(max(tokens, held) / STEP) * STEP, most - held))


def room_of(layers: Iterable[Layer]) -> int:
    """Give the tokens that growing layers have room for, by and large; 0 where none grows."""
    rooms = [layer.keys.shape[2] for layer in _growing(layers)]
    return sum(rooms) // len(rooms) if rooms else 0


def _growing(layers: Iterable[Layer]) -> Iterator[Any]:
    for layer in _leaves(layers):
        if type(layer) is KVCache and cast("Any", layer).keys is not None:
            yield layer


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


def plain(layers: Iterable[Layer]) -> bool:
    """Whether padding at a row's right cannot be seen in these caches: keys and values by place, and nothing else."""
    return all(type(cast("object", layer)) is KVCache for layer in layers)


def row_of(layers: Iterable[Layer], place: int, length: int) -> Layers:
    """View a row's first `length` tokens in plain caches of many rows."""
    return [_row(layer, place, length) for layer in layers]


def _row(layer: Any, place: int, length: int) -> Layer:
    row = cast("Any", KVCache)()
    row.keys, row.values = (held[place : place + 1, :, :length, :] for held in (layer.keys, layer.values))
    row.offset = length
    return row


class Manner(Enum):
    """How a model's caches can be kept and used again: cut to any beginning, only as they are, or not at all."""

    CUT = "cut"
    EXACT = "exact"
    NEVER = "never"


def manner_of(layers: Iterable[Layer]) -> Manner:
    """Say how these caches can be used again; of kinds that we do not know, not at all."""
    kinds = {_manner(layer) for layer in _leaves(layers)}
    return next((manner for manner in (Manner.NEVER, Manner.EXACT) if manner in kinds), Manner.CUT)


def _manner(layer: object) -> Manner:
    if type(layer) is KVCache:
        return Manner.CUT
    if type(layer) is ArraysCache or (type(layer) is RotatingKVCache and not layer.keep):
        return Manner.EXACT
    return Manner.NEVER


def owned(layers: Iterable[Layer]) -> Layers:
    """Copy a row's caches into arrays of their own, no longer than what they hold, and evaluate them: a lazy copy, or a
    view, would keep the arrays that it was taken from, a whole batch perhaps."""
    mine = [deepcopy(layer) for layer in layers]
    for layer in _leaves(mine):
        _shrink(layer)
    evaluate([layer.state for layer in mine])
    return mine


def _shrink(layer: Any) -> None:
    if type(layer) is ArraysCache:
        layer.cache = [None if one is None else mx.contiguous(one) for one in layer.cache]
    elif layer.keys is not None:
        window: int = getattr(layer, "max_size", 0)
        for name in ("keys", "values"):
            held: mx.array = getattr(layer, name)
            held = layer._temporal_order(held)[..., -window:, :] if window else held[..., : layer.offset, :]
            setattr(layer, name, mx.contiguous(held))
        if window:
            layer._idx = layer.keys.shape[2]


def copied(layers: Iterable[Layer], length: int) -> Layers:
    """Give another row a beginning of `length` tokens of these caches: no bytes until it writes, then its own. Caches
    that cannot be cut must hold just these tokens."""
    mine = [deepcopy(layer) for layer in layers]
    for layer in _leaves(mine):
        if type(layer) is KVCache:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
            layer.offset = length
    return mine

"""Parts of a cache for the disk: cut a cache into blocks and states, and rebuild a cache from them.

    layers that keep all tokens      a part for each block of 256 tokens
    layers with a sliding window     a part for each block whose tokens are recorded (`window_history`)
    layers with a state              a state at the end of a stored sequence, with the tokens after its last whole block

Caches with other layers are not stored. Nor are caches with both windows and states, or without layers that keep all
tokens. Arrays pass to numpy without a copy. numpy has no bfloat16: such arrays pass as integers of two bytes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from node.engine.kv.disk.block_file import BlockArray, BlockPart, InvalidBlockError
from node.engine.kv.kv_cache import LayerCache, Layers, evaluate, grow_caches
from node.engine.kv.prefix_store import BLOCK_TOKENS
from node.engine.kv.window_history import StoredWindow, WindowPiece
from node.engine.process.device_errors import raise_if_device_lost

TYPES = {mx.bfloat16: "bfloat16", mx.float16: "float16", mx.float32: "float32"}
"""Types of arrays that files can contain, with their names in files (`ITEM_TYPES`)."""


def list_parts(layers: Layers) -> frozenset[BlockPart]:
    """Return the kinds of parts in the cache of a model; an empty set if the disk cannot store this cache."""
    parts = {KVCache: BlockPart.TOKENS, RotatingKVCache: BlockPart.WINDOW, ArraysCache: BlockPart.STATE}
    found = {parts.get(cast("type", type(layer))) for layer in layers}
    mixed = {BlockPart.WINDOW, BlockPart.STATE} <= found
    if None in found or mixed or BlockPart.TOKENS not in found:
        return frozenset()
    return frozenset(part for part in found if part is not None)


def get_window(layers: Layers) -> int:
    """Return the number of tokens in the longest sliding window of a cache; 0 without a window."""
    return max((getattr(layer, "max_size", 0) for layer in layers), default=0)


class LaunchedCut(NamedTuple):
    """Copies of the arrays of one part. MLX makes them asynchronously, after the steps that were launched earlier."""

    kinds: tuple[str, ...]
    """Type of each array, as in `BlockArray.kind`."""
    arrays: tuple[mx.array, ...]
    """Copies of the arrays. Copies of bfloat16 arrays contain integers of two bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(array.nbytes for array in self.arrays)

    def wait(self) -> None:
        """Block until the copies are complete. Must be called before the copies are released (docs/decisions/0064)."""
        evaluate(self.arrays)

    def collect(self) -> list[BlockArray]:
        """Block until the copies are complete, and return them as arrays for a file."""
        self.wait()
        return [
            BlockArray(kind, np.array(array, copy=False)) for kind, array in zip(self.kinds, self.arrays, strict=True)
        ]


def begin_cut(layers: Layers, part: BlockPart, start: int, end: int) -> LaunchedCut | None:
    """Launch the copies of one part of a cache, for the token positions from `start` up to but not including `end`.

    Return None if no layer has this kind of part, if a state is empty, or if the tokens of a window are not recorded.
    Return None as well for arrays of a type that files cannot contain.
    """
    arrays = list[mx.array]()
    for layer in cast("list[object]", layers):
        if isinstance(layer, StoredWindow) and part is BlockPart.WINDOW:
            pieces = [piece.view_part(start, end) for piece in layer.pieces if piece.end > start and piece.start < end]
            if sum(piece.keys.shape[2] for piece in pieces) != end - start:
                return None
            arrays.append(mx.concatenate([piece.keys for piece in pieces], axis=2))
            arrays.append(mx.concatenate([piece.values for piece in pieces], axis=2))
        elif type(layer) is KVCache and part is not BlockPart.WINDOW and end > start:
            kept = cast("Any", layer)
            arrays += [kept.keys[..., start:end, :], kept.values[..., start:end, :]]
        elif type(layer) is ArraysCache and part is BlockPart.STATE:
            arrays += cast("list[mx.array]", cast("Any", layer).cache)
    if not arrays or any(array is None for array in cast("list[object]", arrays)):
        return None
    return _begin_copies(arrays)


def _begin_copies(arrays: Sequence[mx.array]) -> LaunchedCut | None:
    if any(array.dtype not in TYPES for array in arrays):
        return None
    own = [mx.contiguous(array) for array in arrays]
    own = [array.view(mx.uint16) if array.dtype == mx.bfloat16 else array for array in own]
    cast("Any", mx).async_eval(own)
    return LaunchedCut(tuple(TYPES[array.dtype] for array in arrays), tuple(own))


class LayerBuilder:
    """Builder of the cache of a row from parts, in the order of their tokens. `cache` is an empty cache of the model,
    which the builder fills, and `length` the number of tokens that it will have."""

    def __init__(self, cache: Layers, length: int) -> None:
        self._cache = cache
        self._length = length
        self._pieces: dict[int, list[WindowPiece]] = {}

    def add_part(self, part: BlockPart, start: int, tokens: int, arrays: Sequence[BlockArray]) -> None:
        """Add the arrays of a part of `tokens` tokens, whose first token has the position `start`.

        Raise `InvalidBlockError` if the arrays do not fit the layers, and `DeviceLost` if a command buffer of the GPU
        failed.
        """
        given = iter([_convert_back(array) for array in arrays])
        try:
            for place, layer in enumerate(cast("list[object]", self._cache)):
                if type(layer) is RotatingKVCache and part is BlockPart.WINDOW:
                    piece = WindowPiece(start, next(given), next(given))
                    self._pieces.setdefault(place, []).append(piece)
                elif type(layer) is KVCache and part is not BlockPart.WINDOW and tokens:
                    self._append(cast("Any", layer), next(given), next(given), tokens)
                elif type(layer) is ArraysCache and part is BlockPart.STATE:
                    state = cast("Any", layer)
                    for number in range(len(state.cache)):
                        state[number] = next(given)
            if next(given, None) is not None:
                raise InvalidBlockError("it has too many arrays")
            windows = [(piece.keys, piece.values) for pieces in self._pieces.values() for piece in pieces]
            evaluate([layer.state for layer in self._cache], windows)
        except (RuntimeError, StopIteration, ValueError, IndexError) as error:
            raise_if_device_lost(error)
            raise InvalidBlockError(f"its arrays do not suit this model: {error}") from None

    def _append(self, layer: Any, keys: mx.array, values: mx.array, tokens: int) -> None:
        if keys.shape[2] != tokens or values.shape[2] != tokens:
            raise InvalidBlockError("it has another number of tokens")
        if layer.keys is not None:
            grow_caches([layer], tokens, self._length)
        layer.update_and_fetch(keys, values)

    def build(self) -> Layers:
        """Return the cache of `length` tokens for the prefix store, after all parts were added. A layer with a window
        becomes a `StoredWindow`."""
        return [
            cast("LayerCache", StoredWindow(cast("Any", layer).max_size, tuple(self._pieces[place])))
            if place in self._pieces
            else layer
            for place, layer in enumerate(self._cache)
        ]


def count_window_blocks(window: int) -> int:
    """Return the number of blocks that contain a sliding window of `window` tokens which ends with a block."""
    return -(-window // BLOCK_TOKENS)


def _convert_back(array: BlockArray) -> mx.array:
    found = mx.array(cast("Any", array.data))
    return found.view(mx.bfloat16) if array.kind == "bfloat16" else found

"""Parts of caches: parts that are cut out of the layers of a row are put together again without a difference."""

from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from node.engine.kv.disk.block_file import BlockArray, BlockPart, InvalidBlockError
from node.engine.kv.disk.layer_parts import LayerBuilder, begin_cut, count_window_blocks, get_window, list_parts
from node.engine.kv.kv_cache import Layers
from node.engine.kv.window_history import StoredWindow, WindowPiece

TOKENS, WINDOW, STATE = BlockPart.TOKENS, BlockPart.WINDOW, BlockPart.STATE
LENGTH = 40


def layer(kind: type[Any] = KVCache, *arguments: int) -> Any:
    return kind(*arguments)


def count(tokens: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Return keys whose numbers are the positions of their tokens."""
    return mx.broadcast_to(mx.arange(tokens).reshape(1, 1, tokens, 1), (1, 2, tokens, 4)).astype(dtype)


def fill(dtype: mx.Dtype) -> Any:
    cache = layer()
    cache.update_and_fetch(count(LENGTH, dtype), -count(LENGTH, dtype))
    return cache


def cut(layers: list[Any], part: BlockPart, start: int, end: int) -> list[BlockArray]:
    launched = begin_cut(layers, part, start, end)
    assert launched is not None
    arrays = launched.collect()
    assert launched.nbytes == sum(array.nbytes for array in arrays)
    return arrays


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_keys_values_and_states_are_put_together_as_they_were(dtype: mx.Dtype):
    cache, state = fill(dtype), layer(ArraysCache, 2)
    state[0], state[1] = mx.ones((1, 3), dtype), mx.zeros((1, 2, 2), mx.float32)
    layers, empty = [cache, state], [layer(), layer(ArraysCache, 2)]
    builder = LayerBuilder(empty, LENGTH)
    builder.add_part(TOKENS, 0, 16, cut(layers, TOKENS, 0, 16))
    builder.add_part(TOKENS, 16, 16, cut(layers, TOKENS, 16, 32))
    builder.add_part(STATE, 32, 8, cut(layers, STATE, 32, LENGTH))
    built, restored = cast("list[Any]", builder.build())
    assert built.offset == LENGTH
    for mine, theirs in ((built.keys, cache.keys), (built.values, cache.values)):
        assert mine.dtype == dtype
        assert mx.array_equal(mine[..., :LENGTH, :], theirs[..., :LENGTH, :])
    assert [mx.array_equal(*pair) for pair in zip(restored.cache, state.cache, strict=True)] == [True, True]
    assert restored.cache[0].dtype == dtype


def test_a_state_without_further_tokens_has_no_keys():
    state = layer(ArraysCache, 1)
    state[0] = mx.ones((1, 3))
    arrays = cut([fill(mx.float32), state], STATE, 32, 32)
    assert [array.data.tolist() for array in arrays] == [[[1.0, 1.0, 1.0]]]
    builder = LayerBuilder([layer(), layer(ArraysCache, 1)], 32)
    builder.add_part(STATE, 32, 0, arrays)
    assert cast("Any", builder.build()[0]).keys is None


def store_window(*spans: tuple[int, int]) -> Any:
    pieces = [WindowPiece(start, count(end)[..., start:, :], -count(end)[..., start:, :]) for start, end in spans]
    return StoredWindow(16, tuple(pieces))


def test_windows_are_cut_across_recorded_pieces_and_kept_by_position():
    layers = [fill(mx.float32), store_window((0, 10), (10, 25), (25, LENGTH))]
    builder = LayerBuilder([layer(), layer(RotatingKVCache, 16)], LENGTH)
    for start, end in ((8, 24), (24, LENGTH)):
        builder.add_part(WINDOW, start, end - start, cut(layers, WINDOW, start, end))
    builder.add_part(TOKENS, 0, LENGTH, cut(layers, TOKENS, 0, LENGTH))
    built, window = cast("list[Any]", builder.build())
    assert built.offset == LENGTH
    assert [(piece.start, piece.end) for piece in window.pieces] == [(8, 24), (24, LENGTH)]
    assert window.max_size == 16
    assert window.pieces[1].keys[0, 0, :, 0].tolist() == list(range(24, LENGTH))
    assert window.pieces[1].values[0, 0, :, 0].tolist() == [-number for number in range(24, LENGTH)]


@pytest.mark.parametrize(
    ("layers", "part", "start", "end"),
    [
        ([store_window((0, 10), (12, LENGTH))], WINDOW, 8, 24),
        ([store_window((0, 20))], WINDOW, 8, 24),
        ([fill(mx.float32)], WINDOW, 0, 16),
        ([fill(mx.float32)], TOKENS, 16, 16),
        ([store_window((0, LENGTH))], TOKENS, 0, 16),
        ([layer(ArraysCache, 2)], STATE, 32, LENGTH),
        ([fill(mx.int32)], TOKENS, 0, 16),
        ([fill(mx.float32), fill(mx.int8)], TOKENS, 0, 16),
    ],
    ids=["gap", "not recorded", "no window", "no tokens", "window alone", "empty state", "integers", "one of integers"],
)
def test_what_is_not_there_or_has_no_type_of_a_file_is_not_cut(layers: Layers, part: BlockPart, start: int, end: int):
    assert begin_cut(layers, part, start, end) is None


def block(tokens: int, heads: int = 2) -> BlockArray:
    return BlockArray("float32", np.zeros((1, heads, tokens, 4), np.float32))


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ([block(16)], "do not suit"),
        ([block(16), block(16), block(16)], "too many"),
        ([block(15), block(16)], "another number"),
        ([block(16), block(15)], "another number"),
        ([block(16, 3), block(16, 3)], "do not suit"),
        ([BlockArray("float32", np.zeros(3, np.float32))] * 2, "do not suit"),
    ],
)
def test_arrays_that_do_not_fit_the_layers_are_refused(arrays: list[BlockArray], reason: str):
    builder = LayerBuilder([layer()], LENGTH)
    builder.add_part(TOKENS, 0, 16, [block(16), block(16)])
    with pytest.raises(InvalidBlockError, match=reason):
        builder.add_part(TOKENS, 16, 16, arrays)


@pytest.mark.parametrize(
    ("layers", "parts", "window"),
    [
        ([layer(), layer()], {TOKENS}, 0),
        ([layer(), layer(RotatingKVCache, 64), layer(RotatingKVCache, 96)], {TOKENS, WINDOW}, 96),
        ([layer(ArraysCache, 2), layer()], {TOKENS, STATE}, 0),
        ([layer(), layer(RotatingKVCache, 64), layer(ArraysCache, 2)], set(), 64),
        ([layer(RotatingKVCache, 64)], set(), 64),
        ([layer(), layer(CacheList, layer(), layer())], set(), 0),
        ([], set(), 0),
    ],
)
def test_the_disk_stores_keys_and_values_with_windows_or_states(layers: Layers, parts: set[BlockPart], window: int):
    assert list_parts(layers) == parts
    assert get_window(layers) == window


@pytest.mark.parametrize(("window", "blocks"), [(0, 0), (1, 1), (256, 1), (257, 2), (512, 2), (513, 3)])
def test_a_window_needs_all_blocks_that_it_touches(window: int, blocks: int):
    assert count_window_blocks(window) == blocks

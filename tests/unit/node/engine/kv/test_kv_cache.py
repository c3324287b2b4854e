from importlib import import_module
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from node.engine.kv.kv_cache import (
    CacheExtent,
    CacheTrimMode,
    LayerCache,
    UncountableCacheError,
    can_merge,
    compute_mean_capacity,
    copy_prefix,
    copy_single_row,
    count_arrays,
    find_trim_mode,
    grow_cache,
    grow_caches,
    is_plain,
    materialize,
    measure_extent,
    repeat_row,
    view_row,
)
from wire.report import CACHE_STEP_TOKENS

HEADS, WIDTH = 2, 4


def layer(kind: type[Any] = KVCache, *arguments: int) -> Any:
    return kind(*arguments)


def write(cache: Any, first: int, count: int) -> mx.array:
    """Write the numbers from `first` on, and return the complete content of the cache."""
    tokens = mx.arange(first, first + count, dtype=mx.float32).reshape(1, 1, count, 1)
    keys = mx.broadcast_to(tokens, (1, HEADS, count, WIDTH))
    return cache.update_and_fetch(keys, -keys)[0]


def grow(most: int, chunk: int, *, stretched: bool) -> tuple[list[float], int, int]:
    """Prefill a prompt in chunks; return the content of the cache, how often it grew, and its room."""
    cache, rooms, shown = layer(), [0], mx.array([])
    for begin in range(0, most, chunk):
        count = min(chunk, most - begin)
        if stretched:
            grow_caches([cache], count, most)
        shown = write(cache, begin, count)
        rooms.append(compute_mean_capacity([cache]))
    return cast("list[float]", shown[0, 0, :, 0].tolist()), len(set(rooms)) - 1, rooms[-1]


def test_a_copy_single_row_has_no_unused_room_and_grows_by_steps():
    plain, chunked = layer(), layer(ChunkedKVCache, 64)
    grow_caches([plain], 700, 4000)
    write(plain, 0, 700)
    grow_caches([plain], 600, 4000)
    for begin in (0, 70):
        chunked.maybe_trim_front()
        write(chunked, begin, 70)
    chunked.maybe_trim_front()
    rows = [plain, chunked]
    separate = cast("Any", copy_single_row(rows))
    assert rows == [], "each layer is released before the next one is copied"
    assert separate[0] is not plain
    assert [one.keys.shape[2] for one in separate] == [700, 64]
    assert [one.offset for one in separate] == [700, 140]
    assert write(separate[0], 700, 1)[0, 0, :, 0].tolist() == list(range(701))
    assert separate[0].keys.shape[2] == 700 + CACHE_STEP_TOKENS
    assert write(separate[1], 140, 1)[0, 0, :, 0].tolist() == list(range(76, 141))
    assert plain.offset == 700, "the row's former cache is unchanged"


def test_caches_merge_or_decode_alone_or_cannot_be_counted():
    assert can_merge([layer(), layer(RotatingKVCache, 8), layer(ArraysCache, 2)])
    assert not can_merge([layer(), layer(ChunkedKVCache, 8)])
    unknown = import_module("mlx_lm.models.deepseek_v41").LayerCache(8)
    with pytest.raises(UncountableCacheError, match="the memory of its LayerCache is unknown"):
        can_merge([layer(), unknown])


@given(most=st.integers(1, 3000), chunk=st.integers(1, 700))
def test_a_stretched_cache_shows_what_an_ordinary_one_does_and_has_no_more_room_than_its_prompt_may_have(
    most: int, chunk: int
):
    shown, grown, room = grow(most, chunk, stretched=True)
    assert shown == list(range(most))
    assert most <= room <= most + CACHE_STEP_TOKENS - 1
    plain, plainly, _ = grow(most, chunk, stretched=False)
    assert shown == plain
    assert grown <= plainly


def test_a_long_prompt_is_copied_a_few_times_and_not_at_every_step():
    assert grow(6000, 10, stretched=False)[1] == 24
    assert grow(6000, 10, stretched=True)[1] == 6


def test_beside_others_caches_double_one_at_a_time_and_in_time():
    layers, rooms = [layer() for _ in range(4)], list[list[int]]()
    for start in range(0, 3000, 20):
        grow_caches(cast("list[LayerCache]", layers), 20, 3000)
        grow_cache(cast("list[LayerCache]", layers), 20, 3000)
        shown = [cast("list[float]", write(one, start, 20)[0, 0, :, 0].tolist()) for one in layers]
        assert shown == [list(range(start + 20))] * 4
        rooms.append([one.keys.shape[2] for one in layers])
    grown = [sum(now != before for before, now in zip(*pair, strict=True)) for pair in pairwise(rooms)]
    assert max(grown) == 1, "also at the first doubling"
    assert sum(grown) <= 5 * 4, "each as often as without"
    assert max(rooms[-1]) <= 3000 + CACHE_STEP_TOKENS
    assert all(compute_mean_capacity(cast("list[LayerCache]", layers)) == sum(one) // 4 for one in rooms[-1:])


def test_what_is_kept_beyond_the_end_is_never_shown():
    cache = layer()
    write(cache, 0, 300)
    cache.trim(44)
    grow_caches([cache], 400, 2000)
    shown = cast("list[float]", write(cache, 256, 400)[0, 0, :, 0].tolist())
    assert shown == list(range(656))


@pytest.mark.parametrize(("kind", "arguments"), [(RotatingKVCache, (64,)), (ArraysCache, (2,))])
def test_windows_and_states_are_left_as_they_are(kind: type[Any], arguments: tuple[int, ...]):
    cache = layer(kind, *arguments)
    before = dict(vars(cache))
    grow_caches([cast("LayerCache", cache)], 500, 5000)
    assert vars(cache) == before
    assert compute_mean_capacity([cast("LayerCache", cache)]) == 0


TOKEN_BYTES = 2 * HEADS * WIDTH * 4
"""Bytes of a token in a layer."""


def show(cache: Any) -> list[float]:
    """Return the numbers that a row's cache holds."""
    return cast("list[float]", cache.keys[0, 0, : cache.offset, 0].tolist())


@pytest.mark.parametrize(
    ("layers", "mode", "plain"),
    [
        ([], CacheTrimMode.CUT, True),
        ([layer(), layer()], CacheTrimMode.CUT, True),
        ([layer(), layer(RotatingKVCache, 64)], CacheTrimMode.WINDOW, False),
        ([layer(RotatingKVCache, 64), layer(ArraysCache, 2)], CacheTrimMode.EXACT, False),
        ([layer(), layer(CacheList, layer(), layer())], CacheTrimMode.CUT, False),
        ([layer(), layer(CacheList, layer(), layer(RotatingKVCache, 64))], CacheTrimMode.EXACT, False),
        ([layer(ArraysCache, 2), layer(ChunkedKVCache, 64), layer()], CacheTrimMode.NEVER, False),
        ([layer(), layer(RotatingKVCache, 64, 4)], CacheTrimMode.NEVER, False),
    ],
    ids=["none", "all tokens", "window", "state", "nested", "nested window", "unknown", "window that keeps its start"],
)
def test_the_strictest_layer_decides_how_a_cache_can_be_cut(layers: list[Any], mode: CacheTrimMode, plain: bool):
    assert find_trim_mode(layers) is mode
    assert is_plain(layers) is plain


def test_an_extent_counts_bytes_and_the_room_of_growing_layers():
    cache, window, state = layer(), layer(RotatingKVCache, 64), layer(ArraysCache, 2)
    assert measure_extent([cache, window]) == CacheExtent(0, 0)
    state[0] = mx.zeros((1, 5))
    assert measure_extent([state]) == CacheExtent(20, 0)
    for one in (cache, window):
        write(one, 0, 100)
    assert window.keys.shape[2] == 100, "during a chunk a window holds more tokens than it counts"
    assert measure_extent([cache]) == CacheExtent(256 * TOKEN_BYTES, 256)
    assert measure_extent([window]) == CacheExtent(64 * TOKEN_BYTES, 0)
    assert measure_extent([cache, window, state]) == CacheExtent((256 + 64) * TOKEN_BYTES + 20, 256)


def test_arrays_of_all_kinds_of_layers_are_counted():
    cache, window, state = layer(), layer(RotatingKVCache, 64), layer(ArraysCache, 2)
    nested = layer(CacheList, layer(), layer())
    assert count_arrays([cache, window, state]) == 0
    state[0] = mx.zeros((1, 5))
    for one in (cache, window, *nested.caches):
        write(one, 0, 100)
    assert [count_arrays([one]) for one in (cache, window, state, nested)] == [2, 2, 1, 4]
    assert count_arrays([cache, window, state, nested]) == 9


def test_a_materialized_cache_holds_its_tokens_alone():
    cache, window, state = layer(), layer(RotatingKVCache, 64), layer(ArraysCache, 2)
    for start in (0, 100):
        for one in (cache, window):
            write(one, start, 100)
    write(window, 200, 1)
    state[1] = mx.array([[1.0, 2.0]])
    made: list[Any] = materialize([cache, window, state, layer()])
    assert show(made[0]) == list(range(200))
    assert made[0].keys.shape[2] == made[0].values.shape[2] == 200
    assert made[1].keys[0, 0, :, 0].tolist() == list(range(201 - 64, 201))
    shown = cast("list[float]", write(made[1], 201, 1)[0, 0, :, 0].tolist())
    assert sorted(shown) == list(range(202 - 64, 202))
    assert (made[2].cache[0], made[2].cache[1].tolist()) == (None, [[1.0, 2.0]])
    assert made[3].keys is None
    assert cache.keys.shape[2] == 256, "the source is as before"


def test_windows_and_states_are_copied_whole():
    window, state = layer(RotatingKVCache, 64), layer(ArraysCache, 1)
    write(window, 0, 100)
    state[0] = mx.array([1.0])
    made: list[Any] = copy_prefix([window, state], 100)
    assert made[0].keys[0, 0, :, 0].tolist() == window.keys[0, 0, :, 0].tolist()
    write(made[0], 100, 1)
    made[1][0] = mx.array([2.0])
    assert (window.offset, state[0].tolist()) == (100, [1.0])


def test_a_copied_prefix_is_another_row_s():
    cache = layer()
    write(cache, 0, 100)
    (copied,) = copy_prefix([cache], 30)
    assert show(copied) == list(range(30))
    write(copied, 500, 10)
    assert show(copied) == [*range(30), *range(500, 510)]
    assert show(cache) == list(range(100))


def test_rows_are_viewed_by_place_and_repeated():
    cache = layer()
    write(cache, 0, 20)
    repeated: list[Any] = repeat_row([cache], 3)
    assert repeated[0].keys.shape == repeated[0].values.shape == (3, HEADS, 20, WIDTH)
    both = layer()
    both.keys = mx.concatenate([cache.keys[..., :20, :], 100 + cache.keys[..., :20, :]])
    both.values, both.offset = -both.keys, 20
    for place, numbers in ((0, range(5, 12)), (1, range(105, 112))):
        view: list[Any] = view_row([both], place, 12, 5)
        assert (show(view[0]), view[0].offset) == (list(numbers), 7)
    assert show(view_row([both], 1, 12)[0]) == list(range(100, 112))

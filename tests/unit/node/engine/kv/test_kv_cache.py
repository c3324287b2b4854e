from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from node.engine.kv.kv_cache import LayerCache, compute_mean_capacity, grow_cache, grow_caches
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
    assert max(grown[256 // 20 :]) == 1
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

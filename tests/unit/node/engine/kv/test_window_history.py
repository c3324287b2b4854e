"""The history of sliding windows, with a real model whose window has 64 tokens."""

from typing import cast

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from node.engine.kv.kv_cache import Layers, TextModel, create_cache, sum_nbytes
from node.engine.kv.window_history import (
    WindowHistories,
    WindowHistory,
    begin_history,
    compute_cuts,
    extend_history,
    restore_layers,
)
from node.engine.models.loaded_model import run_forward
from tests import models
from tests.support.engine.text_engine import prefilled

CHUNK = 32
IDS = [10 + (place * place) % 490 for place in range(300)]


@pytest.fixture(scope="module")
def model() -> TextModel:
    return cast("TextModel", load_model(models.path("gemma3_text"))[0])


def read(model: TextModel, cache: Layers, start: int, end: int, history: WindowHistory | None = None) -> mx.array:
    """Prefill `IDS[start:end]` in chunks, and return the logits after it."""
    logits = None
    for place in range(start, end, CHUNK):
        piece = IDS[place : min(end, place + CHUNK)]
        logits = run_forward(model, piece, cache, last=place + CHUNK >= end)
        if history is not None:
            history.record(cache, len(piece))
    assert logits is not None
    return logits


@pytest.fixture(scope="module")
def stored(model: TextModel) -> Layers:
    cache, history = create_cache(model), WindowHistory()
    read(model, cache, 0, 288, history)
    return history.build_layers(cache, 288)


@pytest.mark.parametrize("length", [32, 64, 96, 160, 224, 288])
def test_a_window_is_restored_where_any_chunk_ended_without_a_difference(model: TextModel, stored: Layers, length: int):
    wanted = read(model, create_cache(model), 0, 300)
    assert compute_cuts(stored) == ((0, 288),)
    found = read(model, restore_layers(stored, length, copy=True), length, 300)
    assert mx.array_equal(found, wanted)


@pytest.mark.parametrize("length", [1, 33, 100, 287])
def test_it_is_restored_between_chunks_with_rounding_only(model: TextModel, stored: Layers, length: int):
    wanted = read(model, create_cache(model), 0, 300)
    found = read(model, restore_layers(stored, length, copy=True), length, 300)
    assert mx.allclose(found, wanted, atol=1e-3)
    assert mx.argmax(found).item() == mx.argmax(wanted).item()


def test_a_branch_continues_the_history_of_its_beginning(model: TextModel, stored: Layers):
    cache, history = restore_layers(stored, 96, copy=True), begin_history(stored, 96)
    read(model, cache, 96, 224, history)
    branch = history.build_layers(cache, 224)
    assert compute_cuts(branch) == ((0, 224),)
    assert mx.array_equal(
        read(model, restore_layers(branch, 64, copy=True), 64, 300), read(model, create_cache(model), 0, 300)
    )


def test_of_an_answer_only_the_last_window_can_be_restored(model: TextModel, stored: Layers):
    cache, _ = prefilled(model, IDS, CHUNK)
    short = extend_history([*cache], stored)
    assert compute_cuts(short) == ((0, 300),), "the answer is within the last window"
    early = begin_history(stored, 96).build_layers(cache, 96)
    assert compute_cuts(extend_history([*cache], early)) == ((0, 96), (300, 300)), "64 tokens from 236 on"


def test_without_a_history_nothing_can_be_cut(model: TextModel):
    cache, _ = prefilled(model, IDS[:100], CHUNK)
    assert compute_cuts(cache) == ()
    later = begin_history(cache, 100)
    assert compute_cuts(later.build_layers(cache, 100)) == ((100, 100),)


def test_histories_in_progress_are_counted_and_released(model: TextModel):
    histories, cache = WindowHistories(), create_cache(model)
    history = histories.add(WindowHistory())
    read(model, cache, 0, 64, history)
    assert histories.nbytes == history.nbytes == history.estimate_bytes(cache, 64)
    layers = history.build_layers(cache, 64)
    assert sum_nbytes(layers) == history.nbytes + sum(one.nbytes for one in cache if not hasattr(one, "max_size"))
    assert histories.clear() == sum(one.nbytes for one in layers if hasattr(one, "pieces"))
    assert history.is_lost
    assert (history.nbytes, histories.nbytes) == (0, 0)
    histories.remove(histories.add(other := WindowHistory()))
    del other
    assert histories.nbytes == 0


def test_a_history_is_cut_within_a_chunk_and_keeps_no_token_behind(model: TextModel):
    cache, history = create_cache(model), WindowHistory()
    assert not history.is_lost
    read(model, cache, 0, 128, history)
    layers = history.build_layers(cache, 100)
    assert compute_cuts(layers) == ((0, 100),)
    windows = [layer for layer in layers if hasattr(layer, "pieces")]
    whole = [layer for layer in history.build_layers(cache, 128) if hasattr(layer, "pieces")]
    assert [100 * one.nbytes // 128 for one in whole] == [one.nbytes for one in windows]


def test_a_window_that_is_not_full_begins_at_the_first_token(model: TextModel):
    cache, _ = prefilled(model, IDS[:40], CHUNK)
    layers = begin_history(cache, 40).build_layers(cache, 40)
    assert compute_cuts(layers) == ((0, 40),)
    wanted = read(model, create_cache(model), 0, 100)
    assert mx.allclose(read(model, restore_layers(layers, 40, copy=True), 40, 100), wanted, atol=1e-3)


def test_a_removed_history_counts_no_more_although_it_is_used(model: TextModel):
    histories = WindowHistories()
    history, other = histories.add(WindowHistory()), histories.add(WindowHistory())
    for one in (history, other):
        read(model, create_cache(model), 0, 32, one)
    assert histories.nbytes == history.nbytes + other.nbytes == 2 * history.nbytes > 0
    histories.remove(history)
    assert histories.nbytes == other.nbytes
    assert histories.clear() == history.nbytes
    assert (history.is_lost, history.nbytes > 0, other.is_lost) == (False, True, True)

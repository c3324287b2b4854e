"""Admitted requests for embeddings: tokens that are left, reserved bytes, and times."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from node.engine.embedding.request import BEGINNING, EmbeddingRequest, compute_cache_bytes
from node.engine.kv.kv_cache import sum_nbytes
from tests.support.engine.embedders import HIDDEN, make_embedder, make_reranker
from tests.support.engine.text_engine import Driver
from wire.capacity.batches import compute_row_bytes
from wire.frames import NUMBER_BYTES

FLOOR = 16
"""Tokens of the smallest chunk of the tests."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_embedder(root / "vectors", is_matryoshka=True)
    make_reranker(root / "scores")
    return root


@pytest.fixture
def driver(folder: Path) -> Iterator[Driver]:
    made = Driver(folder, min_prefill_step=FLOOR)
    made.vectors(made.embed("warm", model="vectors"))
    made.vectors(made.embed("warm", model="scores", query="q"))
    yield made
    made.engine.close()


def find(driver: Driver, number: int) -> EmbeddingRequest:
    """Return an admitted request whose forwards have not begun."""
    assert driver.admitted(number)
    request = driver.engine.parts.embedding_table.find(number)
    assert request is not None
    return request


def ids(*lengths: int) -> tuple[tuple[int, ...], ...]:
    """Return texts of these lengths in tokens, which begin with different tokens."""
    return tuple((place + 1,) * length for place, length in enumerate(lengths))


def test_texts_wait_from_the_longest_to_the_shortest_and_reserve_vectors_and_the_longest_cache(driver: Driver):
    request = find(driver, driver.embed(ids=ids(3, 40, 7), model="vectors"))
    kv = driver.resident("vectors").kv
    assert (request.waiting, request.left, request.has_ended, request.needs_beginning) == ([1, 2, 0], 50, False, False)
    assert request.compute_reserved_bytes() == 3 * HIDDEN * NUMBER_BYTES + compute_row_bytes(kv, 40)
    request.take([1])
    assert (request.waiting, request.left) == ([2, 0], 10)
    assert request.compute_reserved_bytes() == 2 * HIDDEN * NUMBER_BYTES, "short texts need no cache"
    request.take([0, 2])
    assert (request.left, request.compute_reserved_bytes(), request.has_ended) == (0, 0, True)


@pytest.mark.parametrize(("tokens", "has_cache"), [(FLOOR, False), (FLOOR + 1, True)])
def test_a_text_longer_than_the_smallest_chunk_needs_a_cache(driver: Driver, tokens: int, has_cache: bool):
    loaded = driver.resident("vectors")
    bytes_of_row = compute_row_bytes(loaded.kv, tokens)
    assert compute_cache_bytes(loaded, tokens, FLOOR) == (bytes_of_row if has_cache else 0)
    request = find(driver, driver.embed(ids=ids(tokens), model="vectors", dimensions=16))
    assert request.compute_reserved_bytes() == 16 * NUMBER_BYTES + (bytes_of_row if has_cache else 0)


def test_a_text_in_progress_reserves_what_its_cache_lacks(driver: Driver):
    request = find(driver, driver.embed(ids=ids(100), model="vectors"))
    whole = request.compute_reserved_bytes()
    text = request.create_next()
    assert (request.partial, request.left) == (None, 100), "the request is as before"
    request.begin_partial(text)
    request.begin_partial(text)
    assert (request.waiting, request.partial, request.left, request.has_ended) == ([], text, 100, False)
    assert request.compute_reserved_bytes() == whole
    text.record_chunk(30)
    assert (request.left, text.left) == (70, 70)
    request.end_partial()
    assert (text.cache, request.has_ended) == ([], True)


def test_the_cache_of_a_text_in_progress_is_no_longer_reserved(folder: Path):
    driver = Driver(folder, prefill_step_size=32, min_prefill_step=FLOOR)
    driver.vectors(driver.embed("warm", model="vectors"))
    request = find(driver, driver.embed(ids=ids(200), model="vectors"))
    whole = request.compute_reserved_bytes()
    driver.until(lambda: request.partial is not None and request.partial.cache and request.partial.stored_tokens)
    assert request.partial is not None
    held = min(sum_nbytes(request.partial.cache), compute_row_bytes(request.loaded_model.kv, 200))
    assert request.compute_reserved_bytes() == whole - held < whole
    driver.engine.close()


def test_a_shared_beginning_counts_once_and_its_cache_is_reserved_beside_the_longest_text(driver: Driver):
    query = "what do the rivers of this country have to do with its mountains? " * 3
    request = find(driver, driver.embed("Paris", "rain", "the sea", model="scores", query=query))
    loaded, inputs = driver.resident("scores"), request.prepared.inputs
    shared, longest = len(request.beginning), max(map(len, inputs))
    own = [len(text) - shared for text in inputs]
    assert shared > 32
    assert [request.count_own_tokens(place) for place in range(3)] == own
    assert (request.needs_beginning, request.left, request.count_beginning()) == (True, shared + sum(own), 0)
    caches = [compute_row_bytes(loaded.kv, tokens) for tokens in (shared, longest)]
    assert request.compute_reserved_bytes() == 3 * request.dimensions * NUMBER_BYTES + sum(caches)
    first = request.create_next()
    assert (first.place, tuple(first.ids)) == (BEGINNING, request.beginning)
    request.begin_partial(first)
    assert (request.needs_beginning, len(request.waiting), request.left) == (False, 3, shared + sum(own))
    first.record_chunk(shared)
    request.end_beginning()
    assert (request.partial, request.left, request.needs_beginning) == (None, sum(own), False)
    driver.cancel(request.number)


def test_a_computed_beginning_is_no_longer_reserved(driver: Driver):
    query = "what do the rivers of this country have to do with its mountains? " * 3
    request = find(driver, driver.embed("Paris", "rain", "the sea", model="scores", query=query))
    whole, texts = request.compute_reserved_bytes(), len(request.waiting)
    driver.until(lambda: request.beginning_cache)
    assert (request.count_beginning(), len(request.waiting)) == (len(request.beginning), texts)
    held = min(sum_nbytes(request.beginning_cache), compute_row_bytes(request.loaded_model.kv, len(request.beginning)))
    assert request.compute_reserved_bytes() == whole - held
    text = request.create_next()
    assert (text.stored_tokens, text.left) == (len(request.beginning), request.count_own_tokens(text.place))
    driver.vectors(request.number)
    assert request.beginning_cache == []


def test_a_wait_ends_with_a_forward_and_the_first_one_begins_the_request(driver: Driver):
    request = find(driver, driver.embed(ids=ids(3), model="vectors"))
    request.delay(50.0)
    assert (request.retry_at, request.begun) == (50.0, 0.0)
    for now in (60.0, 70.0):
        request.mark_begun(now)
        assert (request.retry_at, request.begun) == (0.0, 60.0)
    end = request.build_finished(request.begun + 4.0)
    assert (end.timings.waiting, end.timings.prefill) == (60.0 - request.arrived, 4.0)
    assert (end.request, end.prompt_tokens, end.cached_tokens) == (request.number, 3, 0)
    request.cached, request.restored_tokens = 3, 2
    assert request.build_finished(70.0).cached_tokens == 2, "not all tokens of its admission were still there"

"""The shared beginning of a request is stored for later requests of its key, and changes no score."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from node.engine.embedding.beginning_store import BeginningStore
from node.engine.embedding.request import EmbeddingRequest
from node.engine.kv.kv_cache import Layers, sum_nbytes
from node.engine.kv.prefix_memory import PrefixMemory
from node.engine.kv.prefix_store import PrefixCache
from tests.support.engine.embedders import make_reranker
from tests.support.engine.text_engine import Driver
from wire.capacity.fairness import WeightedKey
from wire.frames import SHARED_SCOPE, Failed, Finished
from wire.report import Memory
from wire.units import GIB

QUERY = "what do the rivers and mountains of this country have to do with the weather in its capital? " * 3
DOCUMENTS = ("Paris", "a text about rivers " * 9, "hello", "the capital of France is Paris", "rain " * 30)
OTHERS = ("London", "rain", "the sea " * 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_reranker(root / "scores")
    return root


@pytest.fixture
def driver(folder: Path) -> Iterator[Driver]:
    made = Driver(folder)
    made.vectors(made.embed("warm", query="q"))
    yield made
    made.engine.close()


def count_prefilled(driver: Driver) -> int:
    """Return the tokens of all forwards so far."""
    return driver.engine.report(0.0).counts.prefill_tokens


def score(driver: Driver, *documents: str, query: str = QUERY, **fields: Any) -> tuple[np.ndarray, int, int]:
    """Return the scores of documents, the tokens of the forwards for them, and the tokens from the prefix cache."""
    before = count_prefilled(driver)
    number = driver.embed(*documents, query=query, **fields)
    scores = driver.vectors(number)[:, 0]
    end = driver.ended(number)
    assert isinstance(end, Finished)
    return scores, count_prefilled(driver) - before, end.cached_tokens


def find_request(driver: Driver, number: int) -> EmbeddingRequest:
    """Return an admitted request by its number."""
    driver.until(lambda: driver.admitted(number))
    request = driver.engine.parts.embedding_table.find(number)
    assert request is not None
    return request


def test_a_later_request_computes_its_documents_only(driver: Driver):
    expected, alone, _ = score(driver, *OTHERS, weighted_key=WeightedKey("other"))
    _, _, cached = score(driver, *DOCUMENTS)
    assert cached == 0
    scores, prefilled, cached = score(driver, *OTHERS)
    assert cached > 60
    assert prefilled == alone - cached
    assert np.abs(scores - expected).max() < 1e-6
    report = driver.engine.report(0.0)
    assert (report.cache.hits, report.cache.hit_tokens) == (1, cached)
    assert report.memory.reserved == 0


@pytest.mark.parametrize("count", [1, 2])
def test_few_documents_use_a_stored_beginning(driver: Driver, count: int):
    expected, alone, cached = score(driver, *OTHERS[:count])
    assert cached == 0
    score(driver, *DOCUMENTS)
    scores, prefilled, cached = score(driver, *OTHERS[:count])
    assert prefilled == alone - count * cached
    assert cached > 60
    assert np.abs(scores - expected).max() < 1e-6


def test_a_query_that_continues_a_stored_one_computes_the_rest_of_its_beginning(driver: Driver):
    longer = QUERY + "and with its lakes? " * 4
    expected, alone, cached = score(driver, *OTHERS, query=longer)
    assert cached == 0
    driver.engine.parts.prefix_cache.evict_until(lambda: False)
    score(driver, *DOCUMENTS)
    scores, prefilled, cached = score(driver, *OTHERS, query=longer)
    assert cached > 60
    assert prefilled == alone - cached
    assert np.abs(scores - expected).max() < 1e-6


def test_keys_share_no_beginning_unless_the_pool_does(driver: Driver):
    score(driver, *DOCUMENTS, weighted_key=WeightedKey("a"))
    assert score(driver, *OTHERS, weighted_key=WeightedKey("b"))[2] == 0
    assert score(driver, *OTHERS, weighted_key=WeightedKey("a"))[2] > 60
    score(driver, *DOCUMENTS, weighted_key=WeightedKey("a"), cache_scope=SHARED_SCOPE)
    assert score(driver, *OTHERS, weighted_key=WeightedKey("c"), cache_scope=SHARED_SCOPE)[2] > 60


def test_a_stored_beginning_holds_memory_of_its_own_and_counts_as_cached(driver: Driver):
    score(driver, *DOCUMENTS)
    (entry,) = driver.engine.parts.prefix_cache.entries
    assert entry.nbytes == sum_nbytes(entry.value or []) == entry.length * driver.resident().kv.per_token
    assert driver.engine.report(0.0).memory.reusable > 0
    mx.clear_cache()
    held = mx.get_active_memory()
    driver.engine.parts.prefix_cache.evict_until(lambda: False)
    mx.clear_cache()
    assert held - mx.get_active_memory() >= entry.nbytes


def open_store(entries: PrefixCache[Layers], headroom: int) -> BeginningStore:
    """Return a store over these entries, in an engine with `headroom` bytes."""
    memory = Memory(cap=GIB, ceiling=GIB, active=0, phys=GIB - headroom)
    return BeginningStore(entries, PrefixMemory(entries, lambda: memory, lambda cap: cap, lambda: None))


def test_nothing_is_copied_without_room_for_the_copy(driver: Driver):
    complete, later = (find_request(driver, driver.embed(*DOCUMENTS, query=QUERY)) for _ in range(2))
    driver.until(lambda: complete.beginning_cache)
    entries, size = PrefixCache[Layers](), len(complete.beginning) * driver.resident().kv.per_token
    open_store(entries, size - 1).store(complete)
    assert not entries.entries
    open_store(entries, size).store(complete)
    (entry,) = entries.entries
    assert entry.nbytes == size
    open_store(entries, size - 1).restore(later)
    assert later.needs_beginning
    open_store(entries, size).restore(later)
    assert not later.needs_beginning
    assert later.beginning_cache


def test_nothing_is_stored_where_the_prefix_cache_is_off(folder: Path):
    driver = Driver(folder, prefix_cache_size="off")
    for _ in range(2):
        assert score(driver, *DOCUMENTS)[2] == 0
    assert not driver.engine.parts.prefix_cache.entries
    driver.engine.close()


def test_after_a_fault_no_stored_beginning_is_used(driver: Driver):
    expected, _, _ = score(driver, *DOCUMENTS)
    loaded, head = driver.resident(), driver.resident().head
    assert head is not None
    layers: Any = head.run_layers
    broken = dataclasses.replace(head, run_layers=lambda ids, **more: layers(ids, **more) * mx.array(mx.nan))
    driver.engine.parts.models.put(dataclasses.replace(loaded, head=broken))
    assert isinstance(driver.end(driver.embed(*DOCUMENTS, query=QUERY)), Failed)
    driver.engine.parts.models.put(loaded)
    scores, _, cached = score(driver, *DOCUMENTS)
    assert cached == 0
    assert np.abs(scores - expected).max() < 1e-6


def test_a_query_that_parts_from_a_stored_one_uses_what_they_share(driver: Driver):
    one, other = (QUERY + f"and with its {name}? " * 3 for name in ("lakes", "towns"))
    expected, alone, _ = score(driver, *OTHERS, query=other, weighted_key=WeightedKey("other"))
    score(driver, *DOCUMENTS, query=one)
    scores, prefilled, cached = score(driver, *OTHERS, query=other)
    assert cached > 60
    assert prefilled == alone - cached
    assert np.abs(scores - expected).max() < 1e-6


def test_a_beginning_is_stored_once(driver: Driver):
    score(driver, *DOCUMENTS)
    before = driver.engine.report(0.0).cache
    score(driver, *OTHERS)
    after = driver.engine.report(0.0).cache
    assert (after.stores, after.entries, after.hits) == (before.stores, before.entries, before.hits + 1)

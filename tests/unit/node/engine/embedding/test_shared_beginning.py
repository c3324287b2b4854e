"""The beginning that the texts of one request share is computed once, through the gate, and changes no score."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from node.engine.embedding.request import EmbeddingRequest, compute_cache_bytes
from node.engine.embedding.runner import WaitingText, estimate_batch_bytes
from node.engine.embedding.shared_beginning import count_shared_tokens
from node.engine.kv.kv_cache import sum_nbytes
from node.engine.memory.gate import GateSite
from node.engine.models.model_stats import ModelStats
from tests.support.engine.embedders import make_embedder, make_reranker
from tests.support.engine.text_engine import Driver
from wire.frames import NUMBER_BYTES, Finished, Refusal
from wire.refusals import RefusalCode

QUERY = "what do the rivers and mountains of this country have to do with the weather in its capital? " * 3
DOCUMENTS = ("Paris", "a text about rivers " * 9, "hello", "the capital of France is Paris", "rain " * 30)


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


def count_tokens(driver: Driver, documents: Sequence[str]) -> tuple[int, int]:
    """Return the tokens of the prompts for documents, and of their shared beginning."""
    tokenizer = driver.tokenizer()
    prompts = [
        tokenizer.encode(f"Query: {QUERY}\nDocument: {document}\nAnswer:", plain=False) for document in documents
    ]
    return sum(map(len, prompts)), count_shared_tokens(prompts)


def count_prefilled(driver: Driver) -> int:
    """Return the tokens of all forwards so far."""
    return driver.engine.report(0.0).counts.prefill_tokens


def test_the_beginning_runs_once_and_the_scores_are_those_of_single_documents(driver: Driver):
    alone = [driver.vectors(driver.embed(document, query=QUERY))[0, 0] for document in DOCUMENTS]
    before = count_prefilled(driver)
    number = driver.embed(*DOCUMENTS, query=QUERY)
    together = driver.vectors(number)[:, 0]
    tokens, shared = count_tokens(driver, DOCUMENTS)
    assert shared > 60
    assert count_prefilled(driver) - before == tokens - (len(DOCUMENTS) - 1) * shared
    assert np.abs(together - alone).max() < 1e-5
    end = driver.ended(number)
    assert isinstance(end, Finished)
    assert end.prompt_tokens == tokens
    assert driver.engine.report(0.0).memory.reserved == 0


def test_the_pace_is_measured_with_the_tokens_before_each_text(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    measured: list[tuple[int, float]] = []
    record = ModelStats.record_prefill

    def noted(stats: ModelStats, tokens: int, seconds: float, back: float) -> None:
        measured.append((tokens, back))
        record(stats, tokens, seconds, back)

    monkeypatch.setattr(ModelStats, "record_prefill", noted)
    driver.vectors(driver.embed(*DOCUMENTS, query=QUERY))
    _, shared = count_tokens(driver, DOCUMENTS)
    assert measured[0] == (shared, pytest.approx(shared / 2))
    assert len(measured) > 1
    assert all(back > shared for _, back in measured[1:])


def test_long_documents_continue_the_beginning_in_chunks(folder: Path, driver: Driver):
    documents = ("a text of many words " * 40, "rain " * 200, "short")
    alone = [driver.vectors(driver.embed(document, query=QUERY))[0, 0] for document in documents]
    chunked = Driver(folder, prefill_step_size=32, min_prefill_step=16)
    together = chunked.vectors(chunked.embed(*documents, query=QUERY))[:, 0]
    assert np.abs(together - alone).max() < 1e-5
    tokens, shared = count_tokens(driver, documents)
    assert count_prefilled(chunked) == tokens - 2 * shared
    chunked.engine.close()


def test_requests_at_once_keep_their_own_beginnings(driver: Driver):
    other = QUERY.replace("rivers", "lakes")
    plain = ("hello", "rain " * 60), "q"
    short = ("Paris", "hello", "rain " * 9)
    asked = [(short, QUERY), plain, (short, other), plain, (DOCUMENTS, QUERY)]
    alone = {case: driver.vectors(driver.embed(*case[0], query=case[1])) for case in dict.fromkeys(asked)}
    expected = [alone[case] for case in asked]
    driver.engine.parts.prefix_cache.evict_until(lambda: False)
    numbers = [driver.embed(*documents, query=query) for documents, query in asked]
    for number, scores in zip(numbers, expected, strict=True):
        assert np.abs(driver.vectors(number) - scores).max() < 1e-5
    assert np.abs(expected[0] - expected[2]).max() > 1e-5


def admit(driver: Driver) -> EmbeddingRequest:
    """Send a request with a shared beginning; return it, admitted."""
    number = driver.embed(*DOCUMENTS, query=QUERY)
    driver.until(lambda: driver.admitted(number))
    request = driver.engine.parts.embedding_table.find(number)
    assert request is not None
    assert len(request.beginning) > 60
    return request


def test_a_beginning_counts_as_reserved_until_the_request_ends(driver: Driver):
    request = admit(driver)
    vectors = len(DOCUMENTS) * request.dimensions * NUMBER_BYTES
    longest = max(map(len, request.prepared.inputs))
    caches = [compute_cache_bytes(driver.resident(), tokens, 0) for tokens in (len(request.beginning), longest)]
    assert driver.engine.report(0.0).memory.reserved == vectors + sum(caches)
    driver.cancel(request.number)
    assert driver.engine.report(0.0).memory.reserved == 0


def test_the_longest_text_stays_reserved_while_the_beginning_runs(folder: Path):
    driver = Driver(folder, prefill_step_size=32, min_prefill_step=16)
    request = admit(driver)
    driver.until(lambda: request.partial is not None)
    assert request.waiting
    longest = compute_cache_bytes(driver.resident(), max(map(len, request.prepared.inputs)), 0)
    beginning = compute_cache_bytes(driver.resident(), len(request.beginning), 0)
    held = request.partial.cache if request.partial else []
    assert request.compute_reserved_bytes() + sum_nbytes(held) >= longest + beginning
    driver.engine.close()


def test_the_gate_is_checked_for_the_copies_of_the_beginning(driver: Driver):
    request = admit(driver)
    texts = [WaitingText(request, place) for place in request.waiting]
    longest = len(texts[0].ids)
    own = longest - len(request.beginning)
    forward = driver.resident().estimator.estimate_packed(len(texts), own, len(request.beginning))
    copies = len(texts) * compute_cache_bytes(driver.resident(), longest, 0)
    assert estimate_batch_bytes(texts) == forward + copies


def test_without_room_for_copies_documents_run_one_by_one(driver: Driver):
    expected = driver.vectors(driver.embed(*DOCUMENTS, query=QUERY))
    shape = driver.resident()
    _, shared = count_tokens(driver, DOCUMENTS)
    most = 3 * (shared + 200) * shape.kv.per_token + shape.estimator.estimate_chunk(shared, 0)
    driver.gate.refuses = lambda site, estimate: site is GateSite.EMBED and estimate > most
    assert np.abs(driver.vectors(driver.embed(*DOCUMENTS, query=QUERY)) - expected).max() < 1e-5
    assert driver.engine.report(0.0).counts.shrinks > 0


def test_no_beginning_runs_without_room(driver: Driver):
    driver.gate.refuses = lambda site, estimate: site is GateSite.EMBED
    before = count_prefilled(driver)
    end = driver.end(driver.embed(*DOCUMENTS, query=QUERY))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NO_ROOM
    assert count_prefilled(driver) == before
    assert driver.engine.report(0.0).memory.reserved == 0


@pytest.mark.parametrize(
    ("documents", "query"), [(DOCUMENTS[:2], QUERY), (DOCUMENTS, "short")], ids=["two texts", "a short beginning"]
)
def test_a_beginning_that_saves_little_is_not_separated(driver: Driver, documents: tuple[str, ...], query: str):
    before = count_prefilled(driver)
    number = driver.embed(*documents, query=query)
    driver.vectors(number)
    end = driver.ended(number)
    assert isinstance(end, Finished)
    assert count_prefilled(driver) - before == end.prompt_tokens


def test_a_model_that_reads_all_states_computes_whole_texts(tmp_path: Path):
    make_embedder(tmp_path / "vectors", modes=("pooling_mode_mean_tokens",))
    driver = Driver(tmp_path)
    texts = [QUERY + document for document in DOCUMENTS]
    number = driver.embed(*texts)
    together = driver.vectors(number)
    alone = np.concatenate([driver.vectors(driver.embed(text)) for text in texts])
    assert np.abs(together - alone).max() < 1e-5
    end = driver.ended(number)
    assert isinstance(end, Finished)
    assert count_prefilled(driver) == 2 * end.prompt_tokens
    driver.engine.close()


@pytest.mark.parametrize(
    ("texts", "shared"),
    [([(1, 2, 3), (1, 2, 4), (1, 2)], 1), ([(1, 2), (1, 2)], 1), ([(1, 5), (2, 5)], 0), ([(7,), (7, 8)], 0)],
)
def test_at_least_one_token_of_each_text_is_its_own(texts: list[tuple[int, ...]], shared: int):
    assert count_shared_tokens(texts) == shared

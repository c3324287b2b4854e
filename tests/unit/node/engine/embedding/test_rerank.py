"""Scores of documents on a real engine with a tiny decoder: numbers, prompts, cuts, the gate, and refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from node.engine.memory.gate import GateSite
from node.engine.text.tokenizer import TOKENIZE_SLICE_CHARS
from tests.support.engine.embedders import make_embedder, make_reranker
from tests.support.engine.text_engine import Driver
from wire.frames import Admitted, Embed, Finished, Refusal
from wire.refusals import RefusalCode

QUERY = "what is the capital of France?"
DOCUMENTS = ("Paris", "a text about rivers and mountains " * 12, "hello", "the capital of France is Paris")
TOKENS = 5, 9
CONTEXT = 128
"""Context of a model with little room, in tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_reranker(root / "scores", TOKENS)
    return root


@pytest.fixture
def driver(folder: Path) -> Iterator[Driver]:
    made = Driver(folder)
    yield made
    made.engine.close()


def score(driver: Driver, documents: tuple[str, ...], query: str = QUERY, **fields: Any) -> np.ndarray:
    """Return the scores of documents by the engine."""
    found = driver.vectors(driver.embed(*documents, query=query, **fields))
    assert found.shape == (len(documents), 1)
    return found[:, 0]


def reference(driver: Driver, text: str, tokens: tuple[int, int | None] = TOKENS) -> float:
    """Return the score of a prompt by the logits of the complete model at its last token."""
    ids = driver.tokenizer().encode(text, plain=False)
    model: Any = driver.resident().model
    logits = np.array(model(mx.array([list(ids)]))[0, -1], np.float64)
    value = logits[tokens[0]] - (0 if tokens[1] is None else logits[tokens[1]])
    return 1 / (1 + np.exp(-value))


def render(document: str, query: str = QUERY) -> str:
    return f"Query: {query}\nDocument: {document}\nAnswer:"


def test_scores_are_those_of_the_logits_of_the_model(driver: Driver):
    number = driver.embed(*DOCUMENTS, query=QUERY)
    together = driver.vectors(number)[:, 0]
    expected = [reference(driver, render(document)) for document in DOCUMENTS]
    assert len({round(one, 4) for one in expected}) == len(DOCUMENTS)
    assert np.abs(together - expected).max() < 1e-5
    alone = np.concatenate([score(driver, (document,)) for document in DOCUMENTS])
    assert np.abs(together - alone).max() < 1e-5
    (admitted,) = [frame for frame in driver.said[number] if isinstance(frame, Admitted)]
    end = driver.ended(number)
    tokens = sum(len(driver.tokenizer().encode(render(document), plain=False)) for document in DOCUMENTS)
    assert isinstance(end, Finished)
    assert admitted.prompt_tokens == end.prompt_tokens == tokens


def test_a_long_document_runs_in_chunks_over_a_cache(folder: Path):
    driver = Driver(folder, prefill_step_size=32, min_prefill_step=16)
    document = "a text of many words " * 40
    found = score(driver, (document, "short"))
    assert driver.gate.checks[GateSite.EMBED] > 5
    assert abs(found[0] - reference(driver, render(document))) < 1e-5
    driver.engine.close()


def test_one_token_alone_may_be_the_score(tmp_path: Path):
    make_reranker(tmp_path / "scores", (5, None))
    driver = Driver(tmp_path)
    assert abs(score(driver, ("Paris",))[0] - reference(driver, render("Paris"), (5, None))) < 1e-5
    driver.engine.close()


def test_a_model_without_a_template_gets_the_prompt_of_qwen(tmp_path: Path):
    make_reranker(tmp_path / "scores", template="")
    driver = Driver(tmp_path)
    text = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        f"<Query>: {QUERY}\n<Document>: Paris<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert abs(score(driver, ("Paris",))[0] - reference(driver, text)) < 1e-5
    driver.engine.close()


def test_a_document_is_cut_and_the_end_of_the_prompt_stays(tmp_path: Path):
    make_reranker(tmp_path / "scores", max_position_embeddings=CONTEXT)
    driver = Driver(tmp_path)
    document, head = "word " * CONTEXT, f"Query: {QUERY}\nDocument: "
    end = driver.end(driver.embed("x", document, query=QUERY))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.CONTEXT
    assert "truncate" in end.refused.message
    tokenizer = driver.tokenizer()
    begun, tail = tokenizer.encode(head, plain=False), tokenizer.encode("\nAnswer:", plain=False)
    body = tokenizer.encode(head + document, plain=False)
    for truncate, most, room in ((True, 0, CONTEXT - len(tail)), (False, 7, len(begun) + 7)):
        cut = driver.embed(document, query=QUERY, truncate=truncate, max_tokens=most)
        driver.vectors(cut)
        done = driver.ended(cut)
        assert isinstance(done, Finished)
        assert done.prompt_tokens == len(body[:room]) + len(tail)
    very_long = driver.embed("word " * TOKENIZE_SLICE_CHARS, query=QUERY, max_tokens=7)
    driver.vectors(very_long)
    assert isinstance(driver.ended(very_long), Finished), "its length is not checked before the cut"
    driver.engine.close()


def test_a_query_without_room_for_a_document_is_refused(tmp_path: Path):
    make_reranker(tmp_path / "scores", max_position_embeddings=CONTEXT)
    driver = Driver(tmp_path)
    end = driver.end(driver.embed("x", query="word " * CONTEXT, truncate=True))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.CONTEXT
    assert "the query has" in end.refused.message
    driver.engine.close()


def test_every_forward_passes_the_gate(driver: Driver):
    score(driver, ("warm",))
    driver.gate.refuses = lambda site, estimate: site is GateSite.EMBED
    end = driver.end(driver.embed(*DOCUMENTS, query=QUERY))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NO_ROOM


def test_a_query_counts_with_each_document(driver: Driver):
    one, many = (
        driver.engine.parts.preparer.compute_need_bytes(Embed(1, 1, "r", "scores", ("x",) * 2000, query=query))
        for query in ("x", "a longer query " * 100)
    )
    assert many > one + 2000 * 1000


def test_requests_for_another_kind_name_the_route(tmp_path: Path):
    make_reranker(tmp_path / "scores")
    make_embedder(tmp_path / "vectors")
    driver = Driver(tmp_path)
    for number, route in (
        (driver.ask(model="scores"), "/v1/rerank"),
        (driver.embed("x", model="scores"), "/v1/rerank"),
        (driver.embed("x", query="q", model="vectors"), "/v1/embeddings"),
    ):
        end = driver.end(number)
        assert isinstance(end, Refusal)
        assert end.refused.code is RefusalCode.UNSUPPORTED
        assert route in end.refused.message
    features = {model.name: model.features for model in driver.engine.report(0.0).models}
    assert features == {"scores": ("rerank",), "vectors": ("embed",)}
    driver.engine.close()


def test_a_token_that_the_model_does_not_have_is_no_score(tmp_path: Path):
    make_reranker(tmp_path / "scores", (5, 512))
    driver = Driver(tmp_path)
    end = driver.end(driver.embed("x", query="q"))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.LOAD_FAILED
    assert "[5, 512]" in end.refused.message
    assert "512" in end.refused.message
    driver.engine.close()

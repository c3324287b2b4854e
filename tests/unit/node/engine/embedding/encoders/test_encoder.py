"""Encoders on a real engine, compared with a reference in numpy: vectors, scores, segments, cuts and the gate."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from node.engine.embedding.encoders.bert import list_bert_rows
from node.engine.embedding.encoders.weights import EncoderWeights, list_layer_names
from node.engine.memory.gate import GateSite
from node.models.encoder_files import read_encoder_shape
from tests.support.engine.encoders import CONTEXT, WORDS, EncoderReference, make_encoder
from tests.support.engine.text_engine import Driver
from wire.frames import Finished, ProfileModel, Refusal
from wire.refusals import RefusalCode

KINDS = ("bert", "roberta", "xlm-roberta", "modernbert")
TEXTS = ("w1 w2 w3", "w9", " ".join(f"w{number % 50}" for number in range(40)), "w7 w7 w8")
QUERY = "w4 w5"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def start() -> Iterator[Any]:
    drivers: list[Driver] = []

    def begin(folder: Path, **settings: Any) -> Driver:
        drivers.append(Driver(folder, **settings))
        return drivers[-1]

    yield begin
    for one in drivers:
        one.engine.close()


def tokens(text: str) -> list[int]:
    return [1, *(WORDS.index(word) for word in text.split()), 2]


def pair(document: str, query: str = QUERY) -> tuple[list[int], int]:
    """Return the tokens of a pair, and the place of the first token of the document."""
    first = tokens(query)
    return [*first, *tokens(document)[1:]], len(first)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_vectors_are_those_of_the_reference(tmp_path: Path, start: Any, kind: str, pooling: str):
    reference = EncoderReference(kind, make_encoder(tmp_path / "m", kind, pooling=pooling))
    driver = start(tmp_path)
    together = driver.vectors(driver.embed(*TEXTS))
    for row, text in zip(together, TEXTS, strict=True):
        states = reference.states(tokens(text))
        expected = states[0] if pooling == "cls" else states.mean(axis=0)
        assert np.abs(row - expected / np.linalg.norm(expected)).max() < 1e-5
    alone = np.concatenate([driver.vectors(driver.embed(text)) for text in TEXTS])
    assert np.abs(together - alone).max() < 1e-6


@pytest.mark.parametrize("mean", [False, True])
def test_scores_are_those_of_the_reference(tmp_path: Path, start: Any, kind: str, mean: bool):
    config = {"classifier_pooling": "mean" if mean else "cls"}
    reference = EncoderReference(kind, make_encoder(tmp_path / "m", kind, config, classifier=True))
    driver = start(tmp_path)
    number = driver.embed(*TEXTS, query=QUERY)
    scores = driver.vectors(number)
    assert scores.shape == (len(TEXTS), 1)
    expected = [reference.score(*pair(text), mean=mean) for text in TEXTS]
    assert np.abs(scores[:, 0] - expected).max() < 1e-5
    assert len({round(one, 4) for one in expected}) > 2
    end = driver.ended(number)
    assert isinstance(end, Finished)
    assert end.prompt_tokens == sum(len(pair(text)[0]) for text in TEXTS)


def test_the_document_of_a_pair_has_another_segment(tmp_path: Path, start: Any):
    reference = EncoderReference("bert", make_encoder(tmp_path / "m", "bert", classifier=True))
    ids, segment = pair("w1 w2")
    assert abs(reference.score(ids, segment) - reference.score(ids)) > 1e-3
    driver = start(tmp_path)
    score = driver.vectors(driver.embed("w1 w2", query=QUERY))[0, 0]
    assert abs(score - reference.score(ids, segment)) < 1e-5


def test_a_text_is_never_cut_into_chunks(tmp_path: Path, start: Any, kind: str):
    reference = EncoderReference(kind, make_encoder(tmp_path / "m", kind, pooling="mean"))
    driver = start(tmp_path, prefill_step_size=16, min_prefill_step=8)
    text = " ".join(f"w{number % 50}" for number in range(CONTEXT - 2))
    found = driver.vectors(driver.embed(text, "w1"))
    expected = reference.states(tokens(text)).mean(axis=0)
    assert np.abs(found[0] - expected / np.linalg.norm(expected)).max() < 1e-5
    assert driver.engine.report(0.0).memory.reserved == 0


def test_a_document_is_cut_and_the_query_stays(tmp_path: Path, start: Any):
    reference = EncoderReference("bert", make_encoder(tmp_path / "m", "bert", classifier=True))
    driver = start(tmp_path)
    words = [f"w{number % 50}" for number in range(2 * CONTEXT)]
    end = driver.end(driver.embed(" ".join(words), query=QUERY))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.CONTEXT
    assert f"{2 * CONTEXT + 5} tokens" in end.refused.message
    assert str(CONTEXT) in end.refused.message
    for truncate, most, kept in ((True, 0, CONTEXT - 5), (False, 7, 7), (True, 7, 7), (True, CONTEXT, CONTEXT - 5)):
        found = driver.vectors(driver.embed(" ".join(words), query=QUERY, truncate=truncate, max_tokens=most))
        assert abs(found[0, 0] - reference.score(*pair(" ".join(words[:kept])))) < 1e-5
    fits = " ".join(words[: CONTEXT - 4])
    assert driver.vectors(driver.embed("w1", query=fits, truncate=True)).shape == (1, 1)
    for query in (" ".join(words[: CONTEXT - 3]), " ".join(words)):
        end = driver.end(driver.embed("w1", query=query, truncate=True))
        assert isinstance(end, Refusal)
        assert "the query has" in end.refused.message


def test_a_text_that_is_cut_keeps_the_tokens_around_it(tmp_path: Path, start: Any):
    make_encoder(tmp_path / "m", "bert")
    driver = start(tmp_path)
    words = [f"w{number % 50}" for number in range(2 * CONTEXT)]
    number = driver.embed(" ".join(words), truncate=True)
    same = driver.vectors(driver.embed(" ".join(words[: CONTEXT - 2])))
    assert np.abs(driver.vectors(number) - same).max() < 1e-6
    end = driver.ended(number)
    assert isinstance(end, Finished)
    assert end.prompt_tokens == CONTEXT


def test_no_forward_of_an_encoder_runs_without_room(tmp_path: Path, start: Any):
    make_encoder(tmp_path / "m", "bert")
    driver = start(tmp_path, prefill_step_size=16, min_prefill_step=8)
    driver.vectors(driver.embed("w1"))
    driver.gate.refuses = lambda site, estimate: site is GateSite.EMBED
    long = " ".join(["w1"] * 60)
    for texts in ((long,), ("w1", "w2")):
        end = driver.end(driver.embed(*texts))
        assert isinstance(end, Refusal)
        assert end.refused.code is RefusalCode.NO_ROOM
    driver.gate.refuses = lambda site, estimate: False
    driver.vectors(driver.embed(long))
    whole = [estimate for site, estimate in driver.gate.asked if site is GateSite.EMBED][-1]
    assert whole >= 2 * 4 * 4 * 62**2, "the scores of all pairs of tokens in four heads, twice"


def test_an_encoder_has_no_rows_to_measure_and_answers_no_chats(tmp_path: Path, start: Any):
    make_encoder(tmp_path / "m", "bert", classifier=True)
    driver = start(tmp_path)
    end = driver.end(driver.ask())
    assert isinstance(end, Refusal)
    assert "/v1/rerank" in end.refused.message
    driver.take(ProfileModel(99, "m"))
    end = driver.end(99)
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.UNSUPPORTED
    assert "m is an encoder" in end.refused.message
    report = driver.engine.report(0.0).models[0]
    assert report.features == ("rerank",)
    assert report.context == CONTEXT
    assert report.kv_per_token == 0


def test_older_names_and_quantized_weights_are_read(tmp_path: Path, start: Any):
    weights = make_encoder(tmp_path / "whole", "bert")
    reference = EncoderReference("bert", weights)
    packed: dict[str, mx.array] = {}
    for name, array in weights.items():
        if array.ndim == 2 and name.startswith("encoder.layer.0.attention.self"):
            parts = mx.quantize(mx.array(array), group_size=32, bits=8)
            reference.weights[name] = np.array(mx.dequantize(*parts, group_size=32, bits=8), np.float64)
            ends = ("weight", "scales", "biases")
            packed |= {name.replace("weight", end): part for end, part in zip(ends, parts, strict=True)}
        else:
            older = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            packed[older] = mx.array(array)
    mx.save_safetensors(str(tmp_path / "whole/model.safetensors"), packed)
    config = (tmp_path / "whole/config.json").read_text().rstrip("}")
    (tmp_path / "whole/config.json").write_text(config + ', "quantization": {"group_size": 32, "bits": 8}}')
    driver = start(tmp_path)
    states = reference.states(tokens("w1 w2"))
    found = driver.vectors(driver.embed("w1 w2"))[0]
    assert np.abs(found - states[0] / np.linalg.norm(states[0])).max() < 1e-5


def test_a_missing_weight_is_the_reason(tmp_path: Path, start: Any):
    weights = make_encoder(tmp_path / "m", "bert")
    kept = {name: mx.array(array) for name, array in weights.items() if name != "encoder.layer.1.output.dense.bias"}
    mx.save_safetensors(str(tmp_path / "m/model.safetensors"), kept)
    driver = start(tmp_path)
    end = driver.end(driver.embed("w1"))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.LOAD_FAILED
    assert "no weight encoder.layer.1.output.dense.bias" in end.refused.message


@pytest.mark.parametrize(
    ("config", "named"),
    [({"vocab_size": 61}, "60 rows of embeddings.word_embeddings"), ({"max_position_embeddings": 97}, "96 rows")],
    ids=str,
)
def test_ids_and_places_stay_within_the_weights(tmp_path: Path, start: Any, config: dict[str, int], named: str):
    make_encoder(tmp_path / "m", "bert", config)
    driver = start(tmp_path)
    end = driver.end(driver.embed("w1"))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.LOAD_FAILED
    assert named in end.refused.message


@pytest.mark.parametrize("window", [2, 8])
def test_layers_with_a_window_and_an_interval_are_those_of_the_config(tmp_path: Path, start: Any, window: int):
    config = {"global_attn_every_n_layers": 2, "local_attention": 2 * window}
    weights = make_encoder(tmp_path / "m", "modernbert", config, pooling="mean")
    reference, driver = EncoderReference("modernbert", weights, window=window, interval=2), start(tmp_path)
    texts = ("w1 w2", "w3 w4 w5", " ".join(f"w{number}" for number in range(1, 12)))
    for texts_of_a_batch in (texts, texts[:2], texts[1:2]):
        for row, text in zip(driver.vectors(driver.embed(*texts_of_a_batch)), texts_of_a_batch, strict=True):
            expected = reference.states(tokens(text)).mean(axis=0)
            assert np.abs(row - expected / np.linalg.norm(expected)).max() < 1e-5


def test_quantized_rows_and_layers_are_those_of_the_whole_numbers():
    matrix = mx.random.normal((10, 64), key=mx.random.key(3))
    ends, parts = ("weight", "scales", "biases"), mx.quantize(matrix, group_size=32, bits=4)
    arrays = {f"model.m.{end}": part for end, part in zip(ends, parts, strict=True)}
    whole = mx.dequantize(*parts, group_size=32, bits=4)
    weights = EncoderWeights(arrays, list_layer_names("m", bias=None), (4, 32))
    assert sorted(weights.arrays) == ["m.biases", "m.scales", "m.weight"]
    assert mx.array_equal(weights.take_rows("m", mx.array([[3, 0], [9, 9]])), whole[mx.array([[3, 0], [9, 9]])])
    states = mx.ones((2, 64))
    assert mx.allclose(weights.apply_linear("m", states), states @ whole.T, atol=1e-4)
    plain = EncoderWeights({"m.weight": matrix, "m.bias": mx.ones(10)}, list_layer_names("m"), None)
    assert mx.array_equal(plain.take_rows("m", mx.array([7])), matrix[7:8])
    assert mx.allclose(plain.apply_linear("m", states), states @ matrix.T + 1, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "classifier", "rows"),
    [
        ({"model_type": "bert"}, False, (60, 40, 1)),
        ({"model_type": "bert"}, True, (60, 40, 2)),
        ({"model_type": "roberta"}, False, (60, 40, 1)),
        ({"model_type": "roberta"}, True, (60, 40, 1)),
    ],
)
def test_an_embedding_needs_a_row_for_every_id_place_and_segment(
    config: dict[str, Any], classifier: bool, rows: tuple[int, ...]
):
    numbers = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 4, "vocab_size": 60}
    labels = {"architectures": ["XForSequenceClassification"], "num_labels": 1} if classifier else {}
    shape = read_encoder_shape({**numbers, **config, **labels, "max_position_embeddings": 40})
    found = list_bert_rows(shape)
    assert tuple(found[f"embeddings.{name}_embeddings"] for name in ("word", "position", "token_type")) == rows

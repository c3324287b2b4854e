"""Configs of encoders, as the catalogue describes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from node.models.catalogue import describe_folder
from node.models.embedding_files import EmbeddingFilesError
from node.models.embedding_layout import EncoderFamily, Pooling
from node.models.encoder_files import (
    is_cross_encoder,
    is_encoder,
    predict_encoder_transient,
    read_classifier_pooling,
    read_encoder_shape,
)
from tests.support.engine.encoders import CONTEXT, HEADS, HIDDEN, LAYERS, VOCABULARY, make_encoder
from wire.models.kind import ModelKind
from wire.report import TransientModel


def change(folder: Path, **config: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("bert", EncoderFamily.BERT),
        ("roberta", EncoderFamily.ROBERTA),
        ("xlm-roberta", EncoderFamily.ROBERTA),
        ("modernbert", EncoderFamily.MODERNBERT),
    ],
)
@pytest.mark.parametrize("classifier", [False, True])
def test_an_encoder_is_described(tmp_path: Path, kind: str, family: EncoderFamily, classifier: bool):
    make_encoder(tmp_path / "m", kind, classifier=classifier, pooling="mean")
    found = describe_folder("m", tmp_path / "m")
    assert found is not None
    assert found.layout is not None
    shape = found.layout.encoder
    assert shape is not None
    assert (found.cause, found.kind) == ("", ModelKind.RERANK if classifier else ModelKind.EMBED)
    assert (shape.family, shape.has_classifier) == (family, classifier)
    assert (shape.layers, shape.heads, shape.hidden, shape.vocabulary) == (LAYERS, HEADS, HIDDEN, VOCABULARY)
    assert found.context == shape.context == CONTEXT
    assert found.layout.poolings == (Pooling.CLS if classifier else Pooling.MEAN,)
    assert found.layout.normalize is not classifier
    assert (found.kv.per_token, found.forward.logits, found.forward.seen) == (0, 0, 0)
    assert found.forward.pair >= 2 * 4 * HEADS


@pytest.mark.parametrize("kind", [["bert"], {"name": "bert"}, None, 7], ids=str)
def test_a_type_of_another_form_is_none_of_an_encoder(kind: Any):
    assert not is_encoder({"model_type": kind})
    assert not is_cross_encoder({"model_type": kind, "architectures": ["BertForSequenceClassification"]})


def test_the_longest_text_of_the_files_bounds_the_context(tmp_path: Path):
    make_encoder(tmp_path / "m", "bert")
    (tmp_path / "m/sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    found = describe_folder("m", tmp_path / "m")
    assert found is not None
    assert found.context == 20


def test_rotary_positions_have_a_current_and_an_older_name(tmp_path: Path):
    for number, config in enumerate(
        (
            {"global_rope_theta": 5.0, "local_rope_theta": 7.0},
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 7.0}}},
        )
    ):
        make_encoder(tmp_path / str(number), "modernbert", config)
        found = describe_folder("m", tmp_path / str(number))
        assert found is not None
        assert found.layout is not None
        assert found.layout.encoder is not None
        assert (found.layout.encoder.global_theta, found.layout.encoder.local_theta) == (5.0, 7.0)


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        ({"model_type": "distilbert"}, "an encoder of the type distilbert: known are bert, roberta"),
        ({"hidden_act": "relu"}, "the activation relu, known is gelu"),
        ({"position_embedding_type": "relative_key"}, "the positions relative_key"),
        ({"num_attention_heads": 5}, "5 attention heads for 32 features"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0, which is no whole number of at least 1"),
        ({"hidden_size": "many"}, "hidden_size many"),
        ({"layer_norm_eps": -1}, "layer_norm_eps -1"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps small"),
        ({"num_hidden_layers": True}, "num_hidden_layers True"),
        ({"model_type": "modernbert", "global_attn_every_n_layers": 0}, "global_attn_every_n_layers 0"),
        ({"model_type": "modernbert", "local_attention": 0}, "local_attention 0"),
        ({"model_type": "roberta", "pad_token_id": -1}, "pad_token_id -1, which is no whole number of at least 0"),
        ({"model_type": "roberta", "pad_token_id": 511, "max_position_embeddings": 512}, "512 positions, the first"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_the_reason(tmp_path: Path, config: dict[str, Any], cause: str):
    make_encoder(tmp_path / "m", "bert", config)
    found = describe_folder("m", tmp_path / "m")
    assert found is not None
    assert cause in found.cause


@pytest.mark.parametrize(
    ("labels", "named"), [({"id2label": {"0": "a", "1": "b", "2": "c"}}, "3"), ({"id2label": None}, "2")]
)
def test_a_score_needs_one_label(tmp_path: Path, labels: dict[str, Any], named: str):
    make_encoder(tmp_path / "m", "bert", classifier=True)
    change(tmp_path / "m", **labels)
    found = describe_folder("m", tmp_path / "m")
    assert found is not None
    assert f"a classifier of {named} labels, a score needs 1" in found.cause


def test_an_encoder_of_another_kind_by_setting_is_no_model_for_it(tmp_path: Path):
    make_encoder(tmp_path / "m", "bert")
    chat, rerank = (describe_folder("m", tmp_path / "m", kind) for kind in ("chat", "rerank"))
    assert chat is not None
    assert "generates no text" in chat.cause
    assert rerank is not None
    assert "no classifier" in rerank.cause
    make_encoder(tmp_path / "pair", "bert", classifier=True)
    embed = describe_folder("m", tmp_path / "pair", "embed")
    assert embed is not None
    assert "without files that name its pooling" in embed.cause


def test_an_encoder_without_files_for_vectors_is_no_model(tmp_path: Path):
    make_encoder(tmp_path / "m", "bert")
    for name in ("modules.json", "1_Pooling/config.json"):
        (tmp_path / "m" / name).unlink()
    assert describe_folder("m", tmp_path / "m") is None


MINIMAL = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 60}
"""Fields that every config of an encoder has."""


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"model_type": "bert"}, {"first_position": 0, "context": 512, "epsilon": 1e-12, "window": 0}),
        ({"model_type": "roberta"}, {"first_position": 2, "context": 510, "epsilon": 1e-12, "global_interval": 1}),
        ({"model_type": "roberta", "pad_token_id": 0}, {"first_position": 1, "context": 511}),
        (
            {"model_type": "modernbert"},
            {
                "first_position": 0,
                "context": 512,
                "epsilon": 1e-5,
                "window": 64,
                "global_interval": 3,
                "global_theta": 160_000.0,
                "local_theta": 10_000.0,
            },
        ),
        (
            {
                "model_type": "modernbert",
                "norm_eps": 1e-6,
                "layer_norm_eps": 1e-3,
                "local_attention": 30,
                "global_attn_every_n_layers": 2,
                "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": 7.0},
                "local_rope_theta": 5,
                "global_rope_theta": 9,
            },
            {
                "epsilon": 1e-6,
                "window": 15,
                "global_interval": 2,
                "global_theta": 9.0,
                "local_theta": 5.0,
            },
        ),
    ],
    ids=["bert", "roberta", "roberta without padding", "modernbert", "modernbert with numbers"],
)
def test_numbers_that_a_config_omits_are_those_of_its_family(config: dict[str, Any], wanted: dict[str, float]):
    shape = read_encoder_shape({**MINIMAL, "max_position_embeddings": 512, **config})
    assert {name: getattr(shape, name) for name in wanted} == wanted
    assert (shape.layers, shape.heads, shape.hidden, shape.vocabulary) == (3, 4, 32, 60)


def test_a_negative_number_is_refused_although_the_config_may_omit_it():
    with pytest.raises(EmbeddingFilesError, match="pad_token_id -1"):
        read_encoder_shape({**MINIMAL, "model_type": "roberta", "pad_token_id": -1})


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"model_type": "modernbert", "classifier_pooling": "mean"}, Pooling.MEAN),
        ({"model_type": "modernbert", "classifier_pooling": "cls"}, Pooling.CLS),
        ({"model_type": "modernbert"}, Pooling.CLS),
        ({"model_type": "bert", "classifier_pooling": "mean"}, Pooling.CLS),
    ],
    ids=str,
)
def test_the_pooling_of_a_cross_encoder_follows_its_config(config: dict[str, Any], pooling: Pooling):
    assert read_classifier_pooling(config) is pooling


def test_a_forward_of_an_encoder_has_its_scores_twice_with_a_mask_and_neither_logits_nor_a_cache():
    decoder = TransientModel(token=5.0, pair=3.0, seen=7.0, logits=11.0, window=64)
    assert predict_encoder_transient(decoder) == TransientModel(token=5.0, pair=10.0)


@pytest.mark.parametrize(
    ("kind", "name", "found"),
    [
        ("bert", "BertForSequenceClassification", True),
        ("distilbert", "DistilBertForSequenceClassification", True),
        ("bert", "BertForMaskedLM", False),
        ("llama", "LlamaForSequenceClassification", False),
    ],
)
def test_a_cross_encoder_is_an_encoder_with_a_classifier(kind: str, name: str, found: bool):
    assert is_cross_encoder({"model_type": kind, "architectures": [name]}) is found

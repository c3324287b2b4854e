"""Configs of encoders, as the catalogue describes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from node.models.catalogue import describe_folder
from node.models.embedding_layout import EncoderFamily, Pooling
from tests.support.engine.encoders import CONTEXT, HEADS, HIDDEN, LAYERS, VOCABULARY, make_encoder
from wire.models.kind import ModelKind


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
        ({"num_hidden_layers": 0}, "num_hidden_layers 0, which is no number above 0"),
        ({"hidden_size": "many"}, "hidden_size many"),
        ({"layer_norm_eps": -1}, "layer_norm_eps -1"),
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

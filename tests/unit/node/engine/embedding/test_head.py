"""Heads of embedding models: sizes, and parts that do not fit together."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from node.engine.embedding.bare_model import load_bare_model
from node.engine.embedding.head import COPIES, EmbeddingHead, EmbeddingHeadError, find_layers, load_head
from node.models.embedding_files import read_embedding_layout
from node.models.embedding_layout import EmbeddingLayout, Pooling
from tests.support.engine.embedders import HIDDEN, make_embedder
from wire.frames import MAX_VECTORS_BYTES, NUMBER_BYTES

TANH = "torch.nn.modules.activation.Tanh"
MEAN, LAST, CLS = (f"pooling_mode_{name}" for name in ("mean_tokens", "lasttoken", "cls_token"))


def load(folder: Path, **changes: Any) -> EmbeddingHead:
    """Load the head of an embedding model, with changes of its layout."""
    model, config = load_bare_model(folder)
    return load_head(folder, replace(read_embedding_layout(folder, config), **changes), model)


@pytest.mark.parametrize(
    ("modes", "dense", "dimensions", "reads_all"),
    [
        ((LAST,), (), HIDDEN, False),
        ((CLS, LAST), (), 2 * HIDDEN, False),
        ((LAST, MEAN), (), 2 * HIDDEN, True),
        ((MEAN,), ((24, TANH), (8, TANH)), 8, True),
    ],
    ids=["last", "first and last", "last and mean", "dense"],
)
def test_a_head_has_the_length_of_its_vectors_and_the_bytes_of_its_pooling(
    tmp_path: Path, modes: tuple[str, ...], dense: tuple[tuple[int, str], ...], dimensions: int, reads_all: bool
):
    head = load(make_embedder(tmp_path / "m", modes=modes, dense=dense))
    assert (head.dimensions, head.layers, head.runs_whole_texts) == (dimensions, 2, False)
    assert head.estimate_bytes(10) == (10 * COPIES * HIDDEN * NUMBER_BYTES if reads_all else 0)
    assert len(head.arrays) == 2 * len(dense)
    pooled = head.start([3])
    head.build([[5, 6, 7]], pooled)
    assert head.finish(pooled).shape == (1, dimensions)


def test_dense_layers_that_do_not_fit_are_refused(tmp_path: Path):
    folder = make_embedder(tmp_path / "m", dense=((24, TANH), (8, TANH)))
    first, second = load(folder).layout.dense
    for layers, reason in (
        ((replace(first, inputs=HIDDEN + 1), second), f"2_Dense/model.safetensors takes {HIDDEN + 1} features"),
        ((second, first), f"takes 24 features, its input has {HIDDEN}"),
        ((replace(first, outputs=MAX_VECTORS_BYTES // NUMBER_BYTES + 1),), "the limit is"),
    ):
        with pytest.raises(EmbeddingHeadError, match=reason):
            load(folder, dense=layers)
    assert load(folder, dense=(replace(first, outputs=MAX_VECTORS_BYTES // NUMBER_BYTES),)).dimensions * 4 == (
        MAX_VECTORS_BYTES
    )
    weights = cast("dict[str, mx.array]", mx.load(str(folder / second.file)))
    mx.save_safetensors(str(folder / second.file), {"linear.weight": weights["linear.weight"]})
    with pytest.raises(EmbeddingHeadError, match="has no linear"):
        load(folder)
    assert load(folder, dense=(first, replace(second, bias=False))).dimensions == 8


def test_a_model_without_access_to_its_states_is_refused():
    for model in (object(), type("Model", (), {"model": "no function"})()):
        with pytest.raises(EmbeddingHeadError, match="no access to hidden states"):
            find_layers(cast("Any", model))


def test_layers_are_found_within_a_language_model(tmp_path: Path):
    model, _ = load_bare_model(make_embedder(tmp_path / "m"))
    inner: Any = model
    assert find_layers(model) is inner.model
    assert find_layers(cast("Any", type("Outer", (), {"language_model": inner})())) is inner.model
    assert load_head(tmp_path / "m", EmbeddingLayout((Pooling.MEAN,)), model).dimensions == HIDDEN

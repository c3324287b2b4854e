"""Layers of a decoder without its output layer, with each naming of their weights."""

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from node.engine.embedding.bare_model import load_bare_model, rename_weights
from tests import models
from tests.support.engine.embedders import make_embedder

ONE = mx.ones(1)


@pytest.mark.parametrize(
    ("names", "without_output", "wanted"),
    [
        (["model.norm.weight", "lm_head.weight"], False, ["model.norm.weight", "lm_head.weight"]),
        (["model.norm.weight", "lm_head.weight"], True, ["model.norm.weight"]),
        (["norm.weight", "layers.0.a"], True, ["model.norm.weight", "model.layers.0.a"]),
        (["norm.weight", "lm_head.weight"], True, ["model.norm.weight"]),
        (["norm.weight", "lm_head.weight"], False, ["norm.weight", "lm_head.weight"]),
        ([], True, []),
    ],
)
def test_weights_of_the_layers_alone_get_the_names_of_the_complete_model(
    names: list[str], without_output: bool, wanted: list[str]
):
    assert list(rename_weights(dict.fromkeys(names, ONE), without_output=without_output)) == wanted


def test_both_kinds_of_checkpoints_have_the_same_layers_and_no_output(tmp_path: Path):
    folder = make_embedder(tmp_path / "bare")
    file = folder / "model.safetensors"
    weights = cast("dict[str, mx.array]", mx.load(str(file)))
    file.unlink()
    mx.save_safetensors(str(file), {name.removeprefix("model."): array for name, array in weights.items()})
    hidden: list[mx.array] = []
    for place in (folder, models.path("qwen3")):
        made, config = load_bare_model(place)
        model: Any = made
        assert config["model_type"] == "qwen3"
        assert not [name for name, _ in tree_flatten(model.parameters()) if name.startswith("lm_head")]
        hidden.append(model.model(mx.array([[5, 6, 7]])))
    assert mx.array_equal(hidden[0], hidden[1])

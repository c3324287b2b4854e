"""Loads of models: rows that decode alone, and files that cannot be read."""

import os
import shutil
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx import utils as mlx_utils

from node.engine.kv.kv_cache import TextModel, evaluate
from node.engine.models.loaded_model import (
    LoadedModel,
    can_batch,
    load,
)
from node.engine.models.model_descriptor import ModelDescriptor
from node.models.catalogue import describe_folder
from tests import models

gpt_bigcode: Any = import_module("mlx_lm.models.gpt_bigcode")
smollm3: Any = import_module("mlx_lm.models.smollm3")


def test_rows_of_an_architecture_that_fails_for_two_rows_decode_alone():
    arguments = gpt_bigcode.ModelArgs(
        model_type="gpt_bigcode",
        n_embd=32,
        n_layer=2,
        n_inner=64,
        n_head=2,
        n_positions=64,
        layer_norm_epsilon=1e-5,
        vocab_size=96,
    )
    model = cast("TextModel", gpt_bigcode.Model(arguments))
    assert [can_batch(model), can_batch(model)] == [False, False]


def test_rows_of_an_architecture_that_can_decode_two_rows_decode_together():
    arguments = smollm3.ModelArgs.from_dict(
        {
            "model_type": "smollm3",
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-5,
            "vocab_size": 96,
            "rope_theta": 1e4,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        }
    )
    assert can_batch(cast("TextModel", smollm3.Model(arguments)))


def test_a_load_whose_file_cannot_be_read_breaks_no_later_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """MLX reads files on a stream of the CPU, and the inference thread of a Mac computes on another one. Here a second
    stream of the CPU takes its place."""
    found = dict[str, ModelDescriptor]()
    for name in ("whole", "short"):
        descriptor = describe_folder(name, Path(shutil.copytree(models.path("llama"), tmp_path / name)))
        assert descriptor is not None
        found[name] = descriptor
    (weights,) = (tmp_path / "short").glob("*.safetensors")
    ended = list[object]()

    def load_both() -> None:
        stream = mx.new_stream(mx.cpu)

        def compute(*trees: object) -> None:
            leaves = cast("list[tuple[str, Any]]", cast("Any", mlx_utils).tree_flatten(list(trees)))
            evaluate([mx.abs(leaf, stream=stream) for _, leaf in leaves if isinstance(leaf, mx.array)])

        monkeypatch.setattr("node.engine.models.loaded_model.evaluate", compute)
        pieces = load(found["short"])
        next(pieces)
        os.truncate(weights, weights.stat().st_size // 2)
        try:
            list(pieces)
        except RuntimeError as error:
            ended.append(str(error))
        ended.extend(load(found["whole"]))

    thread = Thread(target=load_both)
    thread.start()
    thread.join()
    assert ended[0] == "[read] Unable to read from file."
    assert isinstance(ended[-1], LoadedModel)

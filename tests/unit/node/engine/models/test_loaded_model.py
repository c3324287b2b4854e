"""Models whose rows cannot decode together are refused before they serve, with the reason."""

from importlib import import_module
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache

from node.engine.kv.kv_cache import LayerCache, TextModel
from node.engine.models.loaded_model import UnbatchableModelError, check_architecture, check_batching

gpt_bigcode: Any = import_module("mlx_lm.models.gpt_bigcode")
smollm3: Any = import_module("mlx_lm.models.smollm3")


class Chunked:
    """Model with a cache of each kind, as Llama 4 has."""

    layers = (None, None)

    def make_cache(self) -> list[LayerCache]:
        return [cast("LayerCache", KVCache()), cast("LayerCache", cast("Any", ChunkedKVCache)(8))]

    def __call__(self, tokens: mx.array, cache: object) -> mx.array:
        raise AssertionError("no weights are read")


def test_caches_that_cannot_be_put_together_are_refused_before_weights_are_read():
    with pytest.raises(UnbatchableModelError, match="cannot put rows with a ChunkedKVCache together"):
        check_architecture(Chunked(), "llama4")


def test_an_architecture_with_wrong_positions_is_refused():
    with pytest.raises(UnbatchableModelError, match="decodes several rows of afm7 wrongly"):
        check_architecture(Chunked(), "afm7")


def test_an_architecture_that_fails_for_two_rows_is_refused():
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
    for _ in range(2):
        with pytest.raises(UnbatchableModelError, match=r"cannot decode several rows of it \("):
            check_batching(model)


def test_an_architecture_that_decodes_two_rows_is_accepted():
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
    check_batching(cast("TextModel", smollm3.Model(arguments)))

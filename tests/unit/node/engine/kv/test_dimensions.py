"""The bytes of a row: the estimate from the config, the measurement of a cache, and the bytes of the cache are
equal."""

import gc
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from node.engine.kv.kv_cache import create_cache, measure_extent, measure_kv_parameters, sum_nbytes
from node.engine.memory.gate import GateSite
from node.engine.models import loaded_model as loading
from node.engine.models.loaded_model import run_forward
from node.engine.scheduling.packed_prefill import prefill_rows
from node.models import catalogue
from node.models.catalogue import describe_folder
from node.models.memory_prediction import predict_kv
from tests import models
from tests.models.architectures import ARCHITECTURES
from tests.support.engine.text_engine import Driver
from wire.capacity.batches import compute_row_bytes
from wire.frames import Finished, GenerationParams
from wire.report import KvParameters, TransientModel

LENGTHS = (20, 256, 300, 700)


def written(model: Any, tokens: int) -> Any:
    """Prefill `tokens` tokens into a new cache, few at first, to make it grow."""
    cache = create_cache(model)
    run_forward(model, [1] * 20, cache, last=False)
    for start in range(20, tokens, 128):
        run_forward(model, [1] * min(128, tokens - start), cache, last=False)
    return cache


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_foreseen_measured_and_real_bytes_of_a_row_are_the_same(architecture: str):
    folder = Path(models.path(architecture, trained=False))
    model, _ = load_model(folder)
    found = describe_folder(architecture, folder)
    assert found is not None
    measured = measure_kv_parameters(written(model, 20))
    assert measured == found.kv
    for tokens in LENGTHS:
        cache = written(model, tokens)
        extent = measure_extent(cache)
        layers = sum(1 for layer in cache if hasattr(layer, "keys") and not hasattr(layer, "max_size"))
        held = extent.capacity // layers
        if architecture == "llama4":  # three of its four layers drop tokens, which the estimate does not count on
            assert sum_nbytes(cache) == measured.per_token * held
            assert extent.size <= compute_row_bytes(measured, tokens)
            continue
        in_window = measured.window_per_token * min(held, measured.window) if measured.window else 0
        if not measured.window:
            assert sum_nbytes(cache) == measured.fixed + measured.per_token * held
        elif tokens >= measured.window:
            assert extent.size == measured.per_token * held + in_window
        assert tokens <= held < tokens + measured.step
        assert extent.size <= compute_row_bytes(measured, tokens)


MLA: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "torch_dtype": "float32",
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("deepseek_v3", {}),
        (
            "deepseek_v2",
            {
                "topk_method": "greedy",
                "rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 2048},
            },
        ),
        ("deepseek_v32", {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 64}),
    ],
)
def test_compressed_attention_is_foreseen_as_it_is_kept(kind: str, more: dict[str, Any]):
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    config = {"model_type": kind, **MLA, **more}
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    measured = measure_kv_parameters(written(model, 20))
    assert measured == predict_kv(config, 4)
    cache = written(model, 300)
    assert measure_extent(cache).size == sum_nbytes(cache) <= compute_row_bytes(measured, 300)


def check_foreseen(config: dict[str, Any]) -> None:
    """Check the estimate of a config against the cache of a model that mlx-lm makes from the config."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    assert measure_kv_parameters(written(model, 20)) == predict_kv(config, 2)


def test_values_shorter_than_keys_are_foreseen_as_they_are_kept():
    check_foreseen(
        {
            "model_type": "mimo_v2_flash",
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
            "hybrid_layer_pattern": [0, 1, 1],
            "sliding_window_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "v_head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 20,
            "swa_v_head_dim": 8,
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "moe_layer_freq": [0, 0, 1],
            "n_shared_experts": None,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": None,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "max_position_embeddings": 2048,
            "layernorm_epsilon": 1e-5,
            "rope_theta": 1000.0,
            "swa_rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
            "torch_dtype": "bfloat16",
        }
    )


MAMBA: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "max_position_embeddings": 2048,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (
            "nemotron_h",
            {
                "hybrid_override_pattern": "M-M*-",
                "head_dim": 16,
                "mamba_num_heads": 4,
                "mamba_head_dim": 16,
                "ssm_state_size": 8,
                "n_groups": 2,
                "conv_kernel": 4,
                "layer_norm_epsilon": 1e-5,
                "use_bias": False,
                "use_conv_bias": True,
            },
        ),
        (
            "granitemoehybrid",
            {
                "layer_types": ["mamba", "mamba", "attention", "mamba", "attention"],
                "mamba_n_heads": 4,
                "mamba_d_head": 16,
                "mamba_d_state": 8,
                "mamba_n_groups": 2,
                "mamba_d_conv": 4,
                "mamba_conv_bias": True,
                "rms_norm_eps": 1e-5,
                "embedding_multiplier": 1.0,
                "attention_multiplier": 1.0,
                "logits_scaling": 1.0,
                "residual_multiplier": 1.0,
            },
        ),
    ],
)
def test_states_of_mamba_are_foreseen_as_they_are_kept(kind: str, more: dict[str, Any]):
    check_foreseen({"model_type": kind, **MAMBA, **more})


MAMBA_2: dict[str, Any] = {
    "model_type": "mamba2",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 32,
    "conv_kernel": 4,
    "n_groups": 4,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
    "time_step_limit": (0.0, 10.0),
    "time_step_rank": 4,
}


def test_a_state_keeps_no_memory_of_the_tokens_before_it():
    """In mlx-lm 0.32.2, the state of a Mamba layer is a view of an array with all tokens of the forward."""
    module = importlib.import_module("mlx_lm.models.mamba2")
    model = module.Model(module.ModelArgs.from_dict(MAMBA_2))
    mx.eval(model.parameters())

    def measure_held_bytes(prefill: Callable[[Any], object]) -> int:
        gc.collect()
        cache, before = create_cache(model), mx.get_active_memory()
        prefill(cache)
        return mx.get_active_memory() - before

    for prefill in (
        lambda tokens: measure_held_bytes(lambda cache: run_forward(model, [1] * tokens, cache, last=False)),
        lambda tokens: measure_held_bytes(lambda cache: prefill_rows(model, [[1] * tokens], cache)),
    ):
        prefill(8)  # MLX keeps some memory after the first forward
        assert 0 < prefill(512) < 1.5 * prefill(8)


HYBRID: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 32,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
MAMBA_1: dict[str, Any] = {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True}
BLOCK = {"no_op": False, "replace_with_linear": False, "n_heads_in_group": None}
INNER = {"no_op": False, "replace_with_linear": False, "ffn_mult": 1.0}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gemma3_text", {"head_dim": 16}),
        (
            "gemma4_text",
            {
                "head_dim": 16,
                "global_head_dim": 32,
                "num_kv_shared_layers": 3,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                "vocab_size_per_layer_input": 64,
                "hidden_size_per_layer_input": 8,
            },
        ),
        (
            "gemma4_text",
            {
                "head_dim": 256,
                "num_kv_shared_layers": 0,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                "vocab_size_per_layer_input": 64,
                "hidden_size_per_layer_input": 8,
            },
        ),
        (
            "falcon_h1",
            {
                "head_dim": 16,
                "mamba_d_ssm": 64,
                "mamba_n_heads": 4,
                "mamba_d_head": 16,
                "mamba_d_state": 8,
                "mamba_n_groups": 2,
                "mamba_d_conv": 4,
            },
        ),
        (
            "jamba",
            {
                "attn_layer_offset": 1,
                "attn_layer_period": 4,
                "expert_layer_offset": 1,
                "expert_layer_period": 2,
                "num_experts": 1,
                "num_experts_per_tok": 1,
                "mamba_d_conv": 4,
                "mamba_d_state": 8,
                "mamba_expand": 2,
                "max_position_embeddings": 2048,
            },
        ),
        ("mamba", {**MAMBA_1, "time_step_rank": 4}),
        (
            "mamba2",
            {
                **MAMBA_1,
                "num_heads": 4,
                "head_dim": 16,
                "n_groups": 2,
                "layer_norm_epsilon": 1e-5,
                "time_step_limit": [0.0, 1e9],
                "time_step_rank": 4,
            },
        ),
        (
            "recurrent_gemma",
            {
                "block_types": ["recurrent", "recurrent", "attention"],
                "num_key_value_heads": 1,
                "attention_window_size": 32,
                "attention_bias": False,
                "conv1d_width": 4,
                "logits_soft_cap": 30.0,
            },
        ),
        (
            "kimi_linear",
            {
                **MLA,
                "num_hidden_layers": 4,
                "head_dim": 16,
                "linear_attn_config": {
                    "full_attn_layers": [4],
                    "kda_layers": [1, 2, 3],
                    "head_dim": 16,
                    "num_heads": 4,
                    "short_conv_kernel_size": 4,
                },
                "num_experts": 2,
                "first_k_dense_replace": 4,
                "model_max_length": 2048,
                "torch_dtype": "bfloat16",
            },
        ),
        (
            "nemotron-nas",
            {
                "num_key_value_heads": None,
                "hidden_act": "silu",
                "max_position_embeddings": 2048,
                "attention_bias": False,
                "mlp_bias": False,
                "block_configs": [
                    {"attention": {**BLOCK, "n_heads_in_group": 4}, "ffn": INNER},
                    {"attention": {**BLOCK, "no_op": True}, "ffn": INNER},
                    {"attention": {**BLOCK, "replace_with_linear": True}, "ffn": INNER},
                ]
                * 2,
            },
        ),
    ],
)
def test_layers_of_several_kinds_are_foreseen_as_they_are_kept(kind: str, more: dict[str, Any]):
    check_foreseen({"model_type": kind, **HYBRID, **more})


def test_compressed_attention_of_a_kind_that_is_unknown_is_foreseen_as_if_expanded():
    unknown = predict_kv({"model_type": "deepseek_v9", **MLA}, 4)
    assert unknown == predict_kv({"model_type": "deepseek_v2", **MLA}, 4)
    assert unknown.per_token > predict_kv({"model_type": "deepseek_v3", **MLA}, 4).per_token


def test_the_size_of_a_number_is_the_base_types_where_weights_are_quantized():
    quantized = {"model_type": "deepseek_v3", **MLA, "torch_dtype": "bfloat16", "quantization": {"bits": 4}}
    assert predict_kv(quantized, 4) == KvParameters(3 * (32 + 16) * 2, 256)


def test_the_gate_is_checked_without_known_dimensions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(catalogue, "predict_kv", lambda config, size: KvParameters(0))
    monkeypatch.setattr(catalogue, "predict_transient", lambda config, size: TransientModel())
    monkeypatch.setattr(loading, "measure_kv_parameters", lambda cache: KvParameters(0))
    driver = Driver(models.path("llama"))
    gate = driver.engine.gate
    assert isinstance(driver.end(driver.ask("Hello!", GenerationParams(temperature=0.0, max_tokens=4))), Finished)
    assert gate.checks[GateSite.PREFLIGHT] >= 1
    assert gate.checks[GateSite.PREFILL] >= 1
    assert gate.checks[GateSite.JOIN] >= 1

"""The shapes of the tiny models, one for each family that the engine supports: its layers, and thus its caches."""

from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
"""Content of config.json."""
CONTEXT = 32768
"""Context of each of these models, in tokens."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a transformer; `vocabulary` is in tokens."""

    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


PRESETS = {
    "tiny": Shape(hidden=128, layers=2, inner=256, heads=4, kv_heads=2, head_dim=32, vocabulary=512),
    "deep": Shape(hidden=128, layers=8, inner=256, heads=4, kv_heads=2, head_dim=32, vocabulary=512),
    "bench50m": Shape(hidden=512, layers=12, inner=1536, heads=8, kv_heads=4, head_dim=64, vocabulary=8192),
}
"""`tiny` learns answers. `deep` has several layers of each kind, as real models have, and thus transient memory that
depends on a prompt as in them. `bench50m` (42 million parameters, random) only has the speed of a larger model."""


def _common(shape: Shape) -> Config:
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }


def _experts(shape: Shape, count: int) -> Config:
    return {
        "num_experts": count,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.inner // 4,
        "norm_topk_prob": True,
    }


def _llama(shape: Shape) -> Config:
    return {"architectures": ["LlamaForCausalLM"], **_common(shape)}


def _qwen3(shape: Shape) -> Config:
    return {"architectures": ["Qwen3ForCausalLM"], **_common(shape)}


def _qwen3_moe(shape: Shape) -> Config:
    return {"architectures": ["Qwen3MoeForCausalLM"], **_common(shape), **_experts(shape, 8)}


def _gemma3_text(shape: Shape) -> Config:
    """Return a config in which every second layer sees only a window of 64 tokens: a rotating and a growing cache."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        **_common(shape),
        "query_pre_attn_scalar": shape.head_dim,
        "sliding_window": 64,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 10000.0,
    }


def _lfm2(shape: Shape) -> Config:
    """Return a config of short convolutions, whose state has a fixed size, between layers of attention."""
    kinds = ["full_attention" if n % 2 else "conv" for n in range(shape.layers)]
    return {
        "architectures": ["Lfm2ForCausalLM"],
        **_common(shape),
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": shape.hidden,
        "block_ff_dim": shape.inner,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": kinds,
    }


def _qwen3_next(shape: Shape) -> Config:
    """Return a config of a gated delta net, whose state is two arrays, then attention, each with experts."""
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        **_common(shape),
        **_experts(shape, 4),
        "linear_num_value_heads": shape.heads,
        "linear_num_key_heads": shape.kv_heads,
        "linear_key_head_dim": shape.head_dim,
        "linear_value_head_dim": shape.head_dim,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": shape.inner // 4,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    }


def _llama4(shape: Shape) -> Config:
    """Return a config of three layers whose caches drop tokens before a window of 64, then a growing one, as mlx-lm's
    mask requires. Such caches cannot be batched."""
    text = {
        **_common(shape),
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "attention_bias": False,
        "attention_chunk_size": 64,
        "hidden_act": "silu",
        "interleave_moe_layer_step": 2,
        "intermediate_size": shape.inner // 4,
        "intermediate_size_mlp": shape.inner,
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
        "rope_scaling": None,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
    }
    return {"architectures": ["Llama4ForCausalLM"], "text_config": text, "max_position_embeddings": CONTEXT}


_FAMILIES = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": _gemma3_text,
    "lfm2": _lfm2,
    "qwen3_next": _qwen3_next,
    "llama4": _llama4,
}
ARCHITECTURES = tuple(_FAMILIES)


def config(architecture: str, preset: str, end: int) -> Config:
    """Return a model's config.json; `end` is the id of the token that ends an answer."""
    made = _FAMILIES[architecture](PRESETS[preset])
    return {"model_type": architecture, **made, "eos_token_id": end, "torch_dtype": "float32"}

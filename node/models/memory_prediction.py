"""Memory that a model will take, predicted from its config before it is loaded: weights, KV of a row, transients."""

import sys
from collections.abc import Iterable
from typing import cast

from node.models.weight_files import NUMBER_BYTES, Config, WeightHeaders
from wire.report import CACHE_STEP_TOKENS, KvParameters, TransientModel

DEFAULT_CONTEXT = 4096
"""Context length in tokens of a config that names none."""
MAX_METHOD_CHARACTERS = 20
"""Maximum characters of a quantization method, which a config may name freely."""
_CONTEXTS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "seq_length", "n_positions")
_NESTED = ("text_config", "language_config", "llm_config")
_OLDER = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size"}
_FUSED = frozenset({64, 72, 80, 96, 128})
"""Head sizes with fused attention in Metal, which stores no scores (from MLX's source)."""
_LATENT = frozenset(
    {
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k25",
        "kimi_linear",
        "mistral4",
    }
)
"""Models whose compressed attention (MLA) caches the compressed values. Any other model expands them to keys and
values."""
_INDEXED = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""Models of `_LATENT` that also cache an index, as keys and (empty) values."""
_STATES = frozenset({"linear_attention", "conv", "recurrent", "mamba"})
_WINDOWS = frozenset({"sliding_attention", "chunked_attention"})
_UNCACHED = frozenset({"mlp", "moe"})
"""Kinds of layers that keep nothing of a row."""
_PATTERN = {"*": "full_attention", "M": "mamba", "-": "mlp", "E": "moe"}
"""Kinds of layers by their marks in `hybrid_override_pattern` (Nemotron-H)."""
_MAMBA = (
    ("mamba_num_heads", "mamba_n_heads"),
    ("mamba_head_dim", "mamba_d_head"),
    ("ssm_state_size", "mamba_d_state"),
    ("n_groups", "mamba_n_groups"),
    ("conv_kernel", "mamba_d_conv"),
)
"""Names of the dimensions of a Mamba-2 layer: of Nemotron-H, then of Granite 4."""


def estimate_loaded_bytes(config: Config, weights: WeightHeaders) -> int:
    """Return the expected bytes of the weights in memory. The exact number is known only after the model is built.

    mlx-lm converts fp8 checkpoints to bf16, which doubles their size. Packed formats are not converted: mxfp8,
    power-of-two scales over blocks of 32 × 32, compressed-tensors, ModelOpt (`load_model` in mlx_lm/utils.py).
    """
    return weights.size + (0 if is_quantized(config) else weights.fp8)


def is_quantized(config: Config) -> bool:
    """Return whether a config belongs to weights that mlx-lm keeps quantized. mlx-lm converts plain fp8 to bf16."""
    quantization: object = config.get("quantization_config") or _get_text_config(config).get("quantization_config")
    method: Config = cast("Config", quantization) if isinstance(quantization, dict) else {}
    packed = method.get("quant_method") not in (None, "fp8") or (
        method.get("scale_fmt") == "ue8m0" and method.get("weight_block_size") == [32, 32]
    )
    return packed or "quantization" in config


def name_quantization(config: Config, float_size: int) -> str:
    """Return the quantization of the weights for display: `4-bit`, a method such as `fp8`, or `16-bit floats`.

    `float_size` is the bytes of one unquantized number.
    """
    quantization: object = config.get("quantization") or config.get("quantization_config")
    method: Config = cast("Config", quantization) if isinstance(quantization, dict) else {}
    bits, named = method.get("bits"), method.get("quant_method")
    if isinstance(bits, int):
        return f"{bits}-bit"
    return str(named)[:MAX_METHOD_CHARACTERS] if named else f"{8 * float_size}-bit floats"


def _get_text_config(config: Config) -> Config:
    """Return the text part of a config, with older names mapped to current ones.

    A nested part has priority even where the top level has a number of layers: that may belong to an image encoder.
    """
    inner = next((part for key in _NESTED if _has_layer_count(part := config.get(key))), None)
    text = {**config, **cast("Config", inner)} if inner is not None else config
    return {**{today: text[old] for old, today in _OLDER.items() if old in text}, **text}


def _has_layer_count(part: object) -> bool:
    return isinstance(part, dict) and ("num_hidden_layers" in part or "n_layer" in part)


def find_unknown_dimensions(config: Config) -> tuple[str, ...]:
    """Return the dimensions of a row's memory that a config does not contain, by their names; empty if none is missing.

    The memory of such a model cannot be predicted before it is loaded. The gate still applies.
    """
    text = _get_text_config(config)
    dimensions = {
        "num_hidden_layers": _to_count(text.get("num_hidden_layers")),
        "num_attention_heads": _to_count(text.get("num_attention_heads")),
        "head_dim or hidden_size": _get_head_size(text),
    }
    return tuple(name for name, value in dimensions.items() if not value)


def get_context_tokens(config: Config) -> int:
    """Return the context length of a config in tokens, or `DEFAULT_CONTEXT`."""
    text = _get_text_config(config)
    return next((value for key in _CONTEXTS if (value := _to_count(text.get(key)))), DEFAULT_CONTEXT)


def _to_count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def predict_kv(config: Config, float_size: int) -> KvParameters:
    """Predict the parameters of a row's KV bytes from the config of a model that is not loaded.

    `float_size` is the bytes of an unquantized number of the weights. It is used only if the config names no known
    `torch_dtype` or `dtype`. Every layer counts with full keys and values unless the config names its kind. The
    quantization of the weights has no effect. After the load, the parameters are measured
    (`node.engine.kv.kv_cache.measure_kv_parameters`).
    """
    text = _get_text_config(config)
    number = _get_float_size(text, float_size)
    layer = _count_cached_numbers(text) * number
    full, windowed, states = _count_layers(text)
    window = _to_count(text.get("sliding_window")) if windowed else 0
    return KvParameters(
        full * layer, CACHE_STEP_TOKENS, states * _estimate_state_bytes(text, number), window, windowed * layer
    )


def _count_cached_numbers(text: Config) -> int:
    """Return the numbers that one layer of attention caches of a token."""
    latent, rope = _to_count(text.get("kv_lora_rank")), _to_count(text.get("qk_rope_head_dim"))
    kind, nope, value = (
        text.get("model_type"),
        _to_count(text.get("qk_nope_head_dim")),
        _to_count(text.get("v_head_dim")),
    )
    if latent and kind in _LATENT:
        return latent + rope + (2 * _to_count(text.get("index_head_dim")) if kind in _INDEXED else 0)
    if latent and nope:
        return _to_count(text.get("num_attention_heads")) * (nope + rope + (value or nope))
    heads = _to_count(text.get("num_key_value_heads")) or _to_count(text.get("num_attention_heads")) or 1
    return 2 * heads * _get_head_size(text)


def _estimate_state_bytes(text: Config, number: int) -> int:
    """Return the bytes that one layer without attention keeps of a row, independent of its length.

    That is the end of a convolution, and with a delta net or Mamba-2 also its memory in full precision. Unknown kinds
    are estimated by their width.
    """
    hidden, kernel = _to_count(text.get("hidden_size")), _to_count(text.get("conv_L_cache"))
    if kernel:
        return (kernel - 1) * hidden * number
    sizes = [
        _to_count(text.get(f"linear_{name}"))
        for name in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim")
    ]
    if all(sizes):
        key_heads, key, value_heads, value, kernel = sizes
        convolved = 2 * key_heads * key + value_heads * value
        return (kernel - 1) * convolved * number + value_heads * value * key * 4
    mamba = [max(_to_count(text.get(name)) for name in names) for names in _MAMBA]
    if all(mamba):
        heads, size, state, groups, kernel = mamba
        return (kernel - 1) * (heads * size + 2 * groups * state) * number + heads * size * state * 4
    return hidden * 4 * 4


def predict_transient(config: Config, float_size: int) -> TransientModel:
    """Predict the transient bytes of a forward from the config of a model that is not measured.

    `float_size` is the bytes of an unquantized number of the weights. It is used only if the config names no known
    `torch_dtype` or `dtype`. The sum contains the scores of one layer (4 bytes each, without fused attention) and the
    logits. It also contains a second copy of the keys and values of a layer while they grow, and the inner activations.
    Measured forwards take up to ten times as much. Dimensions that the config lacks add nothing.
    """
    text = _get_text_config(config)
    heads, size = _to_count(text.get("num_attention_heads")), _get_head_size(text)
    kv_heads = _to_count(text.get("num_key_value_heads")) or heads
    numbers = _to_count(text.get("hidden_size")) + _to_count(text.get("intermediate_size")) + heads * size
    logits = 4.0 * _to_count(text.get("vocab_size"))
    pair = 0.0 if sys.platform == "darwin" and size in _FUSED else 4.0 * heads
    attended = 2.0 * kv_heads * size * _get_float_size(text, float_size)
    full, windowed, _ = _count_layers(text)
    window = _to_count(text.get("sliding_window")) if windowed and not full else 0
    return TransientModel(
        token=4.0 * numbers,
        pair=pair,
        seen=attended,
        logits=logits,
        step_row=4.0 * numbers + logits,
        step_seen=4.0 * heads,
        window=window,
    )


def _get_float_size(text: Config, otherwise: int) -> int:
    return NUMBER_BYTES.get(str(text.get("torch_dtype") or text.get("dtype")), 0) or otherwise


def _get_head_size(text: Config) -> int:
    return _to_count(text.get("head_dim")) or _to_count(text.get("hidden_size")) // (
        _to_count(text.get("num_attention_heads")) or 1
    )


def _count_layers(text: Config) -> tuple[int, int, int]:
    """Return the numbers of layers with full attention, with a window, and with a state."""
    count = _to_count(text.get("num_hidden_layers"))
    marks, kinds = text.get("hybrid_override_pattern"), text.get("layer_types")
    if isinstance(marks, str):
        kinds = [_PATTERN.get(mark, mark) for mark in marks]
    if isinstance(kinds, Iterable) and not isinstance(kinds, str):
        names = [str(kind) for kind in cast("Iterable[object]", kinds)]
        states = sum(name in _STATES for name in names)
        windowed = sum(name in _WINDOWS for name in names) if _to_count(text.get("sliding_window")) else 0
        uncached = sum(name in _UNCACHED for name in names)
        return len(names) - states - windowed - uncached, windowed, states
    pattern = _to_count(text.get("sliding_window_pattern"))
    if pattern and _to_count(text.get("sliding_window")):
        full = count // pattern
        return full, count - full, 0
    interval = _to_count(text.get("full_attention_interval"))
    if interval:
        return count // interval, 0, count - count // interval
    return count, 0, 0

"""Memory that a model will take, predicted from its config before it is loaded: weights, KV of a row, transients."""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import cast

from node.models.weight_files import NUMBER_BYTES, Config, WeightHeaders
from wire.report import CACHE_STEP_TOKENS, KvParameters, TransientModel

DEFAULT_CONTEXT = 4096
"""Context length in tokens of a config that names none."""
MAX_METHOD_CHARACTERS = 20
"""Maximum characters of a quantization method, which a config may name freely."""
_CONTEXTS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "seq_length", "n_positions")
_NESTED = ("text_config", "language_config", "llm_config")
_OLDER = {
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "num_transformer_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "model_dim": "hidden_size",
    "hidden_dim": "hidden_size",
    "n_kv_heads": "num_key_value_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_attention_groups": "num_key_value_heads",
}
_GEMMA_3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window_pattern": 6}
_DEFAULTS: dict[str, Config] = {
    "gemma3": {**_GEMMA_3},
    "gemma3_text": {**_GEMMA_3},
    "gemma4_text": {"global_head_dim": 512},
    "gpt_oss": {"sliding_window_pattern": 2},
    "olmo3": {"sliding_window_pattern": 4},
    "olmo_hybrid": {"full_attention_interval": 4},
    "qwen3_next": {"full_attention_interval": 4},
}
"""Values of mlx-lm for dimensions that a config may omit, by `model_type`."""
_FUSED = frozenset({64, 72, 80, 96, 128})
"""Head sizes with fused attention in Metal, which stores no scores (from MLX's source)."""
_LATENT = frozenset(
    {
        "bailing_hybrid",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k25",
        "kimi_linear",
        "longcat_flash",
        "longcat_flash_ngram",
        "mistral4",
    }
)
"""Models whose compressed attention (MLA) caches the compressed values.

Any other model expands them to keys and values.
"""
_INDEXED = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""Models of `_LATENT` that also cache an index, as keys and (empty) values."""
_PAIRED = frozenset({"longcat_flash", "longcat_flash_ngram"})
"""Models with two attentions in each layer."""
_UNWINDOWED = frozenset({"dots1", "gemma2", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"})
"""Models that mlx-lm runs with full attention, although their configs can name layers with a sliding window."""
_STATES = frozenset({"linear_attention", "conv", "recurrent", "mamba"})
_WINDOWS = frozenset({"sliding_attention", "chunked_attention"})
_UNCACHED = frozenset({"mlp", "moe"})
"""Kinds of layers that keep nothing of a row."""
_PATTERN = {"*": "full_attention", "M": "mamba", "-": "mlp", "E": "moe"}
"""Kinds of layers by their marks in `hybrid_override_pattern` (Nemotron-H)."""
_CYCLE = {"attention": "sliding_attention", "L": "sliding_attention", "G": "full_attention"}
"""Kinds of layers by their names in `block_types` (RecurrentGemma) and `sliding_window_pattern` (EXAONE 4)."""
_PERIODS = {
    "sliding_window_pattern": "sliding_attention",
    "full_attention_interval": "linear_attention",
    "layer_group_size": "linear_attention",
    "attn_layer_period": "mamba",
    "mamba_step": "mamba",
}
"""Fields with the distance of layers with full attention, and the kind of all other layers."""
_SHARED = ("num_kv_shared_layers", "num_kv_reuse_layers")
"""Fields with the number of layers at the end that use the keys and values of earlier ones."""
_WINDOW_SIZES = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "loop_window_size")
_MAMBA = (
    ("mamba_num_heads", "mamba_n_heads", "num_heads"),
    ("mamba_head_dim", "mamba_d_head", "hidden_size_per_head", "head_dim"),
    ("ssm_state_size", "mamba_d_state", "state_size"),
    ("conv_kernel", "mamba_d_conv"),
    ("n_groups", "mamba_n_groups"),
)
"""Names of the dimensions of a Mamba layer: of Nemotron-H, then of Granite 4, PLaMo 2 and Mamba-2."""
_SCAN_ARRAYS = 12
"""Arrays with the states of all tokens of a forward in one Mamba layer of Jamba, measured at 32 to 256 tokens.

Each layer also keeps one of them until the end of the forward.
"""


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
    older = {today: text[old] for old, today in _OLDER.items() if old in text}
    return {**_DEFAULTS.get(str(text.get("model_type")), {}), **older, **text}


def _has_layer_count(part: object) -> bool:
    return isinstance(part, dict) and ("num_hidden_layers" in part or "n_layer" in part)


def _find_count(text: Config, names: Sequence[str]) -> int:
    """Return the first of these fields that is a positive number, or 0."""
    return next((value for name in names if (value := _to_count(text.get(name)))), 0)


def _read_part(value: object) -> Config:
    return cast("Config", value) if isinstance(value, dict) else {}


def _read_list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def find_unknown_dimensions(config: Config) -> tuple[str, ...]:
    """Return the dimensions of a row's memory that a config does not contain, by their names; empty if none is missing.

    The memory of such a model cannot be predicted before it is loaded. The gate still applies.
    """
    text = _get_text_config(config)
    full, windowed, states = _count_layers(text)
    attends = full or windowed or not states
    dimensions = {
        "num_hidden_layers": _to_count(text.get("num_hidden_layers")) or full + windowed + states,
        "num_attention_heads": _to_count(text.get("num_attention_heads")) or not attends,
        "head_dim or hidden_size": _get_head_size(text),
    }
    return tuple(name for name, value in dimensions.items() if not value)


def get_context_tokens(config: Config) -> int:
    """Return the context length of a config in tokens, or `DEFAULT_CONTEXT`."""
    text = _get_text_config(config)
    return _find_count(text, _CONTEXTS) or DEFAULT_CONTEXT


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
    full, windowed, states = _count_layers(text)
    return KvParameters(
        full * _count_cached_numbers(text) * number,
        CACHE_STEP_TOKENS,
        states * _estimate_state_bytes(text, number),
        _find_count(text, _WINDOW_SIZES) if windowed else 0,
        windowed * _count_windowed_numbers(text) * number,
    )


def _count_cached_numbers(text: Config) -> int:
    """Return the numbers that one layer with full attention caches of a token."""
    latent, rope = _to_count(text.get("kv_lora_rank")), _to_count(text.get("qk_rope_head_dim"))
    kind, nope, value = (
        str(text.get("model_type")),
        _to_count(text.get("qk_nope_head_dim")),
        _to_count(text.get("v_head_dim")),
    )
    if latent and kind in _LATENT:
        index = 2 * _to_count(text.get("index_head_dim")) if kind in _INDEXED else 0
        return (latent + rope + index) * (2 if kind in _PAIRED else 1)
    if latent and nope:
        return _to_count(text.get("num_attention_heads")) * (nope + rope + (value or nope))
    heads = _to_count(text.get("num_global_key_value_heads")) if text.get("attention_k_eq_v") is True else 0
    index = _to_count(_read_part(text.get("sparse_attention_config")).get("sparse_index_dim"))
    size = _to_count(text.get("global_head_dim")) or _get_head_size(text)
    return (heads or _get_kv_heads(text)) * (size + (value or size)) + index


def _count_windowed_numbers(text: Config) -> int:
    """Return the numbers that one layer with a sliding window caches of a token."""
    heads = _find_count(text, ("num_swa_key_value_heads", "swa_num_key_value_heads")) or _get_kv_heads(text)
    size = _to_count(text.get("swa_head_dim")) or _get_head_size(text)
    return heads * (size + (_to_count(text.get("swa_v_head_dim")) or size))


def _get_kv_heads(text: Config) -> int:
    """Return the heads with keys and values. `block_configs` (Nemotron-NAS) name them by the heads that share one."""
    heads = _to_count(text.get("num_attention_heads")) or 1
    shared = [_find_count(block, ("n_heads_in_group",)) for block in _list_attentions(text)]
    return _to_count(text.get("num_key_value_heads")) or heads // (min(filter(None, shared), default=0) or 1)


def _list_attentions(text: Config) -> list[Config]:
    """Return the attention of each of `block_configs`. An empty one stands for a layer without attention."""
    blocks = [_read_part(block).get("attention") for block in _read_list(text.get("block_configs"))]
    return [
        {} if block.get("no_op") or block.get("replace_with_linear") else block for block in map(_read_part, blocks)
    ]


def _estimate_state_bytes(text: Config, number: int) -> int:
    """Return the bytes that one layer without attention keeps of a row, independent of its length.

    That is the end of a convolution, and with a delta net or Mamba-2 also its memory in full precision. Mamba-1 and
    RWKV keep it in the type of the weights. Unknown kinds are estimated by their width.
    """
    hidden, kernel = _to_count(text.get("hidden_size")), _to_count(text.get("conv_L_cache"))
    if kernel:
        return (kernel - 1) * hidden * number
    sizes = [
        _to_count(text.get(f"linear_{name}"))
        for name in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim")
    ]
    nested = _read_part(text.get("linear_attn_config"))
    if nested or _to_count(text.get("layer_group_size")):
        linear = {**text, **nested}
        heads, size = _find_count(linear, ("num_heads", "num_attention_heads")), _get_head_size(linear)
        sizes = [heads, size, heads, size, _to_count(linear.get("short_conv_kernel_size")) or 1]
    if all(sizes):
        key_heads, key, value_heads, value, kernel = sizes
        convolved = 2 * key_heads * key + value_heads * value
        return (kernel - 1) * convolved * number + value_heads * value * key * 4
    heads, size, state, kernel, groups = (_find_count(text, names) for names in _MAMBA)
    if heads and size and state and kernel:
        return (kernel - 1) * (heads * size + 2 * groups * state) * number + heads * size * state * 4
    inner = _to_count(text.get("mamba_expand")) * hidden or _to_count(text.get("intermediate_size"))
    if state and kernel:
        return (kernel - 1 + state) * inner * number
    if width := _to_count(text.get("conv1d_width")):
        return width * hidden * number
    if text.get("decay_low_rank_dim"):
        return (2 + _get_head_size(text)) * hidden * number
    if text.get("conv_window"):
        return max(_count_cached_numbers(text), _count_windowed_numbers(text)) * number
    return hidden * 4 * 4


def predict_transient(config: Config, float_size: int) -> TransientModel:
    """Predict the transient bytes of a forward from the config of a model that is not measured.

    `float_size` is the bytes of an unquantized number of the weights. It is used only if the config names no known
    `torch_dtype` or `dtype`. The sum contains the scores of one layer (4 bytes each, without fused attention) and the
    logits. It also contains a second copy of the keys and values of a layer while they grow, and the inner activations.
    For Jamba, it contains the states of all tokens.
    Measured forwards take up to ten times as much. Dimensions that the config lacks add nothing.
    """
    text = _get_text_config(config)
    heads, size = _to_count(text.get("num_attention_heads")), _get_head_size(text)
    kv_heads = _get_kv_heads(text) if heads else _to_count(text.get("num_key_value_heads"))
    numbers = _to_count(text.get("hidden_size")) + _to_count(text.get("intermediate_size")) + heads * size
    logits = 4.0 * _to_count(text.get("vocab_size"))
    pair = 0.0 if sys.platform == "darwin" and size in _FUSED else 4.0 * heads
    attended = 2.0 * kv_heads * size * _get_float_size(text, float_size)
    full, windowed, states = _count_layers(text)
    window = _find_count(text, _WINDOW_SIZES) if windowed and not full else 0
    scanned = (_SCAN_ARRAYS + states) * _count_scanned_numbers(text)
    return TransientModel(
        token=4.0 * (numbers + scanned),
        pair=pair,
        seen=attended,
        logits=logits,
        step_row=4.0 * (numbers + scanned) + logits,
        step_seen=4.0 * heads,
        window=window,
    )


def _count_scanned_numbers(text: Config) -> int:
    """Return the numbers of the state that a Mamba layer of Jamba computes for each token; 0 for other models.

    Their layers have heads, or keep only the newest state.
    """
    if any(_find_count(text, names) for names in _MAMBA[:1]):
        return 0
    return (
        _to_count(text.get("mamba_expand")) * _to_count(text.get("hidden_size")) * _to_count(text.get("mamba_d_state"))
    )


def _get_float_size(text: Config, otherwise: int) -> int:
    return NUMBER_BYTES.get(str(text.get("torch_dtype") or text.get("dtype")), 0) or otherwise


def _get_head_size(text: Config) -> int:
    return _to_count(text.get("head_dim")) or _to_count(text.get("hidden_size")) // (
        _to_count(text.get("num_attention_heads")) or 1
    )


def _count_layers(text: Config) -> tuple[int, int, int]:
    """Return the numbers of layers with full attention, with a window, and with a state."""
    kinds = _count_kinds(text)
    states = sum(kinds[kind] for kind in _STATES)
    has_windows = _find_count(text, _WINDOW_SIZES) and str(text.get("model_type")) not in _UNWINDOWED
    windowed = sum(kinds[kind] for kind in _WINDOWS) if has_windows else 0
    full = kinds.total() - states - windowed - sum(kinds[kind] for kind in _UNCACHED)
    if not states and (
        text.get("mamba_d_ssm") or text.get("conv_window")
    ):  # Falcon-H1, Baichuan-M1: each layer has both
        states = kinds.total()
    if text.get("loop_window_size"):  # IQuest-Loop-Coder: each layer has both
        windowed += kinds.total()
    loops = _to_count(text.get("num_loops")) or 1
    return full * loops, windowed * loops, states


def _count_kinds(text: Config) -> Counter[str]:
    """Return the number of layers of each kind, without those that use the keys and values of earlier layers."""
    names, shared = _list_kinds(text), _find_count(text, _SHARED)
    if names:
        return Counter(names[: max(0, len(names) - shared)])
    count = max(0, _to_count(text.get("num_hidden_layers")) - shared)
    cycle = text.get("block_types") or text.get("_block_types") or text.get("sliding_window_pattern")
    if isinstance(cycle, (str, list)):
        counted: Counter[str] = Counter()
        marks = cast("Sequence[object]", cycle)
        for place, mark in enumerate(marks):
            counted[_CYCLE.get(str(mark), str(mark))] += max(0, count - place + len(marks) - 1) // len(marks)
        return counted
    for field, kind in _PERIODS.items():
        if period := _to_count(text.get(field)):
            offset = {"attn_layer_period": _to_count(text.get("attn_layer_offset")), "mamba_step": period // 2}
            full = max(0, count - offset.get(field, period - 1) + period - 1) // period
            full += count % period if field == "layer_group_size" else 0
            return Counter({"full_attention": full, kind: count - full})
    nested = _read_part(text.get("linear_attn_config")).get("full_attn_layers")
    if attending := _read_list(text.get("full_attn_idxs") or nested):
        full = min(count, len(attending))
        return Counter({"full_attention": full, "linear_attention": count - full})
    windowed = min(count, len(_read_list(text.get("sliding_window_layers"))))
    if text.get("decay_low_rank_dim") or (_to_count(text.get("state_size")) and _to_count(text.get("conv_kernel"))):
        return Counter({"recurrent": count})  # RWKV-7, Mamba, Mamba-2
    return Counter({"full_attention": count - windowed, "sliding_attention": windowed})


def _list_kinds(text: Config) -> list[str]:
    """Return the kind of each layer if the config names all of them, or an empty list."""
    marks = text.get("hybrid_override_pattern")
    if isinstance(marks, (str, list)):
        return [_PATTERN.get(str(mark), str(mark)) for mark in cast("Sequence[object]", marks)]
    if attentions := _list_attentions(text):
        return ["full_attention" if attention else "mlp" for attention in attentions]
    if kinds := _read_list(text.get("layer_types") or text.get("layers_block_type")):
        return [str(kind) for kind in kinds]
    windows = _read_list(text.get("hybrid_layer_pattern"))
    return ["sliding_attention" if windowed else "full_attention" for windowed in windows]

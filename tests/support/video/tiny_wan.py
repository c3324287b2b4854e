"""Write a very small Wan package with random weights: `ENVIRONMENT/bin/python -I tiny_wan.py FOLDER`.

The names of the tensors come from the engine's own table, inverted. The engine's loader is therefore really used. The
package has two experts, the picture codec of 16 channels and a text encoder of two layers: 2.6 MB. Its videos are
noise. Sizes are the smallest that the engine accepts: inputs of layers divide by 64, which quantization needs.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false
# The packages of the video worker are in a separate environment.

import json
import sys
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mflux.models.wan.model.wan_transformer import WanTransformer
from mflux.models.wan.model.wan_vae import Wan2_2_VAE
from mflux.models.wan.weights.wan_weight_mapping import WanWeightMapping
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

TEXT, VOCABULARY, LAYERS = 64, 256, 2
SHAPE = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": TEXT,
    "freq_dim": 64,
    "ffn_dim": 128,
    "num_layers": LAYERS,
    "cross_attn_norm": True,
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}
CODEC = {
    "base_dim": 8,
    "decoder_base_dim": None,
    "z_dim": 16,
    "in_channels": 3,
    "out_channels": 3,
    "patch_size": 1,
    "scale_factor_spatial": 8,
    "scale_factor_temporal": 4,
    "is_residual": False,
}
LAYOUTS = {"transpose_conv3d_weight": (0, 4, 1, 2, 3), "transpose_conv2d_weight": (0, 3, 1, 2)}
"""Order of axes in files for the engine's order."""


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))


def save(path: Path, weights: dict[str, mx.array]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(path), {key: mx.contiguous(one) for key, one in weights.items()}, {"format": "pt"})


def named(module: Any, table: Any) -> dict[str, mx.array]:
    """Return a module's weights with the names and layouts of the files."""
    ours, found = dict(tree_flatten(module.parameters())), {}
    for target in table:
        if target.to_pattern not in ours:
            continue
        value, name = ours[target.to_pattern], target.from_pattern[0]
        axes = LAYOUTS.get(getattr(target.transform, "__name__", ""))
        value = value.transpose(*axes) if axes else value.reshape(-1) if name.endswith(".gamma") else value
        found[name] = value.astype(mx.bfloat16)
    return found


def experts(folder: Path) -> None:
    for part in ("transformer", "transformer_2"):
        module = WanTransformer(patch_size=(1, 2, 2), **SHAPE)
        config = {"_class_name": "WanTransformer3DModel", "patch_size": [1, 2, 2], **SHAPE}
        write(folder / part / "config.json", config | {"qk_norm": "rms_norm_across_heads"})
        table = WanWeightMapping.get_transformer_mapping(num_layers=LAYERS)
        save(folder / part / "diffusion_pytorch_model.safetensors", named(module, table))


def codec(folder: Path) -> None:
    config = {"_class_name": "AutoencoderKLWan", "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": []}
    write(folder / "vae" / "config.json", config | {"temperal_downsample": [False, True, True], **CODEC})
    table = WanWeightMapping.get_vae_mapping(variant="wan21")
    save(folder / "vae" / "diffusion_pytorch_model.safetensors", named(Wan2_2_VAE(**CODEC), table))


def tokenizer(folder: Path) -> None:
    letters = [("▁", -2.0), *((chr(c), -4.0) for c in range(33, 127)), *(("▁" + chr(c), -3.5) for c in range(97, 123))]
    made = Tokenizer(models.Unigram([("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *letters], unk_id=2))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    specials = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    write(
        folder / "tokenizer" / "tokenizer_config.json",
        specials
        | {
            "tokenizer_class": "T5TokenizerFast",
            "extra_ids": 0,
            "additional_special_tokens": [],
            "model_max_length": 512,
        },
    )
    write(folder / "tokenizer" / "special_tokens_map.json", specials)
    made.save(str(folder / "tokenizer" / "tokenizer.json"))


def text_encoder(folder: Path) -> None:
    heads, each, inner = 2, 8, 64
    write(
        folder / "text_encoder" / "config.json",
        {
            "architectures": ["UMT5EncoderModel"],
            "model_type": "umt5",
            "d_model": TEXT,
            "d_kv": each,
            "d_ff": inner,
            "num_layers": LAYERS,
            "num_heads": heads,
            "vocab_size": VOCABULARY,
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
            "feed_forward_proj": "gated-gelu",
            "dense_act_fn": "gelu_new",
            "is_gated_act": True,
            "layer_norm_epsilon": 1e-6,
            "dropout_rate": 0.0,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
            "tie_word_embeddings": False,
            "is_encoder_decoder": True,
            "torch_dtype": "bfloat16",
        },
    )
    sizes = {"shared.weight": (VOCABULARY, TEXT)}
    for layer in range(LAYERS):
        block = f"encoder.block.{layer}.layer"
        sizes |= {f"{block}.0.SelfAttention.{name}.weight": (heads * each, TEXT) for name in "qkv"}
        sizes[f"{block}.0.SelfAttention.o.weight"] = (TEXT, heads * each)
        sizes[f"{block}.0.SelfAttention.relative_attention_bias.weight"] = (32, heads)
        sizes |= {f"{block}.1.DenseReluDense.{name}.weight": (inner, TEXT) for name in ("wi_0", "wi_1")}
        sizes[f"{block}.1.DenseReluDense.wo.weight"] = (TEXT, inner)
    norms = [f"encoder.block.{layer}.layer.{part}.layer_norm.weight" for layer in range(LAYERS) for part in (0, 1)]
    weights = {name: (mx.random.normal(size) * 0.05).astype(mx.bfloat16) for name, size in sizes.items()}
    weights |= {name: mx.ones((TEXT,), mx.bfloat16) for name in ["encoder.final_layer_norm.weight", *norms]}
    save(folder / "text_encoder" / "model.safetensors", weights)


def make(folder: Path) -> None:
    mx.random.seed(7)
    parts = {
        "scheduler": ("diffusers", "UniPCMultistepScheduler"),
        "text_encoder": ("transformers", "UMT5EncoderModel"),
        "tokenizer": ("transformers", "T5TokenizerFast"),
        "transformer": ("diffusers", "WanTransformer3DModel"),
        "transformer_2": ("diffusers", "WanTransformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLWan"),
    }
    write(
        folder / "model_index.json",
        {
            "_class_name": "WanPipeline",
            "_diffusers_version": "0.35.0",
            "boundary_ratio": 0.875,
            "expand_timesteps": False,
            **parts,
        },
    )
    for part in (experts, codec, tokenizer, text_encoder):
        part(folder)


def spoil(folder: Path, how: str) -> None:
    """Break a package so that the engine itself fails on it: `black` pictures, `nan` in its numbers, a file cut off."""
    if how == "cut":
        file = folder / "transformer_2" / "diffusion_pytorch_model.safetensors"
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        return
    part, name, value = {
        "black": ("vae", "decoder.conv_out.bias", -10.0),
        "nan": ("transformer", "proj_out.bias", float("nan")),
    }[how]
    file = folder / part / "diffusion_pytorch_model.safetensors"
    weights: Any = dict(cast("Any", mx.load(str(file))))
    mx.eval(weights)  # the file that they are read from is written next
    weights[name] = mx.full(weights[name].shape, value).astype(mx.bfloat16)
    save(file, weights)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        spoil(Path(sys.argv[1]), sys.argv[2])
    else:
        make(Path(sys.argv[1]))

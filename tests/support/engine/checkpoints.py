"""Write checkpoints that the tiny trained models do not cover: fp8 weights that grow when they are loaded."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import ministral3

from tests import models

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def fp8(folder: Path, *, layers: int = 6, scale: str = "BF16", packed: bool = True) -> Path:
    """Write a random Ministral of 8 MiB a layer, its weights in fp8.

    mlx-lm multiplies the weights by scales of type `scale`. A loaded weight therefore takes two bytes with BF16, four
    with F32. Without `packed` the weights are stored in bf16.
    """
    folder.mkdir(parents=True)
    for name in TOKENIZER:
        if (models.path("llama") / name).exists():
            shutil.copy(models.path("llama") / name, folder)
    llama = json.loads((models.path("llama") / "config.json").read_text())
    config: dict[str, Any] = {
        "model_type": "ministral3",
        "architectures": ["MinistralForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": layers,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": 512,
        "max_position_embeddings": 8192,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
        **({"quantization_config": {"quant_method": "fp8"}} if packed else {}),
        "eos_token_id": llama["eos_token_id"],
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(7)
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    parameters: Any = tree_flatten(ministral3.Model(ministral3.ModelArgs.from_dict(config)).parameters())
    for name, array in parameters:
        if packed and array.ndim == 2 and "embed" not in name:
            halved = mx.to_fp8(array * 0.01)
            tensors[name] = ("F8_E4M3", array.shape, np.array(halved).tobytes())
            one = np.array([1e-4], dtype=np.float32)
            raw = one.tobytes() if scale == "F32" else (one.view(np.uint32) >> 16).astype(np.uint16).tobytes()
            tensors[f"{name}_scale_inv"] = (scale, (1,), raw)
        else:
            raw = np.array(array.astype(mx.bfloat16).view(mx.uint16)).tobytes()
            tensors[name] = ("BF16", array.shape, raw)
    _write(folder / "model.safetensors", tensors)
    return folder


def _write(file: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header: dict[str, object] = {}
    end = 0
    for name, (kind, shape, raw) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + len(raw)]}
        end += len(raw)
    encoded = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for _, _, raw in tensors.values():
            out.write(raw)

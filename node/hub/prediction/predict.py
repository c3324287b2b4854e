"""Predict the memory and the properties of a model, before its weights are downloaded.

`node.hub.query` writes the small files and the headers of the weights to a temporary folder. The weights are sparse
files of the full size, whose tensors read as zeros. The catalogue describes that folder like a downloaded model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node.hub.prediction.supported_models import find_unsupported
from node.models.catalogue import describe_folder
from node.models.encoder_files import is_encoder
from node.models.folders import MODEL, has_gguf
from node.models.weight_files import parse_json_object
from wire.models.files import ModelManifest
from wire.models.hub_query import ModelPrediction


def predict_model(name: str, folder: Path, manifest: ModelManifest, all_names: list[str]) -> ModelPrediction:
    """Return the predicted properties of the model whose small files and weight headers are in `folder`.

    The `cause` of the result is the reason why the model cannot be served; empty if it can. `all_names` has the paths
    of all files of the repository, including files that are not pulled. Raise `OSError` if the folder cannot be read,
    `ValueError` if the weights of a Dense layer are invalid.
    """
    names = {file.path for file in manifest.files}
    if MODEL not in names:
        return ModelPrediction(cause=_explain_missing_config(all_names))
    if not (folder / MODEL).exists():
        return ModelPrediction(cause="its config.json is too large to be read")
    descriptor = describe_folder(name, folder)
    config = _read_json(folder / MODEL)
    architecture = str(config.get("model_type", ""))
    if descriptor is None:
        return ModelPrediction(
            architecture=architecture,
            cause="it is not a text model: its config.json names no causal language model",
        )
    cause = _find_code_cause(folder, config, names)
    if not any(path.endswith(".safetensors") for path in names):
        cause = _explain_missing_weights(all_names)
    return ModelPrediction(
        architecture=architecture,
        quantization=descriptor.quantization,
        weights=descriptor.weights,
        stored=descriptor.stored,
        context=descriptor.context,
        kv=descriptor.kv,
        transient=descriptor.forward,
        cause=cause or descriptor.cause,
    )


def _explain_missing_config(all_names: list[str]) -> str:
    if has_gguf(all_names):
        return _explain_missing_weights(all_names)
    return "it has no config.json, and is not a model in the format of Hugging Face"


def _explain_missing_weights(all_names: list[str]) -> str:
    if has_gguf(all_names):
        return "it has weights in GGUF only, the format of llama.cpp: pull its MLX or safetensors build"
    return "it has no safetensors weights: pull its MLX or safetensors build"


def _find_code_cause(folder: Path, config: Mapping[str, Any], names: set[str]) -> str:
    """Return why a model cannot be served without code from its repository; empty if it can.

    The architecture of an encoder is not checked, because mlx-lm does not build encoders. The catalogue knows which
    encoders the engine serves.
    """
    unsupported = "" if is_encoder(config) else find_unsupported(config)
    if unsupported and "auto_map" in config:
        return (
            f"its architecture {unsupported!r} needs code from the repository (trust_remote_code), which is never run"
        )
    if unsupported:
        return f"its architecture {unsupported!r} is not supported by this version of mlx-lm"
    tokenizer = _read_json(folder / "tokenizer_config.json")
    if "auto_map" in tokenizer and "tokenizer.json" not in names:
        return "its tokenizer needs code from the repository (trust_remote_code), which is never run"
    return ""


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        return parse_json_object(file.read_bytes())
    except (OSError, ValueError):
        return {}

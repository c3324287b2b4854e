"""Loader of tokenizers, from nothing but the folder of the model. Code that comes with a model is never run."""

import ast
import importlib.util
import json
from pathlib import Path
from typing import Final

from huggingface_hub.errors import StrictDataclassError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import MODEL_REMAPPING, load_config
from transformers import PreTrainedConfig

from node.engine.text.tokenizer import Tokenizer
from node.engine.text.tokenizer_errors import TokenizerError, format_error

FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model")
"""Names of tokenizer files in model folders."""

_TOKENIZER_FIELDS: Final = ("model_type", "tokenizer_class")
"""Fields of `config.json` by which transformers chooses the class of a tokenizer."""
_CONFIG_ERRORS: Final = (StrictDataclassError, AttributeError, KeyError, TypeError)
"""Errors that config classes of transformers raise for unexpected values. transformers itself handles `ValueError` and
`OSError`."""


def load(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model from its folder, without network access and without running code of the folder.
    Raise `TokenizerError` if that fails."""
    if not folder.is_dir():
        raise TokenizerError(f"{folder.name}: the folder does not exist")
    try:
        return Tokenizer(_load_wrapper(folder))
    except Exception as error:
        if _needs_code(folder):
            reason = "its tokenizer needs code from the model folder, and Macpool never runs such code"
        else:
            reason = format_error(error).replace(str(folder), folder.name)
        raise TokenizerError(f"{folder.name}: {reason}") from error


def _load_wrapper(folder: Path) -> TokenizerWrapper:
    config = load_config(folder) if (folder / "config.json").exists() else {}
    strictly = {"trust_remote_code": False, "local_files_only": True}
    ends, defaults = config.get("eos_token_id"), read_defaults(config.get("model_type"))
    try:
        return load_tokenizer(folder, strictly, ends, defaults)
    except _CONFIG_ERRORS:
        # transformers validates all of config.json, but tokenizers need only these fields.
        unchecked = PreTrainedConfig.from_dict({name: config[name] for name in _TOKENIZER_FIELDS if name in config})
        return load_tokenizer(folder, strictly | {"config": unchecked}, ends, defaults)


def read_defaults(kind: object) -> dict[str, object] | None:
    """Return mlx-lm's tokenizer defaults for a type of model, for folders with incomplete tokenizer settings. Return
    None if mlx-lm has none. `kind` is the value of `model_type` in `config.json`.

    The defaults are in mlx-lm's module of the model. The module is parsed and not imported, because an import would
    create kernels on this thread, and only the inference thread may use MLX.
    """
    name = MODEL_REMAPPING.get(kind, kind) if isinstance(kind, str) else ""
    spec = importlib.util.find_spec(f"mlx_lm.models.{name}") if name.isidentifier() else None
    if spec is None or spec.origin is None:
        return None
    for statement in ast.parse(Path(spec.origin).read_bytes()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="TOKENIZER_DEFAULTS")], value=value):
                return ast.literal_eval(value)
            case _:
                pass
    return None


def _needs_code(folder: Path) -> bool:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "auto_map" in config

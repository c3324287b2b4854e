from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

def load_config(model_path: Path) -> dict[str, Any]: ...
def load_tokenizer(
    model_path: Path, tokenizer_config_extra: dict[str, Any] | None = None, eos_token_ids: list[int] | int | None = None
) -> TokenizerWrapper: ...
def load_model(model_path: Path, lazy: bool = False) -> tuple[Any, dict[str, Any]]: ...

from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

def load(path_or_hf_repo: str) -> tuple[Any, TokenizerWrapper]: ...

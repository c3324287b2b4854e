from pathlib import Path
from typing import Any

def load_config(model_path: Path) -> dict[str, Any]: ...
MODEL_REMAPPING: dict[str, str]

def load_model(model_path: Path, lazy: bool = False) -> tuple[Any, dict[str, Any]]: ...

from pathlib import Path
from typing import Any

def load_model(model_path: Path, lazy: bool = False) -> tuple[Any, dict[str, Any]]: ...

"""Tells what MLX computes on here, as JSON: `python -m node.engine.process.device_info`. Nothing is allocated."""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def look() -> dict[str, object]:
    """Give MLX's version and device, or why there is none; sizes in bytes."""
    if find_spec("mlx") is None:
        return {"installed": False, "error": "MLX is not installed"}
    try:
        import mlx.core as mx
    except (ImportError, OSError) as error:
        return {"installed": True, "error": str(error)}
    metal = bool(mx.metal.is_available())
    facts = mx.device_info() if metal else {}
    try:
        models = version("mlx-lm")
    except PackageNotFoundError:
        models = ""
    return {
        "installed": True, "error": "", "version": version("mlx"), "models": models,
        "device": str(facts.get("device_name", "")) if metal else "cpu", "metal": metal,
        "most": int(facts.get("max_recommended_working_set_size", 0)),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(look()))
    sys.exit(0)

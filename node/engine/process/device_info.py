"""MLX device of this machine as JSON: `python -m node.engine.process.device_info`. Allocates no GPU memory."""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def read_device() -> dict[str, object]:
    """Return the versions of MLX and mlx-lm, and the facts about the device, as a JSON object.

    `version` is the version of MLX, and `models` the version of mlx-lm; empty without mlx-lm. `device` is the name of
    the Metal device; `cpu` without Metal. `metal` is whether MLX has a Metal device. `most` is Metal's recommended
    working set in bytes; 0 without Metal. If MLX is missing or cannot be imported, return only `installed` and `error`.
    """
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
        "installed": True,
        "error": "",
        "version": version("mlx"),
        "models": models,
        "device": str(facts.get("device_name", "")) if metal else "cpu",
        "metal": metal,
        "most": int(facts.get("max_recommended_working_set_size", 0)),
    }


if __name__ == "__main__":
    print(json.dumps(read_device()))
    sys.exit(0)

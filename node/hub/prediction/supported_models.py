"""Check whether the installed mlx-lm can build an architecture, by reading its files without an import.

An import of mlx-lm loads MLX, which the agent and the coordinator must not do.
"""

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

_RENAMED, _RENAMED_ARCHITECTURES = "MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING"


def find_unsupported(config: Mapping[str, Any]) -> str:
    """Return the `model_type` of a config if the installed mlx-lm cannot build this type; empty if it can.

    The result is also empty if mlx-lm is not installed, or the config names no type.
    """
    folder = _find_library()
    kind = config.get("model_type")
    if folder is None or not isinstance(kind, str):
        return ""
    tables = _read_tables(folder / "utils.py")
    architectures = config.get("architectures")
    listed = cast("Sequence[object]", architectures) if isinstance(architectures, list) else ()
    names = [name for name in listed if isinstance(name, str)]
    renamed = next((to for name in names if (to := tables[_RENAMED_ARCHITECTURES].get((kind, name)))), None)
    return "" if (renamed or tables[_RENAMED].get(kind, kind)) in _list_modules(folder / "models") else kind


@cache
def _list_modules(folder: Path) -> frozenset[str]:
    """Return the names of the modules and packages in a folder."""
    return frozenset(path.stem for path in folder.iterdir())


@cache
def _find_library() -> Path | None:
    spec = find_spec("mlx_lm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@cache
def _read_tables(file: Path) -> dict[str, dict[object, str]]:
    """Return the tables of renamed architectures in a module of mlx-lm; a table that the module lacks is empty."""
    tables: dict[str, dict[object, str]] = {_RENAMED: {}, _RENAMED_ARCHITECTURES: {}}
    for part in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name) and part.targets[0].id in tables:
            tables[part.targets[0].id] = cast("dict[object, str]", ast.literal_eval(part.value))
    return tables

"""Import of transformers without reading the sources of all its models.

At its import, transformers reads about 2,000 source files twice, to find which names each module defines. That takes a
third of the CPU time of an engine's imports. The names of a version are fixed. They are therefore stored in a file, as
Python stores bytecode. As with bytecode, a file that cannot be written is not an error, and a file of another version
is not used.

`install()` must be called before any module imports transformers.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import cache_from_source, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

Structure = dict[frozenset[str], dict[str, set[str]]]
"""Names that each module defines, by the set of backends that they need: `{backends: {module: names}}`."""
_MODULE = "transformers.utils.import_utils"
"""Module with the function `define_import_structure`, which is replaced."""


def install() -> None:
    """Add an import hook that replaces the function of transformers that reads the sources of its models.

    Do nothing if the hook exists, or if `transformers.utils.import_utils` is already imported.
    """
    if _MODULE not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finder of the module `_MODULE`. It removes itself when that module is first imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return spec
        return spec_from_file_location(fullname, spec.origin, loader=_Loader(spec.loader))


class _Loader(Loader):
    """Loader of the module `_MODULE`. It replaces the function after the module has run."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        models = Path(str(module.__file__)).parents[1] / "models"
        file = Path(cache_from_source(__file__)).with_suffix(".transformers.json")
        define = module.__dict__["define_import_structure"]
        module.__dict__["define_import_structure"] = create_reader(models, define, file)


def create_reader(models: Path, define: Callable[..., Structure], file: Path) -> Callable[..., Structure]:
    """Return a replacement of `define(path, prefix)` that determines the structure of the folder `models` only once.

    If `file` has the structure, the folder is not read. Otherwise the structure is written to `file`, unless Python
    writes no bytecode; a write error is ignored. The replacement passes every other folder to `define`.
    """
    known: list[Structure] = []

    def read(module_path: str | Path, prefix: str | None = None) -> Structure:
        path = Path(module_path)
        if models not in (path, path.parent):
            return define(module_path, prefix)
        if not known:
            known.append(_read_or_define(models, define, file))
        start = "" if prefix is None else f"{prefix}."
        return {
            backends: {start + name: set(names) for name, names in modules.items()}
            for backends, modules in known[0].items()
        }

    return read


def _read_or_define(models: Path, define: Callable[..., Structure], file: Path) -> Structure:
    key = _describe(models)
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(file.read_bytes())
        if found["key"] == key:
            return {
                frozenset(backends): {name: set(names) for name, names in modules.items()}
                for backends, modules in found["structure"]
            }
    structure = define(models)
    if not sys.dont_write_bytecode:
        rows = [
            (sorted(backends), {name: sorted(names) for name, names in modules.items()})
            for backends, modules in structure.items()
        ]
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps({"key": key, "structure": rows}))
            temporary.replace(file)
    return structure


def _describe(models: Path) -> list[str | int]:
    """Return values that differ for each version and each installation of transformers."""
    init = models.parent / "__init__.py"
    return [str(models), models.stat().st_mtime_ns, init.stat().st_mtime_ns, init.stat().st_size]

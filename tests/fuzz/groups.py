"""The groups of this package: every module in it that has `run`."""

import importlib
import pkgutil
from typing import Protocol, cast

import tests.fuzz


class Group(Protocol):
    """One reader under mutated input (`tests.fuzz`)."""

    COUNT: int

    def run(self, seed: int, count: int) -> list[str]: ...


def groups() -> dict[str, Group]:
    """Return the groups by name."""
    names = [found.name for found in pkgutil.iter_modules(tests.fuzz.__path__)]
    modules = {
        name: importlib.import_module(f"tests.fuzz.{name}")
        for name in names
        if name not in ("__main__", "groups") and not name.startswith("test_")
    }
    return {name: cast("Group", module) for name, module in modules.items() if hasattr(module, "run")}

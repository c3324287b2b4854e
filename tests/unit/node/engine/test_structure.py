"""Sizes of the engine's classes and modules, and writers of attributes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import node.engine

ROOT = Path(node.engine.__file__).parent
MODULES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
MAX_METHODS, MAX_CLASS_LINES, MAX_MODULE_LINES = 25, 300, 400
FOREIGN = {
    "kv/kv_cache.py": "caches of mlx-lm, which have no methods for this",
    "scheduling/decode_batch.py": "batches and caches of mlx-lm, which have no methods for this",
}
"""Modules that write attributes of objects of other libraries, with the reason."""


def written(tree: ast.Module) -> Iterator[str]:
    """Yield the attributes of other objects than `self` that a module assigns or deletes."""
    for part in ast.walk(tree):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store | ast.Del):
            owner = part.value
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                yield f"{part.lineno}: {ast.unparse(part)}"


@pytest.mark.parametrize("module", [module for module in MODULES if module not in FOREIGN])
def test_a_module_writes_attributes_of_its_own_objects_only(module: str):
    assert list(written(MODULES[module])) == []


@pytest.mark.parametrize("module", FOREIGN)
def test_every_exception_is_needed(module: str):
    assert list(written(MODULES[module]))


@pytest.mark.parametrize("module", MODULES)
def test_no_module_and_no_class_is_too_large(module: str):
    assert len((ROOT / module).read_text().splitlines()) <= MAX_MODULE_LINES
    classes = [node for node in ast.walk(MODULES[module]) if isinstance(node, ast.ClassDef)]
    for one in classes:
        assert sum(isinstance(part, ast.FunctionDef) for part in one.body) <= MAX_METHODS, one.name
        assert (one.end_lineno or 0) - one.lineno < MAX_CLASS_LINES, one.name

"""Pin of uvicorn, whose HTTP protocol class ours extends: its version, and the attributes that ours uses."""

import ast
import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

ROOT = Path(__file__).parents[4]
SOURCES = [ROOT / "coordinator" / "http" / name for name in ("http_protocol.py", "chat_fast_path.py")]
CLASSES = ("DeadlineProtocol", "FastPathProtocol")


def inherited_names() -> set[str]:
    """Return the attributes of `self` and `super()` in our protocol classes that these classes do not set."""
    used, own = set[str](), set[str]()
    classes = [
        part
        for source in SOURCES
        for part in ast.walk(ast.parse(source.read_text()))
        if isinstance(part, ast.ClassDef) and part.name in CLASSES
    ]
    for part in (inner for each in classes for inner in ast.walk(each)):
        if isinstance(part, ast.Attribute):
            of_super = isinstance(part.value, ast.Call) and ast.unparse(part.value) == "super()"
            of_self = isinstance(part.value, ast.Name) and part.value.id == "self"
            if of_super:
                used.add(part.attr)
            elif of_self:
                (own if isinstance(part.ctx, ast.Store) else used).add(part.attr)
        elif isinstance(part, ast.FunctionDef):
            own.add(part.name)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            own.add(part.target.id)
    return used - own


def test_uvicorn_is_pinned_to_the_tested_version():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [each for each in dependencies if each.startswith("uvicorn")] == [f"uvicorn=={version('uvicorn')}"]


def test_all_inherited_attributes_exist_in_uvicorn():
    names, source = inherited_names(), inspect.getsource(HttpToolsProtocol)
    assert {"flow", "pipeline", "cycle"} <= names
    assert [
        name for name in sorted(names) if not hasattr(HttpToolsProtocol, name) and f"self.{name}" not in source
    ] == []

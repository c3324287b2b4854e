"""Sizes of classes and modules, and writes to other objects' attributes, in all packages. Exceptions only shrink."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("coordinator", "host", "node", "router", "simulation", "wire")
MAX_METHODS, MAX_CLASS_LINES, MAX_MODULE_LINES = 25, 300, 400
MODULES = {
    str(path.relative_to(ROOT)): path.read_text()
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
FOREIGN_WRITES: dict[str, int] = {
    "coordinator/cli/commands/clients/trust_ca.py": 2,
    "coordinator/cli/spinner.py": 1,
    "coordinator/client/member_client.py": 4,
    "coordinator/doctor/bundle.py": 2,
    "coordinator/http/chat_fast_path.py": 1,
    "coordinator/http/http_protocol.py": 4,
    "coordinator/tls/cluster_ca.py": 4,
    "coordinator/tls/https_ca.py": 1,
    "host/iokit.py": 17,
    "host/log_setup.py": 1,
    "node/agent/enrollment.py": 3,
    "node/agent/identity.py": 4,
    "node/engine/kv/kv_cache.py": 19,
    "node/engine/scheduling/decode_batch.py": 13,
    "node/memory/darwin.py": 8,
    "node/video/worker/worker.py": 3,
    "router/http/coroutine_driver.py": 1,
    "router/http/upstream/client.py": 1,
}
"""Modules that assign or delete attributes of other objects than `self`, with the number of places.

Structures of the operating system, of mlx-lm, of uvicorn and of the standard library have no other interface. Examples
are TLS contexts, entries of archives and timers. The rest is to move into methods of the object.
"""


MAX_POSITIONAL = 6
POSITIONAL_CALLS = {"coordinator": 21, "host": 0, "node": 26, "router": 21, "simulation": 4, "wire": 2}
"""Maximum number of calls of classes with more than `MAX_POSITIONAL` positional arguments, which hide an exchange of
two. It may only fall."""


@cache
def inspect_module(module: str) -> tuple[list[tuple[str, int, int]], int, list[str]]:
    """Return the classes of a module, the number of its foreign writes, and the places of its long positional calls.

    A class has its name, number of methods and lines. A foreign write assigns or deletes an attribute of another object
    than `self` or `cls`.
    """
    classes, foreign_writes, calls = list[tuple[str, int, int]](), 0, list[str]()
    for part in ast.walk(ast.parse(MODULES[module])):
        if isinstance(part, ast.ClassDef):
            methods = sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in part.body)
            classes.append((f"{module}:{part.name}", methods, (part.end_lineno or part.lineno) - part.lineno + 1))
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store | ast.Del):
            foreign_writes += not (isinstance(part.value, ast.Name) and part.value.id in ("self", "cls"))
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and len(part.args) > MAX_POSITIONAL:
            calls += [f"{module}:{part.lineno}"] if part.func.id.lstrip("_")[:1].isupper() else []
    return classes, foreign_writes, calls


def test_no_class_is_above_a_limit():
    classes = [one for module in MODULES for one in inspect_module(module)[0]]
    large = [name for name, methods, lines in classes if methods > MAX_METHODS or lines > MAX_CLASS_LINES]
    assert large == []


def test_no_module_is_above_the_limit():
    assert [module for module, text in MODULES.items() if len(text.splitlines()) > MAX_MODULE_LINES] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_attributes_of_other_objects_are_written_only_where_known(package: str):
    found = {
        module: number
        for module in MODULES
        if module.startswith(package + "/") and (number := inspect_module(module)[1])
    }
    assert found == {module: number for module, number in FOREIGN_WRITES.items() if module.startswith(package + "/")}


@pytest.mark.parametrize("package", PACKAGES)
def test_structs_with_many_fields_are_built_by_keyword(package: str):
    calls = [call for module in MODULES if module.startswith(package + "/") for call in inspect_module(module)[2]]
    assert len(calls) <= POSITIONAL_CALLS[package], f"name the arguments in one of {', '.join(calls)}"

"""Check of function names in the packages: a name starts with a verb, or with the auxiliary of a predicate.

`docs.style_check` reports each deviation as `name`. The words and the exceptions are in docs/function_names.toml.
Properties, special methods, commands of click, route handlers (methods of a class `…Routes`), and methods whose names a
framework defines are not checked.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec

WORDS = Path(__file__).with_name("function_names.toml")
EXEMPT_DECORATORS = ("property", "cached_property", "setter", "command", "group")
"""Last words of decorators whose functions need no verb."""


class NameRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of docs/function_names.toml."""

    verbs: frozenset[str]
    """First words of functions that perform an action."""
    auxiliaries: frozenset[str]
    """First words of predicates, constructors and event handlers."""
    framework: frozenset[str]
    """Complete names that asyncio and other libraries define."""
    unchecked: tuple[str, ...]
    """Prefixes of the paths that are not checked yet. The list only shrinks."""
    exceptions: frozenset[str]
    """Qualified names of functions without a verb. The list only shrinks."""


RULES = msgspec.convert(tomllib.loads(WORDS.read_text(encoding="utf-8")), NameRules)


def find_misnamed(file: str, source: str, rules: NameRules = RULES) -> Iterator[tuple[int, str]]:
    """Yield line and qualified name of each function in a module that has no verb and is not an exception.

    `file` is the path in the repository, `source` the text of the module. Modules below `rules.unchecked` yield
    nothing.
    """
    if not file.startswith(rules.unchecked):
        module = file.removesuffix(".py").replace("/", ".")
        for line, name in _list_deviations(ast.parse(source), module, rules):
            if name not in rules.exceptions:
                yield line, name


def find_needless_exceptions(sources: dict[str, str], rules: NameRules = RULES) -> list[str]:
    """Return the exceptions that no function needs. `sources` maps the path of every module to its text."""
    needed = {
        name
        for file, source in sources.items()
        if not file.startswith(rules.unchecked)
        for _, name in _list_deviations(ast.parse(source), file.removesuffix(".py").replace("/", "."), rules)
    }
    return sorted(rules.exceptions - needed)


def _list_deviations(
    tree: ast.AST, prefix: str, rules: NameRules, *, routes: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield line and qualified name of each function without a verb. `routes`: `tree` is a class of route handlers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue
        if isinstance(node, ast.ClassDef):
            yield from _list_deviations(node, f"{prefix}.{node.name}", rules, routes=node.name.endswith("Routes"))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{node.name}"
            if not (routes and not node.name.startswith("_")) and not _is_well_named(node, rules):
                yield node.lineno, name
            yield from _list_deviations(node, name, rules)
        else:
            yield from _list_deviations(node, prefix, rules)


def _is_well_named(node: ast.FunctionDef | ast.AsyncFunctionDef, rules: NameRules) -> bool:
    first = node.name.lstrip("_").partition("_")[0]
    decorators = (ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in node.decorator_list)
    return (
        node.name in rules.framework
        or node.name.startswith("__")
        or first in rules.verbs | rules.auxiliaries
        or any(decorator in EXEMPT_DECORATORS for decorator in decorators)
    )

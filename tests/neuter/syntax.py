"""Find a snippet of Python in one function, by its syntax, and replace it.

Comments, quotes and line breaks do not count. A name of the snippet that the function does not know matches any local
name of the function, always the same one. The snippet therefore still applies after a local variable or a parameter is
renamed. In a snippet, a name that begins with `_any` stands for any expression. The statement `...` stands for any
statements, none included. Their matches replace the same name in the replacement, or its `...` in the same order.
"""

import ast
import builtins
import copy
import functools
import textwrap
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

ANY = "_any"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BODIES = ("body", "orelse", "finalbody")
NAMES: tuple[tuple[type[ast.AST], str], ...] = (
    (ast.Name, "id"),
    (ast.arg, "arg"),
    (ast.ExceptHandler, "name"),
    (ast.MatchAs, "name"),
    (ast.MatchStar, "name"),
    (ast.FunctionDef, "name"),
    (ast.AsyncFunctionDef, "name"),
)
"""The fields in which a syntax node holds a name that may be local."""
IGNORED = ("ctx", "kind", "type_comment")

Snippet = ast.expr | list[ast.stmt]


class NotApplicable(Exception):
    """A snippet does not apply; the text states the reason and the next step."""


@dataclass(slots=True)
class Found:
    """Matches of the names, wildcards and `...` of a snippet."""

    names: dict[str, str] = field(default_factory=dict[str, str])
    holes: dict[str, ast.expr] = field(default_factory=dict[str, ast.expr])
    runs: list[list[ast.stmt]] = field(default_factory=list[list[ast.stmt]])

    def copy(self) -> "Found":
        """Return an independent copy."""
        return Found(dict(self.names), dict(self.holes), list(self.runs))

    def become(self, other: "Found") -> None:
        """Take the bindings of another."""
        self.names, self.holes, self.runs = other.names, other.holes, other.runs


@dataclass(frozen=True, slots=True)
class Place:
    """One match: the expression, or statements `start` to `end` of one body."""

    owner: ast.AST
    """The node that holds the match in its field."""
    field: str
    start: int
    """Index in the field where it is a list, else -1."""
    end: int
    found: Found


def parse(node: str, becomes: str) -> tuple[Snippet, Snippet]:
    """Parse a snippet and its replacement: as expressions if both are expressions, else as statements."""
    try:
        return _expression(node), _expression(becomes)
    except SyntaxError:
        return _statements(node), _statements(becomes)


def _expression(text: str) -> ast.expr:
    return ast.parse(f"(\n{textwrap.dedent(text).strip()}\n)", mode="eval").body


def _statements(text: str) -> list[ast.stmt]:
    """Parse statements; `return`, `await` and `yield` are allowed outside of a function here."""
    body = textwrap.indent(textwrap.dedent(text).strip() or "pass", "    ")
    made = ast.parse(f"async def snippet():\n{body}").body[0]
    assert isinstance(made, ast.AsyncFunctionDef)
    return made.body if text.strip() else []


def definitions(tree: ast.Module, path: list[str]) -> list[tuple[ast.AST, ...]]:
    """Return all definitions with a qualified name, each with the enclosing ones, outermost first.

    A property with a setter has several definitions. Without a name the definition is the module.
    """
    at: list[tuple[ast.AST, ...]] = [(tree,)]
    for name in path:
        at = [(*outer, one) for outer in at for one in _members(outer[-1]) if one.name == name]
    return at


def _members(holder: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for child in ast.iter_child_nodes(holder):
        if isinstance(child, DEFINITIONS):
            yield child
        elif not isinstance(child, ast.expr):
            yield from _members(child)


class Scope:
    """One definition of a module: the scope of a snippet, with its local and known names."""

    def __init__(self, known: Set[str], chain: tuple[ast.AST, ...]) -> None:
        self.definition = chain[-1]
        self.local = _bound(self.definition).union(*(_bound(one) for one in chain if isinstance(one, FUNCTIONS)))
        self.known = self.local | known

    def places(self, snippet: Snippet) -> list[Place]:
        """Return all matches."""
        return list(self._expressions(snippet) if isinstance(snippet, ast.expr) else self._runs(snippet))

    def _nodes(self) -> Iterator[ast.AST]:
        """Walk the definition. In a class or a module, skip the bodies of its definitions."""
        whole = isinstance(self.definition, FUNCTIONS)
        waiting = [self.definition]
        while waiting:
            node = waiting.pop()
            yield node
            for name, value in ast.iter_fields(node):
                if not whole and node is not self.definition and isinstance(node, DEFINITIONS) and name == "body":
                    continue
                waiting += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST)]

    def _expressions(self, snippet: ast.expr) -> Iterator[Place]:
        for owner in self._nodes():
            for name, value in ast.iter_fields(owner):
                for index, one in enumerate(value) if isinstance(value, list) else [(-1, value)]:
                    found = Found()
                    if isinstance(one, ast.expr) and self._same(snippet, one, found):
                        yield Place(owner, name, index, index + 1, found)

    def _runs(self, snippet: list[ast.stmt]) -> Iterator[Place]:
        for owner in self._nodes():
            if owner is not self.definition and isinstance(owner, DEFINITIONS) and not self._inside(owner):
                continue
            for name in BODIES:
                body = getattr(owner, name, None)
                if not isinstance(body, list):
                    continue
                lengths = range(1, len(body) + 1) if any(map(_is_gap, snippet)) else [len(snippet)]
                for start in range(len(body)):
                    for end in (start + length for length in lengths if start + length <= len(body)):
                        found = Found()
                        if self._same_run(snippet, body[start:end], found):
                            yield Place(owner, name, start, end, found)
                            break

    def _inside(self, owner: ast.AST) -> bool:
        return isinstance(self.definition, FUNCTIONS) or owner is self.definition

    def _same(self, one: object, other: object, found: Found) -> bool:
        """Compare a part of the snippet with a part of the code, and record the matches of its names."""
        if isinstance(one, ast.Name) and one.id.startswith(ANY) and isinstance(other, ast.expr):
            held = found.holes.setdefault(one.id, other)
            return ast.dump(held) == ast.dump(other)
        if isinstance(one, list) and isinstance(other, list):
            if any(isinstance(part, ast.stmt) for part in one):
                return self._same_run(one, other, found)
            return len(one) == len(other) and all(map(lambda a, b: self._same(a, b, found), one, other))
        if not isinstance(one, ast.AST) or not isinstance(other, ast.AST):
            return type(one) is type(other) and one == other
        if type(one) is not type(other):
            return False
        named = dict(NAMES).get(type(one))
        return all(
            self._same_name(getattr(one, name), getattr(other, name), found)
            if name == named
            else self._same(getattr(one, name, None), getattr(other, name, None), found)
            for name in one._fields
            if name not in IGNORED
        )

    def _same_run(self, some: list[ast.stmt], others: list[ast.stmt], found: Found) -> bool:
        """Compare statements; `...` matches as few as possible."""
        if not some:
            return not others
        if not _is_gap(some[0]):
            return (
                bool(others) and self._same(some[0], others[0], found) and self._same_run(some[1:], others[1:], found)
            )
        for length in range(len(others) + 1):
            tried = found.copy()
            tried.runs.append(others[:length])
            if self._same_run(some[1:], others[length:], tried):
                found.become(tried)
                return True
        return False

    def _same_name(self, one: str | None, other: str | None, found: Found) -> bool:
        if one is None or other is None:
            return one is other
        if one in found.names:
            return found.names[one] == other
        if other in found.names.values():
            return False
        if one != other and (one in self.known or other not in self.local):
            return False
        found.names[one] = other
        return True


def _is_gap(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and statement.value.value is ...
    )


def _bound(definition: ast.AST) -> set[str]:
    """Return the names that a function binds, including those of its nested functions.

    For a class or a module only the names of its comprehensions and lambdas count, because its other names are visible
    from outside.
    """
    if isinstance(definition, FUNCTIONS):
        return {name for child in ast.iter_child_nodes(definition) for name in _binds(child)}
    inner = [one for one in ast.walk(definition) if isinstance(one, (ast.Lambda, *COMPREHENSIONS))]
    return {name for one in inner for name in _binds(one)}


def _binds(root: ast.AST) -> Iterator[str]:
    for node in ast.walk(root):
        named = dict(NAMES).get(type(node))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            continue
        if named is not None and (name := getattr(node, named)) is not None:
            yield name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


def _known(tree: ast.Module) -> set[str]:
    """Return the names that a module defines or imports at its level, and Python's own."""
    names = set(dir(builtins))
    for node in tree.body:
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
        else:
            names |= set(_binds(node))
    return names


@functools.lru_cache(maxsize=8)
def _parsed(source: str) -> tuple[ast.Module, frozenset[str]]:
    """Parse a module and collect its names. Results are cached, because guards of one module follow each other."""
    tree = ast.parse(source)
    return tree, frozenset(_known(tree))


def replaced(source: str, path: list[str], node: str, becomes: str) -> str:
    """Replace the only match of a snippet in a definition; return the new source.

    Lines outside of the replaced statement or expression stay unchanged if the result can be written in place.
    Otherwise the complete source is written again, without comments. Raise NotApplicable if the definition or the
    match is missing, or if there are several matches. Also raise it for a snippet that is no Python or reads an
    unknown name.
    """
    tree, known = _parsed(source)
    scopes = [Scope(known, one) for one in definitions(tree, path)]
    if not scopes:
        raise NotApplicable(f"there is no {'.'.join(path)}: correct `at`")
    try:
        snippet, replacement = parse(node, becomes)
    except SyntaxError as error:
        raise NotApplicable(f"its snippets are no Python ({error.msg}): correct `node` and `becomes`") from None
    found = [(scope, place) for scope in scopes for place in scope.places(snippet)]
    if len(found) != 1:
        advice = "correct `node`" if not found else "write more of the code around it into `node`"
        raise NotApplicable(f"its `node` was found {len(found)} times: {advice}")
    scope, place = found[0]
    if unknown := sorted(_reads(replacement) - scope.known - set(place.found.names) - set(_stores(replacement))):
        raise NotApplicable(f"nothing there has the name {', '.join(unknown)}: correct `becomes`")
    filled = _filled(replacement, place.found)
    part = _find_statement(tree, place.owner)
    with _changed(place, filled):
        expected = _unparse_part(tree, part)
    for made in _texts(source, tree, place, filled):
        try:
            parsed = ast.parse(made)
        except SyntaxError:
            continue
        if (part is None or len(parsed.body) == len(tree.body)) and _unparse_part(parsed, part) == expected:
            return made
    with _changed(place, filled):
        return ast.unparse(tree) + "\n"


def _find_statement(tree: ast.Module, owner: ast.AST) -> int | None:
    """Return the index of the statement of a module that holds a node; None for the module itself."""
    found = (index for index, one in enumerate(tree.body) if any(node is owner for node in ast.walk(one)))
    return next(found, None)


def _unparse_part(tree: ast.Module, part: int | None) -> str:
    """Return the source of one statement of a module, or of all. Other statements keep their lines in a change."""
    return ast.unparse(tree if part is None else tree.body[part])


def _reads(snippet: Snippet) -> set[str]:
    nodes = [snippet] if isinstance(snippet, ast.expr) else snippet
    return {
        one.id
        for node in nodes
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load) and not one.id.startswith(ANY)
    }


def _stores(snippet: Snippet) -> Iterator[str]:
    for node in [snippet] if isinstance(snippet, ast.expr) else snippet:
        yield from _binds(node)


class _Filler(ast.NodeTransformer):
    """Insert the matches of the snippet's names, wildcards and gaps into the replacement."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._runs = list(found.runs)

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:
        if isinstance(node, ast.Name) and node.id in self._found.holes:
            return copy.deepcopy(self._found.holes[node.id])
        if isinstance(node, ast.stmt) and _is_gap(node) and self._runs:
            return copy.deepcopy(self._runs.pop(0))
        named = dict(NAMES).get(type(node))
        if named is not None and (name := getattr(node, named)) is not None:
            setattr(node, named, self._found.names.get(name, name))
        return self.generic_visit(node)


def _filled(replacement: Snippet, found: Found) -> Snippet:
    filler = _Filler(found)
    if isinstance(replacement, ast.expr):
        made = filler.visit(copy.deepcopy(replacement))
        assert isinstance(made, ast.expr)
        return made
    body = filler.visit(ast.Module(copy.deepcopy(replacement), []))
    assert isinstance(body, ast.Module)
    return body.body or [ast.Pass()]


@contextmanager
def _changed(place: Place, made: Snippet) -> Iterator[None]:
    """Change the tree of a match for the time of the block."""
    held = getattr(place.owner, place.field)
    new: object = made
    if place.start >= 0:
        new = [*held[: place.start], *([made] if isinstance(made, ast.expr) else made), *held[place.end :]]
    setattr(place.owner, place.field, new)
    try:
        yield
    finally:
        setattr(place.owner, place.field, held)


def _texts(source: str, tree: ast.Module, place: Place, made: Snippet) -> Iterator[str]:
    """Yield the changed source with as few changed lines as possible: the match, then the enclosing statement."""
    held = getattr(place.owner, place.field)
    old = held[place.start : place.end] if place.start >= 0 else [held]
    yield _spliced(source, old, made)
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt) and _is_simple(statement) and place.owner in ast.walk(statement):
            with _changed(place, made):
                changed = copy.deepcopy(statement)
            yield _spliced(source, [statement], [changed])


def _is_simple(statement: ast.stmt) -> bool:
    return not any(hasattr(statement, name) for name in BODIES)


def _spliced(source: str, old: list[ast.expr] | list[ast.stmt], made: Snippet) -> str:
    """Write a replacement over consecutive nodes."""
    first, last = old[0], old[-1]
    lines = source.encode().splitlines(keepends=True)
    line = min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", []))])
    column = first.col_offset if line == first.lineno else len(lines[line - 1]) - len(lines[line - 1].lstrip())
    before = b"".join(lines[: line - 1]) + lines[line - 1][:column]
    assert last.end_lineno is not None
    after = lines[last.end_lineno - 1][last.end_col_offset :] + b"".join(lines[last.end_lineno :])
    if isinstance(made, ast.expr):
        text = f"({ast.unparse(made)})"
    else:
        margin = lines[line - 1][:column].decode()
        margin = margin if not margin.strip() else ""
        text = textwrap.indent(ast.unparse(ast.Module(made, [])), margin).removeprefix(margin)
    return (before + text.encode() + after).decode()

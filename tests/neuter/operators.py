"""Operators: small changes of a function, each of which a test of that function should detect.

They change decisions: comparisons, arithmetic, numbers, conditions, `and` and `or`, minimum and maximum. They also
remove statements, terms, members of collections, keyword arguments and calls around a value. They leave informative
parts alone: strings, f-strings, log calls, `raise` messages, annotations and docstrings.
"""

import ast
import builtins
import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGS = frozenset({"log", "_log", "logger", "_logger", "LOG"})
"""Names of calls that only inform."""
LONG_CHARACTERS = 200
"""Length of code above which a mutant is shortened in reports."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: the old content of a field of a node, and the new one."""

    owner: ast.AST
    field: str
    index: int
    """Position in the field where it is a list, else -1."""
    old: ast.expr | ast.stmt
    new: ast.expr | ast.stmt

    @property
    def line(self) -> int:
        """Return the line of the change."""
        return self.old.lineno

    def apply(self) -> None:
        """Change the tree."""
        self._put(self.new)

    def undo(self) -> None:
        """Change the tree back."""
        self._put(self.old)

    def _put(self, value: ast.AST) -> None:
        if self.index < 0:
            setattr(self.owner, self.field, value)
        else:
            getattr(self.owner, self.field)[self.index] = value

    def __str__(self) -> str:
        """Return both sides; of long ones only the differing words."""
        old, new = ast.unparse(self.old), ast.unparse(self.new)
        if len(old) > LONG_CHARACTERS:
            old, new = _differing(old.split(), new.split())
        return f"{old} → {new}"


def _differing(old: list[str], new: list[str]) -> Iterator[str]:
    """Return two texts without their common first and last words."""
    shorter = min(len(old), len(new))
    head = next((index for index in range(shorter) if old[index] != new[index]), shorter)
    tail = next((index for index in range(shorter - head) if old[-1 - index] != new[-1 - index]), shorter - head)
    return (" ".join(["…", *words[head : len(words) - tail], "…"]) for words in (old, new))


@dataclass(frozen=True, slots=True)
class Site:
    """A node of a function, and its position."""

    owner: ast.AST
    field: str
    node: ast.AST
    bound: Collection[str]
    """Names that the function binds several times, or takes as parameters."""


def mutants(function: ast.AST, operators: Iterable[str]) -> Iterator[Mutant]:
    """Yield all changes of the named operators in the body of a function, including its nested functions."""
    assert isinstance(function, FUNCTIONS)
    bound = _bound(function)
    chosen = [OPERATORS[name] for name in operators]
    for index, statement in enumerate(function.body):
        yield from _of(Site(function, "body", statement, bound), index, chosen)


def _of(site: Site, index: int, chosen: list[Callable[[Site], Iterator[ast.expr | ast.stmt]]]) -> Iterator[Mutant]:
    """Yield the changes of one node and of all below it."""
    node = site.node
    for make in chosen if isinstance(node, ast.expr | ast.stmt) else ():
        for new in make(site):
            ast.copy_location(new, node)
            ast.fix_missing_locations(new)
            assert isinstance(node, ast.expr | ast.stmt)
            yield Mutant(site.owner, site.field, index, node, new)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for place, child in enumerate(value) if isinstance(value, list) else [(-1, value)]:
            if isinstance(child, ast.AST) and not _informs(child, node):
                yield from _of(Site(node, name, child, site.bound), place, chosen)


def _informs(child: ast.AST, parent: ast.AST) -> bool:
    """Return whether a node only makes a text for users."""
    return (
        isinstance(child, ast.JoinedStr)
        or (isinstance(parent, ast.Raise) and isinstance(child, ast.Call))
        or (isinstance(parent, ast.Expr) and _logs(child))
    )


def _logs(call: ast.AST) -> bool:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    root = call.func.value
    name = root.attr if isinstance(root, ast.Attribute) else root.id if isinstance(root, ast.Name) else ""
    return name in LOGS


def _bound(function: ast.AST) -> set[str]:
    """Return the parameters of a function and of its nested functions, and the names that they assign several times."""
    nodes = list(ast.walk(function))
    stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return {name for name in stored if stored.count(name) > 1} | {
        node.arg for node in nodes if isinstance(node, ast.arg)
    }


def _values(site: Site) -> Iterator[ast.expr | ast.stmt]:
    """Yield replacements of operators, numbers and branches, and a body without one statement."""
    match site.node:
        case ast.Compare(left, ops, comparators):
            for index, one in enumerate(ops):
                if (other := COMPARISONS.get(type(one))) is not None:
                    yield ast.Compare(left, [*ops[:index], other(), *ops[index + 1 :]], comparators)
        case ast.BinOp(left, one, right) if not _is_text(left) and not _is_text(right):
            yield ast.BinOp(left, ARITHMETIC.get(type(one), ast.Add)(), right)
            yield from (left, right) if isinstance(one, ast.Add | ast.Mult) else (left,)
        case ast.BoolOp(one, values):
            yield ast.BoolOp(ast.Or() if isinstance(one, ast.And) else ast.And(), values)
            for index in range(len(values)):
                rest = [*values[:index], *values[index + 1 :]]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(one, rest)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)
            if value:
                yield ast.Constant(type(value)(0))
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.Call(ast.Name(name), arguments, keywords) if name in CALLS:
            yield ast.Call(ast.Name(CALLS[name], ast.Load()), arguments, keywords)
            if name in ("min", "max") and len(arguments) > 1:
                for index in range(len(arguments)):
                    rest = [*arguments[:index], *arguments[index + 1 :]]
                    yield rest[0] if len(rest) == 1 else ast.Call(ast.Name(name, ast.Load()), rest, keywords)
        case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value):
            if isinstance(value, ast.Call | ast.Await | ast.YieldFrom) and not _logs(value):
                yield ast.Pass()
        case ast.AugAssign(target, one, value):
            yield ast.AugAssign(target, ARITHMETIC.get(type(one), ast.Add)(), value)
            yield ast.Pass()
        case ast.Assign(targets) if all(_is_bound(target, site.bound) for target in targets):
            yield ast.Pass()
        case ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
            yield ast.Pass()
        case _:
            pass


def _is_bound(target: ast.expr, names: Collection[str]) -> bool:
    """Return whether the targets of an assignment have a value without it."""
    if isinstance(target, ast.Tuple):
        return all(_is_bound(one, names) for one in target.elts)
    return target.id in names if isinstance(target, ast.Name) else isinstance(target, ast.Attribute | ast.Subscript)


def _conditions(site: Site) -> Iterator[ast.expr]:
    """Yield the constants that can replace a condition."""
    owner, node = site.owner, site.node
    if isinstance(node, ast.Constant) or not isinstance(node, ast.expr):
        return
    if site.field in ("test", "ifs") and not isinstance(owner, ast.IfExp | ast.While):
        yield from (ast.Constant(True), ast.Constant(False))
    elif isinstance(owner, ast.While) and site.field == "test":
        yield ast.Constant(False)
    elif isinstance(node, ast.Compare) and not isinstance(owner, ast.BoolOp | ast.IfExp):
        yield from (ast.Constant(True), ast.Constant(False))


def _members(site: Site) -> Iterator[ast.expr]:
    """Yield copies of a collection, each without one of its members."""
    match site.node:
        case ast.Tuple() if isinstance(site.owner, ast.Subscript) or _is_unpacked(site.owner):
            pass
        case ast.Tuple(members, ast.Load()) | ast.List(members, ast.Load()) | ast.Set(members):
            for index in range(len(members)):
                less = copy.copy(site.node)
                less.elts = [*members[:index], *members[index + 1 :]]
                yield less
        case ast.Dict(keys, values):
            for index in range(len(keys)):
                yield ast.Dict([*keys[:index], *keys[index + 1 :]], [*values[:index], *values[index + 1 :]])
        case _:
            pass


def _is_unpacked(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(target, ast.Tuple) for target in node.targets)


def _calls(site: Site) -> Iterator[ast.expr]:
    """Yield copies of a call, each without one of its keyword arguments, and the first argument in place of a call."""
    if not isinstance(site.node, ast.Call):
        return
    called, arguments, keywords = site.node.func, site.node.args, site.node.keywords
    for index, keyword in enumerate(keywords):
        if not isinstance(keyword.value, ast.JoinedStr):
            yield ast.Call(called, arguments, [*keywords[:index], *keywords[index + 1 :]])
    wraps = isinstance(called, ast.Name) and called.id.islower() and not hasattr(builtins, called.id)
    valued = not isinstance(site.owner, ast.Expr | ast.Await)
    if wraps and valued and arguments and not isinstance(arguments[0], ast.Starred):
        yield arguments[0]


OPERATORS: dict[str, Callable[[Site], Iterator[ast.expr | ast.stmt]]] = {
    "values": _values,
    "conditions": _conditions,
    "members": _members,
    "calls": _calls,
}


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))

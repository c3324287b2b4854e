"""Operators: small changes of a function, each of which a test of that function should notice.

They change what decides: comparisons, arithmetic, numbers, conditions, `and` and `or`, minimum and maximum, and they
remove statements and terms. They leave alone what only informs: strings, f-strings, log calls, `raise` messages,
annotations and docstrings.
"""

import ast
from collections.abc import Iterator
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
"""Names on which a call only informs."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: what stands in a field of a node, and what takes its place."""

    owner: ast.AST
    field: str
    index: int
    """In the field where it is a list, else -1."""
    old: ast.expr | ast.stmt
    new: ast.expr | ast.stmt

    @property
    def line(self) -> int:
        """Line of the change."""
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
        return f"{ast.unparse(self.old)} → {ast.unparse(self.new)}"


def mutants(function: ast.AST) -> Iterator[Mutant]:
    """Return all changes that the operators make in the body of a function, those of its nested functions included."""
    assert isinstance(function, FUNCTIONS)
    for index, statement in enumerate(function.body):
        yield from _of(function, "body", index, statement)


def _of(owner: ast.AST, field: str, index: int, node: ast.AST) -> Iterator[Mutant]:
    """Return the changes of one node and of all below it."""
    if isinstance(node, ast.expr | ast.stmt):
        for new in (*_instead(node), *_decided(node, owner, field)):
            ast.copy_location(new, node)
            ast.fix_missing_locations(new)
            yield Mutant(owner, field, index, node, new)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for place, child in enumerate(value) if isinstance(value, list) else [(-1, value)]:
            if isinstance(child, ast.AST) and not _informs(child, node):
                yield from _of(node, name, place, child)


def _informs(child: ast.AST, parent: ast.AST) -> bool:
    """Return whether a node only makes a text for people."""
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


def _instead(node: ast.expr | ast.stmt) -> Iterator[ast.expr | ast.stmt]:
    """Return what can take the place of one node."""
    match node:
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
        case ast.Assign([ast.Attribute() | ast.Subscript()], _) | ast.Delete() | ast.Raise() | ast.Continue():
            yield ast.Pass()
        case ast.Break():
            yield ast.Pass()
        case _:
            pass


def _decided(node: ast.expr | ast.stmt, owner: ast.AST, field: str) -> Iterator[ast.expr]:
    """Return the constants that can take the place of a condition, and collections with one member less."""
    if isinstance(node, ast.Constant) or not isinstance(node, ast.expr):
        return
    if field in ("test", "ifs") and not isinstance(owner, ast.IfExp | ast.While):
        yield from (ast.Constant(True), ast.Constant(False))
    elif isinstance(owner, ast.While) and field == "test":
        yield ast.Constant(False)
    elif isinstance(node, ast.Compare) and not isinstance(owner, ast.BoolOp | ast.IfExp):
        yield from (ast.Constant(True), ast.Constant(False))
    elif isinstance(node, ast.Tuple | ast.List | ast.Set) and field in ("comparators", "iter") and len(node.elts) > 1:
        for index in range(len(node.elts)):
            yield type(node)([*node.elts[:index], *node.elts[index + 1 :]])


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))

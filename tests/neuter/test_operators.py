import ast
import textwrap

import pytest

from tests.neuter.operators import OPERATORS, mutants


def made(body: str, *operators: str) -> list[str]:
    """Return the texts of the mutants of a function, each compiled once."""
    tree = ast.parse("async def f(self, given):\n" + textwrap.indent(textwrap.dedent(body), "    "))
    texts = list[str]()
    for mutant in mutants(tree.body[0], operators or OPERATORS):
        mutant.apply()
        compile(tree, "f", "exec")
        mutant.undo()
        texts.append(str(mutant))
    return texts


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a, b", ["(a, b) → (b,)", "(a, b) → (a,)"]),
        ("return [a]", ["[a] → []"]),
        ("return a in {1, b}", ["{1, b} → {b}", "{1, b} → {1}"]),
        ("return {a: 1, **b}", ["{a: 1, **b} → {**b}", "{a: 1, **b} → {a: 1}"]),
        ("c = a, b", ["(a, b) → (b,)", "(a, b) → (a,)"]),
        ("c, d = a, b", []),
        ("return dict[a, b]()", []),
    ],
)
def test_members_shorten_collections_that_are_values(body: str, expected: list[str]):
    assert made(body, "members") == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return g(a, b=c, **d)", ["g(a, b=c, **d) → g(a, **d)", "g(a, b=c, **d) → g(a, b=c)", "g(a, b=c, **d) → a"]),
        ("return self.g(a, b)", []),
        ("return list(a)", []),
        ("return Box(a)", []),
        ("return g(*a)", []),
        ("await g(a)", []),
        ("log.info(a, b=c)", []),
        ("raise Wrong(a, b=c)", []),
        ("return g(b=f'{a}')", []),
    ],
)
def test_calls_lose_a_keyword_or_are_replaced_by_their_argument(body: str, expected: list[str]):
    assert made(body, "calls") == expected


@pytest.mark.parametrize(
    ("body", "removed"),
    [
        ("given = 1", True),
        ("a = 1", False),
        ("a = 1\na = 2", True),
        ("self.a = 1", True),
        ("self.a = self.b[0] = 1", True),
        ("self.a, given = b", True),
        ("self.a, c = b", False),
    ],
)
def test_values_remove_assignments_to_what_has_a_value_already(body: str, removed: bool):
    assert any(text.endswith("→ pass") for text in made(body, "values")) is removed


def test_every_operator_makes_code_that_compiles():
    body = """
        kept = [one for one in (given, 2) if one > 1 and not self.full]
        while kept and len(kept) < 3:
            kept += [min(kept[0], 2, default=g(kept, key=-1)) if given else 1.5]
            if "a" in {"a", "b"}:
                continue
        for one in (1, 2):
            self.a = (one * 2) % 3
            del kept[0]
            break
        return {"a": self.a, **given}
    """
    for name in OPERATORS:
        assert made(body, name), name


def test_long_mutants_are_written_as_the_words_that_differ():
    long = ", ".join(f"name_{number}=value_{number}" for number in range(20))
    assert "… name_7=value_7, … → … …" in made(f"return g({long})", "calls")

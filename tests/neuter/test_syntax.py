import pytest

from tests.neuter.syntax import NotApplicable, replaced

SOURCE = '''"""A module."""

import os

LIMIT = 3


@os.fspath
def outer(items, limit=LIMIT):
    # a comment that stays
    total = sum(items)
    if total > limit:
        return f"{total} of {limit}"

    async def inner(item):
        async with item as held:
            await held.close()

    for item in items:
        inner(item)
    return None


class Box:
    SIZE = 4

    def __init__(self, size):
        self.size = size
        self.used = 0

    @property
    def free(self):
        return self.size - self.used

    @free.setter
    def free(self, value):
        self.used = self.size - value
'''


def test_an_expression_is_replaced_and_every_other_line_stays():
    made = replaced(SOURCE, ["outer"], "total > limit", "total >= limit")
    assert made == SOURCE.replace("if total > limit", "if (total >= limit)")


def test_quotes_line_breaks_and_comments_do_not_count():
    made = replaced(SOURCE, ["outer"], "f'{total} of {limit}'", "''")
    assert "return ('')" in made
    assert replaced(SOURCE, ["outer"], "(\n  total  # how many\n  > limit\n)", "False") == SOURCE.replace(
        "total > limit", "(False)"
    )


def test_a_renamed_local_matches_and_is_renamed_in_the_replacement():
    renamed = SOURCE.replace("total", "amount")
    made = replaced(renamed, ["outer"], "if total > limit:\n    ...", "if total > limit + total:\n    ...")
    assert "if amount > limit + amount:" in made


def test_names_are_renamed_consistently():
    code = "def f(a, b):\n    x = a + b\n    y = a + a\n    return x, y\n"
    assert "y = (0)" in replaced(code, ["f"], "c + c", "0")


@pytest.mark.parametrize("node", ["total > LIMIT", "size > limit", "os > limit"])
def test_only_locals_can_be_renamed(node: str):
    code = SOURCE + "\n\ndef size():\n    pass\n"
    with pytest.raises(NotApplicable, match="found 0 times"):
        replaced(code, ["outer"], node, "False")


def test_several_matches_are_refused_with_their_number():
    with pytest.raises(NotApplicable, match="found 4 times: write more"):
        replaced("def f(a):\n    return a + a, a * a\n", ["f"], "a", "b")


def test_a_missing_definition_is_named():
    with pytest.raises(NotApplicable, match=r"there is no Box\.fill"):
        replaced(SOURCE, ["Box", "fill"], "1", "2")


def test_an_unknown_name_in_the_replacement_is_refused():
    with pytest.raises(NotApplicable, match="has the name most"):
        replaced(SOURCE, ["outer"], "total > limit", "total > most")


def test_snippets_that_are_no_python_are_refused():
    with pytest.raises(NotApplicable, match="no Python"):
        replaced(SOURCE, ["outer"], "if total >", "pass")


def test_statements_are_removed():
    made = replaced(SOURCE, ["outer"], "return None", "")
    assert made == SOURCE.replace("return None", "pass")


def test_statements_are_added():
    made = replaced(SOURCE, ["Box", "__init__"], "self.used = 0", "self.used = 0\nself.full = False")
    assert made == SOURCE.replace("self.used = 0\n", "self.used = 0\n        self.full = False\n")


def test_a_gap_keeps_what_it_matched():
    made = replaced(SOURCE, ["outer"], "for item in items:\n    ...", "for item in items[1:]:\n    ...\n    break")
    assert "    for item in items[1:]:\n        inner(item)\n        break\n" in made


def test_a_gap_matches_nothing_too():
    code = "def f(a):\n    first(a)\n    last(a)\n"
    assert replaced(code, ["f"], "first(a)\n...\nlast(a)", "last(a)\n...") == "def f(a):\n    last(a)\n"


def test_a_wildcard_matches_equal_expressions():
    code = "def f(a, b):\n    return (a.x, a.y), (b.z, b.z)\n"
    assert replaced(code, ["f"], "(_any, _any)", "[_any]") == "def f(a, b):\n    return (a.x, a.y), ([b.z])\n"


def test_a_nested_async_function_has_its_own_name():
    made = replaced(SOURCE, ["outer", "inner"], "await x.close()", "pass")
    assert made == SOURCE.replace("await held.close()", "pass")


def test_both_parts_of_a_property_are_searched():
    assert "self.used = (0)" in replaced(SOURCE, ["Box", "free"], "self.size - new", "0")
    assert "return (0)" in replaced(SOURCE, ["Box", "free"], "self.size - self.used", "0")


def test_a_class_is_searched_without_its_methods():
    assert "SIZE = 5" in replaced(SOURCE, ["Box"], "SIZE = 4", "SIZE = 5")
    with pytest.raises(NotApplicable, match="found 0 times"):
        replaced(SOURCE, ["Box"], "self.used = 0", "pass")


def test_a_module_is_searched_without_its_functions():
    assert "LIMIT = 4" in replaced(SOURCE, [], "LIMIT = 3", "LIMIT = 4")
    with pytest.raises(NotApplicable, match="found 0 times"):
        replaced(SOURCE, [], "return None", "pass")


def test_a_decorator_and_a_default_belong_to_their_function():
    assert "@(os.fsencode)" in replaced(SOURCE, ["outer"], "os.fspath", "os.fsencode")
    assert "limit=(4)" in replaced(SOURCE, ["outer"], "LIMIT", "4")


def test_a_method_is_removed_with_its_decorators():
    made = replaced(SOURCE, ["Box"], "@free.setter\ndef free(self, value):\n    ...", "")
    assert "setter" not in made
    assert "def free(self):" in made


def test_an_expression_in_an_f_string_is_replaced():
    made = replaced('def f(a):\n    return f"{a} and {a + 1}"\n', ["f"], "a + 1", "a + 2")
    names: dict[str, object] = {}
    exec(made, names)
    assert eval("f(1)", names) == "1 and 3"

"""Tools in the common form of all dialects."""

import json

import pytest

from router.dialects.shared.common_fields import GrammarFormat
from router.dialects.shared.tool_calls import AnswerToolCall
from router.dialects.shared.tools import (
    INPUT,
    MAX_FUNCTION_NAME_CHARS,
    NO_PARAMETERS,
    ClientTool,
    OfferedTool,
    ToolSet,
    build_custom_function,
    build_function,
    collect_tools,
    decode_input,
    encode_input,
    render_omitted_part,
)
from router.errors import Problem


def collect(*tools: OfferedTool, allowed: frozenset[str] | None = None) -> ToolSet:
    found = collect_tools(tools, None, strict=False, allowed=allowed)
    assert isinstance(found, ToolSet)
    return found


@pytest.mark.parametrize("namespace", ["maps", "m" * MAX_FUNCTION_NAME_CHARS])
def test_a_second_tool_of_one_name_gets_its_namespace_within_the_longest_name(namespace: str):
    origin = ClientTool("find", namespace=namespace)
    found = collect(OfferedTool(build_function("find")), OfferedTool(build_function("find"), origin=origin))
    second = f"{namespace}__find"[:MAX_FUNCTION_NAME_CHARS]
    assert found.names == ("find", second)
    assert found.origins == {second: origin}
    assert [tool["function"]["name"] for tool in json.loads(found.text)] == ["find", second]


def test_one_strict_tool_makes_the_set_strict():
    plain, strict = OfferedTool(build_function("a")), OfferedTool(build_function("b"), strict=True)
    assert (collect(plain).strict, collect(plain, strict).strict) == (False, True)
    assert collect(plain, strict, allowed=frozenset({"a"})).names == ("a",)
    problem = collect_tools([plain], None, strict=False, allowed=frozenset({"a", "z", "y"}))
    assert isinstance(problem, Problem)
    assert problem.message == "tool_choice names y, which is not in tools"


def test_a_function_without_a_schema_gets_an_empty_one():
    assert build_function("a", None, None, strict=None) == {
        "type": "function",
        "function": {"name": "a", "parameters": NO_PARAMETERS},
    }
    assert build_function("a", "does", {"type": "object"}, strict=True)["function"] == {
        "name": "a",
        "description": "does",
        "parameters": {"type": "object"},
        "strict": True,
    }


def test_the_note_for_an_omitted_part_has_a_short_type():
    assert render_omitted_part("image") == "[image omitted: the model gets only text]"
    assert render_omitted_part("x" * 99) == f"[{'x' * 64} omitted: the model gets only text]"


def test_the_grammar_of_a_custom_tool_is_a_part_of_its_description():
    form = GrammarFormat(type="grammar", syntax="lark", definition="start: A")
    for description, expected in (("Patch.", "Patch.\n\n"), (None, "")):
        function = build_custom_function("patch", description, form)["function"]
        assert function["description"] == f"{expected}The input follows this lark grammar:\nstart: A"
        assert function["parameters"] == INPUT
    assert "description" not in build_custom_function("patch", None, None)["function"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(encode_input("+ x"), "+ x"), ("plain", "plain"), ("{}", "{}"), ('{"input":1}', '{"input":1}')],
)
def test_the_input_of_a_custom_call_is_its_text_or_else_its_arguments(arguments: str, text: str):
    assert decode_input(AnswerToolCall("c", "patch", arguments)) == text

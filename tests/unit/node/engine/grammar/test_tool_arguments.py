"""The named arguments of a tool, and the parameters that cannot be enforced."""

import json
from typing import Any

import pytest

from node.engine.grammar.tool_arguments import (
    MAX_ARGUMENTS,
    MAX_DEFINITION_CHARS,
    Argument,
    TextArgument,
    list_arguments,
    list_tool_variants,
)
from node.engine.grammar.tool_spec import ToolSpec, UnsupportedSchema


def list_of(schema: dict[str, Any], *, strict: bool = True) -> list[Argument]:
    return list_arguments(ToolSpec("weather", schema, strict=strict))


def refuse(schema: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedSchema) as refused:
        list_of(schema)
    return str(refused.value)


def test_required_arguments_without_a_schema_follow_and_may_have_any_value():
    arguments = list_of(
        {"type": "object", "properties": {"city": {"type": "string"}, "day": True}, "required": ["day", "unit"]}
    )
    assert [(one.name, one.is_required) for one in arguments] == [("city", False), ("day", True), ("unit", True)]
    schemas = [{key: value for key, value in one.schema.items() if key != "x-guidance"} for one in arguments]
    assert schemas == [{"type": "string"}, {}, {}]


def test_a_tool_without_parameters_has_no_arguments():
    assert list_of({}) == []


def test_a_reference_of_the_parameters_is_resolved():
    arguments = list_of({"$ref": "#/$defs/place", "$defs": {"place": {"properties": {"city": {}}}}})
    assert [one.name for one in arguments] == ["city"]


def test_only_strict_parameters_refuse_keywords_that_cannot_be_enforced():
    schema = {"properties": {"city": {}}, "oneOf": [{}], "anyOf": [{}]}
    assert "the parameters of weather use anyOf, oneOf " in refuse(schema)
    assert [one.name for one in list_of(schema, strict=False)] == ["city"]


def test_the_number_of_parameters_is_bounded():
    properties = {f"p{number}": {} for number in range(MAX_ARGUMENTS)}
    assert len(list_of({"properties": properties})) == MAX_ARGUMENTS
    assert "weather has more than 1000 parameters" in refuse({"properties": properties | {"one": {}}})


@pytest.mark.parametrize("schema", [{"type": "array"}, {"properties": ["city"]}, {"properties": 5}])
def test_parameters_that_are_no_object_are_refused(schema: dict[str, Any]):
    assert "the parameters of weather must be an object" in refuse(schema)


@pytest.mark.parametrize("place", ["$defs", "definitions"])
def test_shared_definitions_are_bounded_by_their_length_times_the_arguments_that_need_them(place: str):
    def create(length: int) -> dict[str, Any]:
        reference = {"$ref": f"#/{place}/word"}
        return {
            place: {"word": {"description": "x" * length}},
            "properties": {"one": reference, "two": reference, "three": {"type": "string"}},
        }

    empty = create(0)
    fitting = MAX_DEFINITION_CHARS // 2 - len(json.dumps([empty.get("$defs"), empty.get("definitions")]))
    assert len(list_of(create(fitting))) == 3
    assert "share are too long in total" in refuse(create(fitting + 1))


TEXT, NULL = {"type": "string"}, {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({"type": "string"}, TextArgument()),
        ({"type": "string", "minLength": 1}, TextArgument(filled=True)),
        ({"type": "string", "minLength": 0}, TextArgument()),
        ({"type": "string", "minLength": 2}, None),
        ({"type": "string", "maxLength": 9}, None),
        ({"type": "string", "pattern": "a"}, None),
        ({"type": ["string", "null"]}, TextArgument(nullable=True)),
        ({"type": ["string", "integer"]}, None),
        ({"type": "integer"}, None),
        ({"type": "null"}, None),
        ({}, None),
        ({"enum": ["a", "b"]}, TextArgument(("a", "b"))),
        ({"const": "a"}, TextArgument(("a",))),
        ({"type": "string", "enum": ["a", None]}, TextArgument(("a",), nullable=True)),
        ({"type": ["string", "null"], "enum": ["a"]}, TextArgument(("a",))),
        ({"type": "string", "enum": [None]}, None),
        ({"enum": [1, 2]}, None),
        ({"enum": ["a", 1]}, None),
        *(({"enum": ["a", text]}, None) for text in ("", " b", "b\n", "null", "NULL")),
        ({"anyOf": [TEXT, NULL]}, TextArgument(nullable=True)),
        ({"oneOf": [NULL, {"type": "string", "minLength": 1}]}, TextArgument(filled=True, nullable=True)),
        ({"anyOf": [TEXT]}, TextArgument()),
        ({"anyOf": [TEXT, {"type": "integer"}]}, None),
        ({"anyOf": [NULL]}, None),
        ({"anyOf": [True, NULL]}, None),
        (
            {"anyOf": [{"$ref": "#/$defs/a"}, NULL], "$defs": {"a": {"enum": ["x"]}}},
            TextArgument(("x",), nullable=True),
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": TEXT}}, TextArgument()),
    ],
    ids=str,
)
def test_an_argument_is_unquoted_text_only_if_no_other_value_is_possible(
    schema: dict[str, Any], wanted: TextArgument | None
):
    argument = Argument("city", is_required=True, schema=schema)
    assert argument.find_text_constraints(nullable=True) == wanted
    plain = None if wanted is None or wanted.nullable else wanted
    assert argument.find_text_constraints(nullable=False) == plain, "a parser without null reads it as text"


def declare(**properties: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": properties, "$defs": DEFINED}}}


DEFINED = {"number": {"type": "integer"}, "again": {"$ref": "#/$defs/number"}}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"anyOf": [{"type": "integer"}, NULL]}, "integer"),
        ({"oneOf": [NULL, {"$ref": "#/$defs/again"}]}, "integer"),
        ({"type": ["boolean", "null"]}, "boolean"),
        ({"$ref": "#/$defs/number"}, "integer"),
        ({"enum": ["a", None]}, "string"),
        ({"allOf": [{"$ref": "#/$defs/number"}], "default": 1}, "integer"),
        ({"allOf": [{"$ref": "#/$defs/number"}, {"minimum": 1}]}, ""),
        ({"type": ["boolean", "integer"]}, ""),
        ({"anyOf": [{"type": "integer"}, {}]}, ""),
        ({}, ""),
        ({"enum": ["a", 1]}, ""),
        ({"$ref": "#/$defs/missing"}, ""),
        ({"type": "array"}, ""),
        (True, ""),
    ],
    ids=str,
)
def test_a_parameter_with_one_type_besides_null_names_it_for_parsers(schema: object, kind: str):
    tools: list[object] = [declare(value=schema, other={"type": "string"})]
    variants = list_tool_variants(tools)
    assert variants[-1] is tools
    if kind:
        (plain,) = variants[0]
        assert isinstance(schema, dict)
        assert plain == declare(value={**schema, "type": kind}, other={"type": "string"})
    assert len(variants) == (2 if kind else 1)


@pytest.mark.parametrize(
    "tool", [1, None, {}, {"function": 1}, {"function": {"parameters": []}}, {"function": {}}], ids=str
)
def test_a_tool_that_is_none_is_left_as_it_is(tool: object):
    assert list_tool_variants([tool]) == ([tool],)

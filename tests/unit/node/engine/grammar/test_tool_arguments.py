"""The named arguments of a tool, and the parameters that cannot be enforced."""

import json
from typing import Any

import pytest

from node.engine.grammar.tool_arguments import MAX_ARGUMENTS, MAX_DEFINITION_CHARS, Argument, list_arguments
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

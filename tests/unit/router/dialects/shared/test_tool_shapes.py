"""Tools and arguments of calls in the formats of other dialects."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from router.admission.request_limits import MAX_TOOLS_BYTES
from router.dialects.shared.tool_shapes import (
    ArgumentsObject,
    ArgumentsText,
    convert_to_anthropic,
    convert_to_chat,
    convert_to_responses,
)

SCHEMA = {"type": "object"}
FLAT = {"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA}
NESTED = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}
ANTHROPIC = {"name": "look", "description": "Look.", "input_schema": SCHEMA}
BOTH = {"type": "function", "name": "look", "function": {"name": "other"}}
SEARCH = {"type": "web_search", "name": "search"}


@pytest.mark.parametrize("tool", [FLAT, NESTED, ANTHROPIC, {**ANTHROPIC, "type": "custom"}, {**FLAT, "type": None}])
def test_a_function_of_any_dialect_has_the_format_of_each_route(tool: dict[str, Any]):
    assert convert_to_responses(tool) == FLAT
    assert convert_to_chat(tool) == NESTED
    assert convert_to_anthropic(FLAT) == convert_to_anthropic(NESTED) == ANTHROPIC


@pytest.mark.parametrize("tool", [BOTH, SEARCH, "look", 7, None])
def test_a_tool_of_another_form_is_unchanged(tool: object):
    assert convert_to_responses(tool) == convert_to_chat(tool) == tool


def test_a_member_that_has_both_names_keeps_them():
    both = {"type": "function", "name": "look", "input_schema": SCHEMA, "parameters": {"type": "string"}}
    assert convert_to_responses(both) == both


def test_a_cache_mark_stays_outside_of_the_function():
    assert convert_to_chat({**ANTHROPIC, "cache_control": 1}) == {**NESTED, "cache_control": 1}


@pytest.mark.parametrize(("arguments", "decoded"), [("", {}), ('{"a":1}', {"a": 1}), ({"a": 1}, {"a": 1})])
def test_arguments_of_a_call_are_an_object(arguments: object, decoded: object):
    assert TypeAdapter(ArgumentsObject).validate_python(arguments) == decoded


@pytest.mark.parametrize("arguments", ["{", "[1]", '{"a":1,"a":2}', 7, None])
def test_arguments_that_are_no_object_are_refused(arguments: object):
    with pytest.raises(ValidationError):
        TypeAdapter(ArgumentsObject).validate_python(arguments)


def test_an_object_of_arguments_is_encoded_up_to_its_longest_text():
    text = TypeAdapter(ArgumentsText)
    assert text.validate_python({"a": [1, "ä"]}) == '{"a":[1,"ä"]}'
    assert text.validate_python("{") == "{", "a text is sent as the client wrote it"
    with pytest.raises(ValidationError, match="bytes of JSON"):
        text.validate_python({"a": "x" * MAX_TOOLS_BYTES})

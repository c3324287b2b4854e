"""Schemas of the libraries of clients: each rewritten one allows the same values, and llguidance accepts it."""

import itertools
import json
import re

import pytest
from llguidance import LLMatcher, LLTokenizer

from node.engine.grammar.compiler import render_grammar
from node.engine.grammar.sandbox_main import LIMITS, find_fault
from node.engine.grammar.schema_rewrite import FORMATS, PATTERNS, rewrite_schema
from node.engine.grammar.tool_spec import LENIENT, parse_tool_specs
from wire.frames import GrammarSpec

DECIMAL, EMAIL = PATTERNS
LOOKAHEAD = "^(?=.*[A-Z]).{8,}$"
TOKENIZER = LLTokenizer("byte")


def find_schema_fault(schema: object) -> str:
    grammar = render_grammar(GrammarSpec("json_schema", json.dumps(schema)), "", None, one_call=False)
    return find_fault(LLMatcher(TOKENIZER, grammar, log_level=0, limits=LIMITS))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]},
        {"type": "string", "format": "email", "pattern": EMAIL},
        {"type": ["string", "null"], "format": "password"},
        {"type": "array", "items": {"type": "string", "format": "uuid4"}, "uniqueItems": False},
        *({"type": "string", "format": form} for form in sorted(FORMATS)),
    ],
    ids=lambda part: json.dumps(part)[:60],
)
def test_a_schema_of_a_library_compiles(part: object):
    assert find_schema_fault({"type": "object", "properties": {"x": part}, "required": ["x"]}) == ""


@pytest.mark.parametrize(("pattern", "letters"), [(DECIMAL, "+-.05"), (EMAIL, "a.'-@")])
def test_a_pattern_without_assertions_matches_the_same_texts(pattern: str, letters: str):
    ends = (".aa", "a.aa") if "@" in letters else ("",)
    for length in range(6):
        for signs in itertools.product(letters, repeat=length):
            for text in ("".join(signs) + end for end in ends):
                assert bool(re.fullmatch(pattern, text)) == bool(re.fullmatch(PATTERNS[pattern], text)), text


def test_only_keywords_are_rewritten_and_their_order_is_kept():
    data: dict[str, object] = {"format": "cuid", "uniqueItems": False, "propertyNames": {}}
    schema: dict[str, object] = {
        "$defs": {"format": {"type": "string", "format": "cuid", "minLength": 1}},
        "properties": {"pattern": {"const": data}, "format": {"enum": [data], "default": data}},
        "prefixItems": [{"format": "uuid7"}, True],
        "items": {"not": {"format": "ipv4"}},
    }
    assert json.dumps(rewrite_schema(schema, strict=True)) == json.dumps(
        schema | {"$defs": {"format": {"type": "string", "minLength": 1}}, "prefixItems": [{"format": "uuid"}, True]}
    )


@pytest.mark.parametrize(
    ("schema", "rewritten"),
    [
        ({"items": [{}, True], "minItems": 1}, {"prefixItems": [{}, True], "minItems": 1}),
        ({"items": [], "additionalItems": False}, {"prefixItems": [], "items": False}),
        ({"items": {"items": [{}]}}, {"items": {"prefixItems": [{}]}}),
        ({"items": [{}], "prefixItems": [{}]}, {"items": [{}], "prefixItems": [{}]}),
        ({"items": [{}], "additionalItems": {"format": "x"}}, {"prefixItems": [{}], "items": {}}),
        ({"allOf": [{"$ref": "a", "title": "b"}], "title": "c"}, {"$ref": "a", "title": "c"}),
        ({"allOf": [{"enum": ["a"]}], "type": "string"}, {"enum": ["a"], "type": "string"}),
        *(
            (schema, schema)
            for schema in (
                {"allOf": [{"$ref": "a"}, {"$ref": "b"}]},
                {"allOf": [{"type": "string"}], "type": "string"},
                {"allOf": [{"properties": {}}], "additionalProperties": False},
                {"allOf": [True]},
            )
        ),
    ],
    ids=str,
)
def test_tuples_and_an_only_part_of_a_schema_get_their_newer_form(
    schema: dict[str, object], rewritten: dict[str, object]
):
    assert rewrite_schema(schema, strict=True) == rewritten


@pytest.mark.parametrize("keyword", [{"uniqueItems": True}, {"propertyNames": {"enum": ["a"]}}, {"pattern": LOOKAHEAD}])
def test_a_constraint_that_cannot_be_enforced_is_refused(keyword: dict[str, object]):
    assert find_schema_fault({"properties": {"x": keyword}})


def test_a_tool_that_is_not_strict_loses_keywords_that_cannot_be_enforced():
    part: dict[str, object] = {"type": "array", "items": {"not": {"const": 1}}, "uniqueItems": True, "then": {}}
    more: dict[str, object] = {"if": {"required": ["x"]}, "else": False, "not": {"required": ["y"]}}
    schema: dict[str, object] = {"type": "object", "properties": {"if": part}, **more}
    kept = {"type": "object", "properties": {"if": {"type": "array", "items": {}}}}
    assert rewrite_schema(schema, strict=False) == kept
    assert rewrite_schema(schema, strict=True) == schema
    assert find_schema_fault(kept) == ""
    assert all(find_schema_fault({key: value}) for key, value in more.items() if key != "else")


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [(LOOKAHEAD, False), (r"\bfoo", False), (r"(a)\1", False), (r"\(?=", True), (r"\\b", True), ("^a+$", True)],
)
def test_a_tool_that_is_not_strict_loses_patterns_that_cannot_be_enforced(pattern: str, kept: bool):
    schema: dict[str, object] = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}}
    text = json.dumps([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    (tool,) = parse_tool_specs(text, "")
    without = {"type": "object", "properties": {"x": {"type": "string"}}}
    assert tool.schema == (schema if kept else without) | {"x-guidance": LENIENT}
    strict = json.dumps([{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}])
    assert parse_tool_specs(strict, "")[0].schema["properties"] == schema["properties"]

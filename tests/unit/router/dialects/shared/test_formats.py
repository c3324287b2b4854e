"""All spellings of a format give the node the same grammar; an impossible one is a 400 that names it."""

import json
from typing import Any

import pytest

from router.admission.request_limits import MAX_GRAMMAR_BYTES
from router.dialects.anthropic.api import MessagesRoute
from router.dialects.ollama.api import OllamaChatRoute
from router.dialects.openai import chat
from router.dialects.openai.completion import CompletionRoute
from router.dialects.openai.responses import ResponsesRoute
from router.errors import Problem
from router.placement.candidate import GRAMMAR
from wire.frames import GrammarSpec

HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}
NAMED = {"type": "function", "function": {"name": "look"}}


def asked(**fields: object) -> GrammarSpec | None:
    found = chat.parse(json.dumps(HELLO | fields).encode())
    assert not isinstance(found, Problem), found
    assert (GRAMMAR in found.demand.features) == (found.params.grammar is not None)
    return found.params.grammar


def refused(**fields: object) -> Problem:
    found = chat.parse(json.dumps(HELLO | fields).encode())
    assert isinstance(found, Problem)
    assert found.status == 400
    return found


def test_a_format_in_every_wording():
    wanted = GrammarSpec("json_schema", TEXT)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    assert asked(response_format=form) == wanted
    assert asked(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}) == wanted
    for kind in ("json_object", "json_schema"):
        assert asked(response_format={"type": kind, "schema": SCHEMA}) == wanted
    assert asked(structured_outputs={"json": SCHEMA}) == wanted
    assert asked(structured_outputs={"json": TEXT}) == wanted
    for backend in ("guidance", "auto", "llguidance:no-fallback"):
        assert asked(guided_json=SCHEMA, guided_decoding_backend=backend) == wanted
    assert asked(response_format={"type": "json_object"}) == GrammarSpec("json_object")
    assert asked(response_format={"type": "json_object", "schema": None}) == GrammarSpec("json_object")
    assert asked(structured_outputs={"json_object": True, "whitespace_pattern": "_"}) == GrammarSpec(
        "json_object", "", "_"
    )
    assert asked(guided_regex="a+") == asked(structured_outputs={"regex": "a+"}) == GrammarSpec("regex", "a+")
    assert asked(guided_choice=["a", "b"]) == GrammarSpec("choice", '["a","b"]')
    assert asked(guided_grammar="start: A") == asked(grammar="start: A") == GrammarSpec("lark", "start: A")
    assert asked(json_schema=SCHEMA) == asked(json_schema=TEXT) == wanted
    assert asked(grammar="", json_schema=None) is None
    assert asked(response_format={"type": "text"}) is asked(structured_outputs={}) is asked() is None


def test_a_pattern_of_white_space_belongs_to_the_format_of_either_wording():
    for fields in (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "_"}, "guided_whitespace_pattern": "-"},
        {"structured_outputs": {"json": SCHEMA}, "guided_whitespace_pattern": "_"},
        {"guided_json": SCHEMA, "guided_whitespace_pattern": "_"},
    ):
        assert asked(**fields) == GrammarSpec("json_schema", TEXT, "_")
        assert asked(**fields, tools=[TOOL]) == GrammarSpec("json_schema", TEXT, "_", "free")
    long = "_" * (MAX_GRAMMAR_BYTES + 1)
    assert refused(guided_json=SCHEMA, guided_whitespace_pattern=long).param == "guided_json"
    assert asked(guided_json=SCHEMA, guided_whitespace_pattern=long[1:]) is not None


def test_the_other_dialects():
    wanted = GrammarSpec("json_schema", TEXT)
    hi = HELLO["messages"]
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    found = ResponsesRoute().parse(json.dumps({"model": "tiny", "input": "Hi", "text": form}).encode(), "k")
    assert not isinstance(found, Problem)
    assert found.params.grammar == wanted
    ollama = OllamaChatRoute().parse(json.dumps({"model": "tiny", "messages": hi, "format": SCHEMA}).encode(), "k")
    assert not isinstance(ollama, Problem)
    assert ollama.params.grammar == wanted
    plain = CompletionRoute().parse(json.dumps({"model": "tiny", "prompt": "Hi", "guided_json": SCHEMA}).encode(), "k")
    assert not isinstance(plain, Problem)
    assert plain.params.grammar == wanted


def test_tool_choice_becomes_a_call_mode():
    assert asked(tools=[TOOL]) is asked(tools=[TOOL], tool_choice="auto") is None
    assert asked(tools=[STRICT]) == GrammarSpec(calls="free")
    assert asked(tools=[STRICT], tool_choice="none") is None
    assert asked(tools=[TOOL], tool_choice="required") == GrammarSpec(calls="required")
    assert asked(tools=[TOOL], tool_choice="any") == GrammarSpec(calls="required")
    assert asked(tools=[TOOL], tool_choice=NAMED) == GrammarSpec(calls="required", tool="look")
    flat = {"type": "function", "name": "look"}
    assert asked(tools=[TOOL], tool_choice=flat) == GrammarSpec(calls="required", tool="look")
    assert asked(tools=[TOOL], response_format={"type": "json_object"}) == GrammarSpec("json_object", calls="free")


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "any"}, GrammarSpec(calls="required")),
        ({"type": "tool", "name": "look"}, GrammarSpec(calls="required", tool="look")),
        ({"type": "auto"}, None),
        ({"type": "none"}, None),
    ],
)
def test_anthropic_tool_choice_becomes_a_call_mode(choice: object, wanted: GrammarSpec | None):
    body = HELLO | {"max_tokens": 5, "tools": [{"name": "look", "input_schema": SCHEMA}], "tool_choice": choice}
    found = MessagesRoute().parse(json.dumps(body).encode(), "k")
    assert not isinstance(found, Problem)
    assert found.params.grammar == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json"),
        ({"json_schema": {}, "grammar": "a"}, "grammar"),
        ({"structured_outputs": {"json": {}, "choice": ["a"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": {}, "guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex"),
        ({"guided_json": {"enum": ["a" * MAX_GRAMMAR_BYTES]}}, "guided_json"),
        ({"guided_regex": "a", "guided_whitespace_pattern": "_"}, "whitespace_pattern"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ],
)
def test_invalid_format_field_is_named(fields: dict[str, object], param: str):
    assert refused(**fields).param == param


def test_several_are_all_named():
    message = refused(guided_json={}, guided_regex="a", response_format={"type": "json_object"}).message
    assert message.startswith("guided_json, guided_regex, response_format exclude each other")

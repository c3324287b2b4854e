"""Limits of a body before and during reading."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from router.admission.request_limits import MAX_KEYS, MAX_TEXTS, MAX_VALUES
from router.dialects.anthropic.api import MessagesRoute
from router.dialects.anthropic.schema import CountBody, MessagesBody
from router.dialects.ollama.schema import OllamaChatBody, OllamaGenerateBody, OllamaOptions
from router.dialects.openai.chat_schema import ChatBody
from router.dialects.openai.completion_schema import CompletionBody
from router.dialects.openai.responses import ResponsesRoute
from router.dialects.openai.responses_schema import ResponsesBody
from router.dialects.shared.strict_json import read_object
from router.errors import Problem

BODIES = [
    ChatBody,
    CompletionBody,
    CountBody,
    MessagesBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaOptions,
    ResponsesBody,
]


def lists(schema: object) -> Iterator[dict[str, Any]]:
    """Yield every list of a pydantic-core schema whose items are checked."""
    if isinstance(schema, dict):
        items = schema.get("items_schema", {"type": "any"})
        if schema.get("type") == "list" and items["type"] != "any":
            yield schema
        for part in schema.values():
            yield from lists(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from lists(part)


@pytest.mark.parametrize("body", BODIES)
def test_every_list_stops_at_its_first_error(body: Any):
    body.model_rebuild()  # the schema is built at the first use
    checked = list(lists(body.__pydantic_core_schema__))
    assert checked or body is OllamaGenerateBody
    for found in checked:
        assert found.get("fail_fast"), found
        assert found.get("max_length"), found


def message_of(body: bytes) -> str:
    found = read_object(body)
    return found.message if isinstance(found, Problem) else ""


def test_values_are_counted_outside_texts_only():
    text = json.dumps({"a": '[{,"\\"\\\\' * MAX_VALUES}).encode()
    assert len(text) > MAX_VALUES
    assert message_of(text) == ""
    assert message_of(b'{"a":[' + b"1," * (MAX_VALUES - 2) + b"1]}") == ""
    assert f"{MAX_VALUES + 1} values" in message_of(b'{"a":[' + b"1," * (MAX_VALUES - 1) + b"1]}")
    assert f"the limit is {MAX_VALUES}" in message_of(b'{"a":' + b"[" * MAX_VALUES)
    assert f"{MAX_TEXTS + 1} strings" in message_of(b'{"a":[' + b'"",' * (MAX_TEXTS - 1) + b'""]}')


@pytest.mark.parametrize("end", [b"\\", b"\\\\", b'\\"', b'\\\\\\"', b'\\\\"'])
def test_escapes_hide_no_values(end: bytes):
    """A text ends in escapes, complete or broken, and lists follow it."""
    body = b'{"a":"' + end + b'","b":[' + b"[]," * MAX_VALUES + b"[]]}"
    assert message_of(body)


def test_keys_of_an_object_are_bounded():
    assert message_of(json.dumps({str(number): 1 for number in range(MAX_KEYS)}).encode()) == ""
    assert "keys" in message_of(json.dumps({str(number): 1 for number in range(MAX_KEYS + 1)}).encode())


def test_neighbours_of_one_role_are_joined_as_before():
    said = [("user", "a"), ("user", ""), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e")]
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": role, "content": text} for role, text in said]}
    found = MessagesRoute().parse(json.dumps(body).encode(), "k")
    assert not isinstance(found, Problem)
    assert [(one.role, one.content) for one in found.messages] == [("user", "a\nb"), ("assistant", "cd"), ("user", "e")]


def test_items_of_one_turn_are_joined_as_before():
    def thinks(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    def says(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    def calls(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    items = [
        thinks("1"),
        thinks("2"),
        says("3"),
        calls("f"),
        calls("g"),
        says("4"),
        says("5"),
        thinks("6"),
        calls("h"),
        {"role": "user", "content": "7"},
    ]
    found = ResponsesRoute().parse(json.dumps({"model": "m", "input": items}).encode(), "k")
    assert not isinstance(found, Problem)
    messages = [
        (one.role, one.reasoning, one.content, [call.name for call in one.tool_calls]) for one in found.messages
    ]
    assert messages == [
        ("assistant", "1\n2", "3", ["f", "g"]),
        ("assistant", "", "4", []),
        ("assistant", "", "5", []),
        ("assistant", "6", "", ["h"]),
        ("user", "", "7", []),
    ]

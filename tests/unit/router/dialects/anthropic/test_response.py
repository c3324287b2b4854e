"""Answers in Anthropic's format, value by value."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from router.dialects.anthropic.api import MessagesRoute
from router.dialects.anthropic.response import encode_error
from router.errors import Problem
from tests.support.answers import CROWDED, CUT, FINISHED, SAID, TEXT_ONLY, asked, events, streamed, whole
from wire.frames import Channel

ASK: dict[str, Any] = {"max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
WEATHER = [{"name": "weather", "input_schema": {"type": "object"}}]
USAGE = {
    "input_tokens": 8,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 12,
    "output_tokens": 9,
    "output_tokens_details": {"thinking_tokens": 4},
}


def test_a_request_without_tokens_computes_only_its_prompt():
    """Anthropic's way to fill the prefix cache: `max_tokens: 0`."""
    warm: dict[str, Any] = ASK | {"max_tokens": 0}
    assert asked(MessagesRoute(), **warm)[1].params.max_tokens == 1
    answer = whole(MessagesRoute(), **warm)
    assert (answer["content"], answer["stop_reason"], answer["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert answer["usage"]["input_tokens"] == 8


def test_a_whole_message_has_every_block_and_the_exact_usage():
    assert whole(MessagesRoute(), **ASK, tools=WEATHER) == {
        "id": "msg_r1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "let me", "signature": "unsigned"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Ulm"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": USAGE,
    }


@pytest.mark.parametrize(
    ("finished", "calls", "reason", "stop"),
    [
        (FINISHED, False, "end_turn", None),
        (FINISHED, True, "tool_use", None),
        (CUT, False, "max_tokens", None),
        (CUT, True, "max_tokens", None),
        (replace(FINISHED, stops=("END",)), False, "stop_sequence", "END"),
        (replace(FINISHED, stops=("END",)), True, "stop_sequence", "END"),
        (replace(FINISHED, stops=("",)), False, "end_turn", None),
        (replace(FINISHED, reasons=()), False, "end_turn", None),
    ],
)
def test_stop_reason_matches_the_end_of_a_message(finished, calls: bool, reason: str, stop: str | None):
    said = (
        whole(MessagesRoute(), finished=finished, **ASK)
        if calls
        else whole(MessagesRoute(), TEXT_ONLY, finished, **ASK)
    )
    assert (said["stop_reason"], said["stop_sequence"]) == (reason, stop)
    pieces = SAID if calls else SAID[1:2]
    ended = events(streamed(MessagesRoute(), *pieces, finished=finished, **ASK))[-2][1]
    assert ended["delta"] == {"stop_reason": reason, "stop_sequence": stop}


def test_omitted_reasoning_is_in_no_message_and_its_tokens_are_counted():
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    found = whole(MessagesRoute(), **ASK, tools=WEATHER, thinking=thinking)
    assert [block["type"] for block in found["content"]] == ["text", "tool_use"]
    assert found["usage"] == USAGE
    stream = streamed(MessagesRoute(), *SAID, **ASK, tools=WEATHER, thinking=thinking)
    assert [data["content_block"]["type"] for name, data in events(stream) if name == "content_block_start"] == [
        "text",
        "tool_use",
    ]
    assert "let me" not in stream


def test_a_stream_opens_fills_and_closes_one_block_after_the_other():
    found = events(streamed(MessagesRoute(), *SAID, (Channel.CONTENT, "Done."), **ASK, tools=WEATHER))
    assert all(name == data["type"] for name, data in found)
    started = found[0][1]["message"]
    assert (started["id"], started["content"], started["stop_reason"]) == ("msg_r1", [], None)
    assert started["usage"] == {
        "input_tokens": 20,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert [data | {"type": name.removeprefix("content_block_")} for name, data in found[1:-2]] == [
        {"type": "start", "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"type": "delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "let me"}},
        {"type": "delta", "index": 0, "delta": {"type": "signature_delta", "signature": "unsigned"}},
        {"type": "stop", "index": 0},
        {"type": "start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "delta", "index": 1, "delta": {"type": "text_delta", "text": "I look."}},
        {"type": "stop", "index": 1},
        {
            "type": "start",
            "index": 2,
            "content_block": {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}},
        },
        {"type": "delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"city":"Ulm"}'}},
        {"type": "stop", "index": 2},
        {"type": "start", "index": 3, "content_block": {"type": "text", "text": ""}},
        {"type": "delta", "index": 3, "delta": {"type": "text_delta", "text": "Done."}},
        {"type": "stop", "index": 3},
    ]
    assert found[-2][1]["usage"] == USAGE
    assert found[-1] == ("message_stop", {"type": "message_stop"})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "timeout_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_an_error_has_the_type_that_its_clients_retry_by(status: int, kind: str):
    error = json.loads(encode_error(Problem(status, "code", "what", "field"), "r1"))
    assert error == {
        "type": "error",
        "error": {"type": kind, "message": "what", "code": "code", "param": "field", "details": {"error_code": "code"}},
        "request_id": "r1",
    }


def test_a_stream_that_breaks_ends_with_an_error_and_its_numbers():
    name, error = events(streamed(MessagesRoute(), *SAID[:1], broken=CROWDED, **ASK))[-1]
    assert (name, error["type"], error["error"]["type"], error["request_id"]) == (
        "error",
        "error",
        "overloaded_error",
        "r1",
    )
    assert error["error"]["memory"] == {
        "predicted": 9,
        "ceiling": 8,
        "current": 7,
        "reserved": 6,
        "estimate": 5,
        "margin": 4,
        "cap": 3,
        "headroom": 2,
        "bound_by": "dynamic",
    }

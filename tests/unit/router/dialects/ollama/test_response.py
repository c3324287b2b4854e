"""Answers in Ollama's format, value by value."""

import json
import math
from typing import Any

import pytest
from msgspec.structs import replace

from router.dialects.ollama.api import OllamaChatRoute, OllamaGenerateRoute
from router.dialects.ollama.response import encode_error
from router.dialects.shared.interface import Dialect
from router.dispatch.request import CompleteAnswer
from router.errors import Problem
from tests.support.answers import CALL, CROWDED, CUT, FINISHED, SAID, streamed, whole
from wire.frames import Channel, Finished, Timings

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
GENERATE: dict[str, Any] = {"prompt": "hi"}
BOTH = pytest.mark.parametrize(("dialect", "body"), [(OllamaChatRoute(), CHAT), (OllamaGenerateRoute(), GENERATE)])
END = {
    "done": True,
    "done_reason": "stop",
    "total_duration": 3_750_000_000,
    "load_duration": 500_000_000,
    "prompt_eval_count": 20,
    "cached_tokens": 12,
    "prompt_eval_duration": 1_250_000_000,
    "eval_count": 9,
    "eval_duration": 2_000_000_000,
}
ABOUT = {"model": "tiny", "created_at": "2023-11-14T22:13:20Z"}
CALLS = [{"id": "call_1", "function": {"index": 0, "name": "weather", "arguments": {"city": "Ulm"}}}]


def test_a_whole_chat_has_its_message_counts_and_nanoseconds():
    assert whole(OllamaChatRoute(), **CHAT, stream=False) == ABOUT | END | {
        "message": {"role": "assistant", "content": "I look.", "thinking": "let me", "tool_calls": CALLS}
    }


def test_a_whole_generation_has_its_response_counts_and_nanoseconds():
    assert whole(OllamaGenerateRoute(), **GENERATE, stream=False) == ABOUT | END | {
        "response": "I look.",
        "thinking": "let me",
        "tool_calls": CALLS,
    }


def test_ollama_stream_has_a_line_for_each_piece_and_one_for_the_end():
    said = {"role": "assistant", "content": ""}
    assert [json.loads(line) for line in streamed(OllamaChatRoute(), *SAID, **CHAT).splitlines()] == [
        ABOUT | {"message": said | {"thinking": "let me"}, "done": False},
        ABOUT | {"message": said | {"content": "I look."}, "done": False},
        ABOUT | {"message": said | {"tool_calls": CALLS}, "done": False},
        ABOUT | END | {"message": said},
    ]


def test_each_call_of_an_answer_has_its_own_index():
    """Open WebUI joins the arguments of calls with the same index, and takes 0 without one."""
    two = [(Channel.TOOL_CALL, CALL), (Channel.TOOL_CALL, CALL)]
    lines = [json.loads(line) for line in streamed(OllamaChatRoute(), *two, **CHAT).splitlines()[:-1]]
    calls = [call for line in lines for call in line["message"]["tool_calls"]]
    answer = CompleteAnswer({}, {0: (CALL, CALL)}, {}, "tiny-1")
    whole_calls = whole(OllamaChatRoute(), answer=answer, **CHAT, stream=False)["message"]["tool_calls"]
    assert [call["function"]["index"] for call in calls] == [0, 1]
    assert whole_calls == calls


@BOTH
@pytest.mark.parametrize(
    ("finished", "reason"),
    [
        (FINISHED, "stop"),
        (CUT, "length"),
        (replace(FINISHED, reasons=("tool_calls",)), "stop"),
        (replace(FINISHED, reasons=()), "stop"),
    ],
)
def test_only_the_limit_of_tokens_is_a_length(dialect: Dialect, body: dict, finished: Finished, reason: str):
    assert whole(dialect, finished=finished, **body, stream=False)["done_reason"] == reason
    assert json.loads(streamed(dialect, finished=finished, **body).splitlines()[-1])["done_reason"] == reason


def test_times_that_are_none_are_zero():
    odd = whole(OllamaChatRoute(), finished=replace(FINISHED, timings=Timings(-1.0, math.inf, math.nan)), **CHAT)
    assert [odd[f"{name}_duration"] for name in ("load", "prompt_eval", "eval", "total")] == [0, 0, 0, 0]


@BOTH
def test_a_stream_that_breaks_ends_with_the_error_and_its_numbers(dialect: Dialect, body: dict):
    *_, last = streamed(dialect, *SAID[1:2], broken=CROWDED, **body).splitlines(keepends=True)
    assert last.endswith("\n")
    error = json.loads(last)
    assert (error["error"], error["code"], error["param"], error["request_id"]) == (
        "no room",
        "no_headroom",
        None,
        "r1",
    )
    assert (error["memory"]["headroom"], error["memory"]["ceiling"], error["memory"]["bound_by"]) == (2, 8, "dynamic")
    assert "memory" not in json.loads(encode_error(Problem(500, "x", "y"), "r1"))

"""Answers of `/v1/responses`, value by value."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from router.dialects.openai.responses import ResponsesRoute
from router.dispatch.request import CompleteAnswer
from router.errors import Problem
from tests.support.answers import CALL, CREATED, CROWDED, CUT, FINISHED, SAID, asked, events, streamed, whole
from wire.frames import Channel, Finished, Message
from wire.refusals import FailureCode

WEATHER = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
USAGE = {
    "input_tokens": 20,
    "input_tokens_details": {"cached_tokens": 12, "cache_write_tokens": 0},
    "output_tokens": 9,
    "output_tokens_details": {"reasoning_tokens": 4},
    "total_tokens": 29,
}
REASONING = [{"type": "reasoning_text", "text": "let me"}]
TEXT = [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]


def test_whole_response_repeats_the_request_and_has_every_item():
    found = whole(
        ResponsesRoute(),
        input="hi",
        tools=WEATHER,
        temperature=0.25,
        top_p=0.5,
        max_output_tokens=64,
        instructions="be brief",
        metadata={"a": "b"},
        parallel_tool_calls=False,
        store=False,
        reasoning={"effort": "low"},
    )
    name = found["id"].removeprefix("resp_")
    assert found == {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": CREATED,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "tiny",
        "usage": USAGE,
        "instructions": "be brief",
        "max_output_tokens": 64,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "reasoning": {"effort": "low", "summary": None},
        "store": False,
        "temperature": 0.25,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": WEATHER,
        "top_p": 0.5,
        "truncation": "disabled",
        "background": False,
        "output": [
            {"type": "reasoning", "id": f"rs_{name}_0", "status": "completed", "summary": [], "content": REASONING},
            {"type": "message", "id": f"msg_{name}_1", "status": "completed", "role": "assistant", "content": TEXT},
            {
                "type": "function_call",
                "arguments": '{"city":"Ulm"}',
                "id": f"fc_{name}_2",
                "call_id": "call_1",
                "name": "weather",
                "status": "completed",
            },
        ],
    }


@pytest.mark.parametrize("fields", [{}, {"parallel_tool_calls": None, "store": None, "metadata": None, "tools": None}])
def test_response_repeats_the_defaults_of_fields_that_the_request_omits(fields: dict[str, Any]):
    found = whole(ResponsesRoute(), input="hi", **fields)
    repeated = {name: found[name] for name in found if name not in ("id", "created_at", "output", "usage", "model")}
    assert repeated == {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "background": False,
    }


@pytest.mark.parametrize(
    "choice",
    ["none", "required", {"type": "function", "name": "weather"}, {"type": "custom", "name": "patch"}],
    ids=str,
)
def test_response_repeats_tool_choice_and_format(choice: object):
    tools = [*WEATHER, {"type": "custom", "name": "patch"}]
    form = {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}, "verbosity": None}
    asked: dict[str, Any] = {"input": "hi", "tools": tools, "tool_choice": choice, "text": form}
    for found in (whole(ResponsesRoute(), **asked), events(streamed(ResponsesRoute(), **asked))[-1][1]["response"]):
        assert found["tool_choice"] == choice
        assert found["text"] == {"format": form["format"]}


@pytest.mark.parametrize(
    ("finished", "status", "details"),
    [
        (FINISHED, "completed", None),
        (CUT, "incomplete", {"reason": "max_output_tokens"}),
        (replace(FINISHED, stops=("END",)), "completed", None),
        (replace(FINISHED, reasons=()), "completed", None),
    ],
)
def test_only_the_limit_of_tokens_makes_it_incomplete(finished: Finished, status: str, details: object):
    without_call = CompleteAnswer({(0, Channel.REASONING): "let me", (0, Channel.CONTENT): "I look."}, {}, {})
    said = whole(ResponsesRoute(), without_call, finished, input="hi")
    name, last = events(streamed(ResponsesRoute(), *SAID[:2], finished=finished, input="hi"))[-1]
    assert name == f"response.{status}"
    for found in (said, last["response"]):
        assert (found["status"], found["incomplete_details"], found["usage"]) == (status, details, USAGE)
        assert [item["status"] for item in found["output"]] == ["completed", status]
    with_call = whole(ResponsesRoute(), finished=finished, input="hi")
    assert [item["status"] for item in with_call["output"]] == ["completed"] * 3


def test_events_are_numbered_and_each_item_is_added_filled_and_done():
    found = events(streamed(ResponsesRoute(), *SAID, (Channel.CONTENT, "Done."), input="hi", tools=WEATHER))
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    assert all(name == data["type"] for name, data in found)
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    thought = [name.replace("output_text", "reasoning_text") for name in text]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    items = [["output_item.added", *parts, "output_item.done"] for parts in (thought, text, call, text)]
    names = [name.removeprefix("response.") for name, _ in found]
    assert names == ["created", "in_progress", *(name for item in items for name in item), "completed"]
    places = [data["output_index"] for _, data in found[2:-1]]
    assert places == [at for at, item in enumerate(items) for _ in item]
    ids = {data["output_index"]: data["item_id"] for _, data in found[2:-1] if "item_id" in data}
    final = found[-1][1]["response"]
    assert [item["id"] for item in final["output"]] == [ids[at] for at in range(4)]
    assert len(set(ids.values())) == 4
    assert [data["item"] for name, data in found if name.endswith("item.done")] == final["output"]
    assert found[0][1]["response"]["usage"] is None
    assert final["output"][2]["arguments"] == '{"city":"Ulm"}'


def test_stored_stream_has_the_last_event_and_the_conversation():
    responses = ResponsesRoute()
    frames = streamed(responses, *SAID, (Channel.CONTENT, " Done."), input="hi", tools=WEATHER)
    final = events(frames)[-1][1]["response"]
    kept = responses.get("k1", final["id"])
    assert isinstance(kept, bytes)
    assert json.loads(kept) == final
    _, job = asked(responses, input="and?", previous_response_id=final["id"])
    before, answer, new = job.messages
    assert (before, new) == (Message("user", "hi"), Message("user", "and?"))
    assert (answer.role, answer.content, answer.reasoning) == ("assistant", "I look. Done.", "let me")
    assert [(call.id, call.name, call.arguments) for call in answer.tool_calls] == [
        ("call_1", "weather", json.loads(CALL)["arguments"])
    ]


@pytest.mark.parametrize(
    ("broken", "code"),
    [(CROWDED, "server_error"), (Problem(429, "rate_limited", "slower"), "rate_limit_exceeded")],
)
def test_failed_stream_keeps_its_text_and_has_the_reason(broken: Problem, code: str):
    found = events(streamed(ResponsesRoute(), *SAID[:2], broken=broken, input="hi"))
    name, last = found[-1]
    failed = last["response"]
    assert (name, failed["status"], failed["usage"]) == ("response.failed", "failed", None)
    assert failed["error"] == {"code": code, "message": broken.message, "type": broken.code}
    assert found[-2][0] == "response.output_item.done"
    assert found[-2][1]["item"]["status"] == "incomplete"
    assert failed["output"][0]["content"] == REASONING


def test_stream_that_its_client_left_is_stored_as_cancelled_without_an_error():
    responses = ResponsesRoute()
    left = Problem(499, FailureCode.CANCELLED, "the client cancelled the request")
    body = events(streamed(responses, *SAID[:2], broken=left, input="hi"))[-1][1]["response"]
    assert (body["status"], body["error"]) == ("cancelled", None)
    kept = responses.get("k1", body["id"])
    assert isinstance(kept, bytes)
    assert json.loads(kept) == body
    _, job = asked(responses, input="and?", previous_response_id=body["id"])
    assert job.messages == (
        Message("user", "hi"),
        Message("assistant", "I look.", reasoning="let me"),
        Message("user", "and?"),
    )
    assert whole(responses, input="and?", previous_response_id=body["id"])["previous_response_id"] == body["id"]


PATCH = '{"index":0,"id":"call_1","name":"patch","arguments":"{\\"input\\":\\"+ x\\"}"}'


def test_a_call_of_a_custom_tool_is_a_custom_call_with_its_text():
    tools = [{"type": "custom", "name": "patch"}]
    answer = CompleteAnswer({}, {0: (PATCH,)}, {}, "tiny-1")
    (item,) = whole(ResponsesRoute(), answer, input="hi", tools=tools)["output"]
    expected = {"type": "custom_tool_call", "call_id": "call_1", "name": "patch", "input": "+ x", "status": "completed"}
    assert item == expected | {"id": item["id"]}
    shown = [
        data for _, data in events(streamed(ResponsesRoute(), (Channel.TOOL_CALL, PATCH), input="hi", tools=tools))
    ]
    added = next(data for data in shown if data["type"] == "response.output_item.added")
    assert added["item"] == expected | {"id": added["item"]["id"], "input": "", "status": "in_progress"}
    where = {"item_id": added["item"]["id"], "output_index": 0}
    filled = [data for data in shown if "custom_tool_call_input" in data["type"]]
    assert [{key: value for key, value in data.items() if key != "sequence_number"} for data in filled] == [
        {"type": "response.custom_tool_call_input.delta", "delta": "+ x", **where},
        {"type": "response.custom_tool_call_input.done", "input": "+ x", **where},
    ]
    done = next(data for data in shown if data["type"] == "response.output_item.done")
    assert done["item"] == expected | {"id": added["item"]["id"]}

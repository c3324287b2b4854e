"""Conversion of `/v1/responses` items to messages, and conversations that continue stored answers."""

import json
from typing import Any

import pytest

from router.admission.request_limits import MAX_CALLS
from router.dialects.openai.responses import ResponsesRoute
from router.errors import Problem
from tests.support.answers import CREATED, FINISHED, TEXT_ONLY, asked
from wire.frames import Message, ToolCall


def convert(*items: dict[str, Any], **body: Any) -> tuple[Message, ...]:
    return asked(ResponsesRoute(), input=list(items), **body)[1].messages


def refused(route: ResponsesRoute, **body: Any) -> Problem:
    problem = route.parse(json.dumps({"model": "tiny", **body}).encode(), "k1")
    assert isinstance(problem, Problem)
    return problem


def say(role: str, text: object) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "weather", "arguments": "{}"}


def think(*texts: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text} for text in texts]}


def result(name: str, output: object) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": output}


HI = say("user", "hi")
CALLS = tuple(ToolCall(name, "weather", "{}") for name in "ab")


def test_reasoning_text_and_calls_are_one_message():
    found = convert(HI, think("let", "me"), think("see"), say("assistant", "I look."), call("a"), call("b"))
    assert found == (
        Message("user", "hi"),
        Message("assistant", "I look.", tool_calls=CALLS, reasoning="let\nme\nsee"),
    )


def test_a_summary_is_used_only_without_the_reasoning_itself():
    summary = {"summary": [{"type": "summary_text", "text": text} for text in ("in", "short")]}
    assert convert(HI, think("in full") | summary)[1] == Message("assistant", reasoning="in full")
    assert convert(HI, {"type": "reasoning", **summary})[1] == Message("assistant", reasoning="in\nshort")


def test_a_text_after_a_text_or_after_a_call_is_the_next_message():
    assert convert(HI, say("assistant", "one"), say("assistant", "two"))[1:] == (
        Message("assistant", "one"),
        Message("assistant", "two"),
    )
    assert convert(HI, call("a"), say("assistant", "two"), call("b"))[1:] == (
        Message("assistant", tool_calls=CALLS[:1]),
        Message("assistant", "two", tool_calls=CALLS[1:]),
    )
    assert convert(HI, HI)[1:] == (Message("user", "hi"),)


def test_results_are_messages_and_parts_are_joined():
    text = [{"type": "input_text", "text": "su"}, {"type": "input_text", "text": "n"}]
    found = convert(HI, call("a"), call("b"), result("a", text), result("b", "rain"))
    assert found[2:] == (Message("tool", "sun", tool_call_id="a"), Message("tool", "rain", tool_call_id="b"))
    parts = [{"type": "output_text", "text": "No"}, {"type": "refusal", "refusal": ", never"}]
    assert convert(HI, say("assistant", parts))[1] == Message("assistant", "No, never")


def test_an_image_in_a_result_becomes_a_text_and_is_named():
    """Codex sends an image that it has viewed in each request, which would all be refused."""
    parts = [
        {"type": "input_text", "text": "a.png "},
        {"type": "input_image", "image_url": "data:image/png;base64,aGk="},
    ]
    items = [say("user", "hi"), call("c1"), result("c1", parts)]
    _, job = asked(ResponsesRoute(), input=items)
    assert job.messages[-1].content == "a.png [input_image omitted: the model gets only text]"
    assert job.ignored == ("input[].output[].type=input_image",)
    assert refused(ResponsesRoute(strict=True), input=items).param == "input[].output[].type=input_image"


def test_calls_that_ran_on_another_server_are_left_out_and_named():
    """Sessions that began with OpenAI's service contain them; the answer after a search has its result."""
    foreign = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "mcp_list_tools", "id": "m1", "server_label": "s", "tools": []},
    ]
    items = [HI, foreign[0], say("assistant", "sun"), foreign[1], HI]
    _, job = asked(ResponsesRoute(), input=items)
    assert job.messages == (Message("user", "hi"), Message("assistant", "sun"), Message("user", "hi"))
    assert job.ignored == ("input[].type=web_search_call", "input[].type=mcp_list_tools")
    assert refused(ResponsesRoute(strict=True), input=items).param == "input[].type=web_search_call"
    assert refused(ResponsesRoute(), input=foreign).param == "input"


def test_calls_that_the_client_ran_for_another_server_are_calls_and_results():
    shell = {"type": "shell_call", "id": "s1", "call_id": "a", "status": "completed", "action": {"commands": ["ls"]}}
    streams = {"stdout": "x", "outcome": {"type": "exit"}}
    shot = {"type": "computer_screenshot", "image_url": "data:"}
    outputs = [streams, shot, {"type": "text", "text": "y"}, "z", None, [{}]]
    found = convert(HI, shell, {"type": "shell_call_output", "call_id": "a", "output": outputs})
    rendered = '{"stdout":"x","outcome":{"type":"exit"}}\n[computer_screenshot omitted: the model gets only text]\ny\nz'
    assert found[1:] == (
        Message("assistant", tool_calls=(ToolCall("a", "shell", '{"action":{"commands":["ls"]}}'),)),
        Message("tool", rendered + "\n\n[{}]", tool_call_id="a"),
    )
    deep: object = {}
    for _ in range(100):
        deep = {"a": deep}
    for wrong in ({"output": deep}, {"output": [deep]}):
        assert "nested" in refused(ResponsesRoute(), input=[{"type": "x_call_output", "call_id": "a"} | wrong]).message
    assert "nested" in refused(ResponsesRoute(), input=[{"type": "x_call", "call_id": "a", "action": deep}]).message


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "compaction", "encrypted_content": "x"}, "begin a new conversation"),
        ({"type": "other", "id": "o1"}, "'other' is not supported"),
    ],
)
def test_an_item_with_unreadable_content_is_refused(item: dict[str, Any], message: str):
    for before in (HI, {"type": "additional_tools", "tools": []}):
        problem = refused(ResponsesRoute(), input=[before, item])
        assert (problem.code, problem.param) == ("unsupported_parameter", "input[1].type")
    assert message in problem.message


def test_a_custom_call_and_its_result_have_the_text_as_argument():
    custom = {"type": "custom_tool_call", "call_id": "a", "name": "shell", "input": 'ls "x"'}
    output = {"type": "custom_tool_call_output", "call_id": "a", "output": "one"}
    assert convert(HI, custom, output, tools=[{"type": "custom", "name": "shell"}])[1:] == (
        Message("assistant", tool_calls=(ToolCall("a", "shell", '{"input":"ls \\"x\\""}'),)),
        Message("tool", "one", tool_call_id="a"),
    )


def test_the_number_of_calls_in_a_row_is_bounded():
    calls = [call(f"c{at}") for at in range(MAX_CALLS)]
    assert len(convert(HI, *calls)[1].tool_calls) == MAX_CALLS
    problem = refused(ResponsesRoute(), input=[HI, *calls, call("x")])
    assert (problem.status, problem.param) == (400, f"input[{MAX_CALLS + 1}]")
    assert len(convert(HI, *calls, HI, call("x"))) == 4, "a new turn begins a new count"


def store(route: ResponsesRoute, key: str = "k1", **body: Any) -> str:
    """Answer a request; return the id of the stored answer."""
    request = route.parse(json.dumps({"model": "tiny", **body}).encode(), key)
    assert not isinstance(request, Problem)
    (job,) = request.to_specs(key, "r1", CREATED)
    return json.loads(request.render_complete(job, TEXT_ONLY, FINISHED))["id"]


def test_a_stored_answer_is_continued_returned_and_deleted_by_its_key_only():
    route = ResponsesRoute()
    name = store(route, input="hi", instructions="be brief")
    _, job = asked(route, input="and?", previous_response_id=name)
    assert job.messages == (Message("user", "hi"), Message("assistant", "I look."), Message("user", "and?"))
    body = route.get("k1", name)
    assert isinstance(body, bytes)
    assert json.loads(body)["id"] == name
    for other in (route.get("k2", name), route.delete("k2", name)):
        assert isinstance(other, Problem)
        assert (other.status, other.code) == (404, "not_found")
    assert (
        route.delete("k1", name)
        == json.dumps({"id": name, "object": "response", "deleted": True}, separators=(",", ":")).encode()
    )
    assert isinstance(route.get("k1", name), Problem)
    assert isinstance(route.delete("k1", name), Problem)
    problem = refused(route, input="and?", previous_response_id=name)
    assert (problem.status, problem.code, problem.param) == (
        400,
        "previous_response_not_found",
        "previous_response_id",
    )


def test_an_item_is_referred_to_once_and_until_its_answer_is_deleted():
    route = ResponsesRoute()
    name = store(route, input="hi")
    body = route.get("k1", name)
    assert isinstance(body, bytes)
    reference = {"type": "item_reference", "id": json.loads(body)["output"][0]["id"]}
    more = say("user", "and?")
    _, job = asked(route, input=[reference, more])
    assert [(message.role, message.content) for message in job.messages] == [("assistant", "I look."), ("user", "and?")]
    twice = refused(route, input=[reference, more, reference])
    assert (twice.param, "twice" in twice.message) == ("input[2].id", True)
    assert isinstance(route.delete("k1", name), bytes)
    assert refused(route, input=[reference, more]).param == "input[0].id"


@pytest.mark.parametrize("keep", [False, True])
def test_an_answer_is_stored_unless_the_client_declines(keep: bool):
    route = ResponsesRoute()
    name = store(route, input="hi", store=keep)
    assert isinstance(route.get("k1", name), bytes) is keep

"""Conversion of Anthropic's messages to the messages of a frame."""

import json
from hashlib import sha256
from typing import Any

import pytest

from router.admission.request_limits import MAX_CALLS
from router.dialects.anthropic.api import MessagesRequest, MessagesRoute
from router.errors import Problem
from tests.support.answers import asked
from wire.frames import Message, ToolCall

USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}}
IMAGE = "[image omitted: the model gets only text]"
CALL = ToolCall("t1", "weather", '{"city":"Ulm"}')


def convert(*messages: tuple[str, object], **body: object) -> tuple[Message, ...]:
    turns = [{"role": role, "content": content} for role, content in messages]
    return asked(MessagesRoute(), max_tokens=9, messages=turns, **body)[1].messages


def refused(**body: Any) -> Problem:
    problem = MessagesRoute().parse(json.dumps({"model": "tiny", "max_tokens": 9, **body}).encode(), "k1")
    assert isinstance(problem, Problem)
    return problem


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_texts_of_one_role_become_one_message():
    blocks = [text("one"), text("two")]
    assert convert(("user", blocks), ("user", "three"), ("assistant", blocks), system=blocks) == (
        Message("system", "one\n\ntwo"),
        Message("user", "one\ntwo\nthree"),
        Message("assistant", "onetwo"),
    )


@pytest.mark.parametrize("checksum", ["fa690", "0aaa9"])
def test_the_attribution_line_of_an_agent_is_no_part_of_the_prompt(checksum: str):
    line = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={checksum};"
    rest = [text("You are an agent."), text(f"Not {line}")]
    wanted = Message("system", f"You are an agent.\n\nNot {line}")
    for system in ([text(line), *rest], [text(f"{line}\n{rest[0]['text']}"), rest[1]], f"{line}\n\n{wanted.content}"):
        assert convert(("user", "hi"), system=system) == (wanted, Message("user", "hi"))
    assert convert(("user", "hi"), system=[text(line)]) == (Message("user", "hi"),)


def test_reasoning_text_and_calls_of_a_turn_become_one_message():
    thoughts = [{"type": "thinking", "thinking": value, "signature": "s"} for value in ("let me", "look")]
    assert convert(("user", "hi"), ("assistant", [*thoughts, text("I look."), USE])) == (
        Message("user", "hi"),
        Message("assistant", "I look.", tool_calls=(CALL,), reasoning="let me\nlook"),
    )


def test_each_result_is_a_message_of_its_own_and_texts_behind_are_the_user_s():
    results: list[dict[str, object]] = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [text("sun"), text("rain")]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "noon"},
        {"type": "tool_result", "tool_use_id": "t3"},
    ]
    assert convert(("user", "hi"), ("assistant", [USE]), ("user", [*results, text("and?")]))[2:] == (
        Message("tool", "sun\nrain", tool_call_id="t1"),
        Message("tool", "noon", tool_call_id="t2"),
        Message("tool", "", tool_call_id="t3"),
        Message("user", "and?"),
    )


def test_an_image_in_a_result_becomes_a_text_and_is_named():
    """An agent that reads an image sends it in each request, which would all be refused."""
    image: dict[str, object] = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "aGk="},
    }
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("a.png"), image]}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [USE]}]
    body = {"model": "tiny", "max_tokens": 5, "messages": [*turns, {"role": "user", "content": [result]}]}
    found = MessagesRoute().parse(json.dumps(body).encode(), "k1")
    assert isinstance(found, MessagesRequest)
    assert found.messages[2].content == "a.png\n[image omitted: the model gets only text]"
    assert found.ignored == ("messages[].content[].content[].type=image",)
    refused = MessagesRoute(strict=True).parse(json.dumps(body).encode(), "k1")
    assert isinstance(refused, Problem)
    assert refused.param == "messages[].content[].content[].type=image"


PDF: dict[str, Any] = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "eA=="},
}


@pytest.mark.parametrize(
    ("block", "rendered"),
    [
        ({"type": "document", "source": {"type": "text", "data": "DOC"}, "title": "T", "context": "C"}, "T\nC\nDOC"),
        ({"type": "document", "source": {"type": "content", "content": "DOC"}, "citations": {}}, "DOC"),
        ({"type": "document", "source": {"type": "content", "content": [text("D"), {"type": "image"}]}}, f"D\n{IMAGE}"),
        ({"type": "tool_reference", "tool_name": "clock"}, "clock"),
        (
            {"type": "search_result", "source": "S", "title": "T", "content": [text("one"), text("two")]},
            "T\nS\none\ntwo",
        ),
    ],
)
def test_documents_and_search_results_are_texts(block: dict[str, Any], rendered: str):
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block, text("x")]}
    assert convert(("user", [block, text("x")])) == (Message("user", f"{rendered}\nx"),)
    assert convert(("assistant", [USE]), ("user", [result]))[1].content == f"{rendered}\nx"


def test_a_file_is_refused_unless_a_tool_has_read_it():
    """Claude Code adds a PDF file that a tool has read to the message with the result, in each later request."""
    problem = refused(messages=[{"role": "user", "content": [PDF]}])
    assert (problem.code, problem.param) == ("unsupported_parameter", "messages[0].content[0].source.type")
    assert "send the text of the document" in problem.message
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [PDF]}
    messages = [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [result, PDF, text("x")]}]
    found = MessagesRoute().parse(json.dumps({"model": "tiny", "max_tokens": 9, "messages": messages}).encode(), "k1")
    assert isinstance(found, MessagesRequest)
    omitted = "[document omitted: the model gets only text]"
    assert [message.content for message in found.messages[1:]] == [omitted, f"{omitted}\nx"]
    assert found.ignored == ("messages[].content[].content[].type=document", "messages[].content[].type=document")


def test_blocks_of_another_server_s_tools_are_left_out_and_named():
    """Sessions that began with Anthropic's service contain them; the text after a search has its result."""
    foreign: list[dict[str, Any]] = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
    ]
    summary = {"type": "compaction", "content": "before "}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [summary, *foreign, text("sun")]}]
    _, job = asked(MessagesRoute(), max_tokens=9, messages=turns)
    assert job.messages == (Message("user", "hi"), Message("assistant", "before sun"))
    assert job.ignored == tuple(f"messages[].content[].type={block['type']}" for block in foreign)
    strict = MessagesRoute(strict=True).parse(
        json.dumps({"model": "m", "max_tokens": 9, "messages": turns}).encode(), "k"
    )
    assert isinstance(strict, Problem)
    assert strict.param == "messages[].content[].type=server_tool_use"
    for block in foreign:
        assert refused(messages=[{"role": "user", "content": [block]}]).param == "messages[0].content[0].type"


def test_an_empty_content_is_an_empty_message():
    assert convert(("user", "hi"), ("assistant", [])) == (Message("user", "hi"), Message("assistant"))


@pytest.mark.parametrize(
    ("role", "block", "only"),
    [
        ("user", USE, "assistant"),
        ("user", {"type": "thinking", "thinking": "x", "signature": "s"}, "assistant"),
        ("user", {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "x"}}, "system"),
        ("assistant", {"type": "tool_result", "tool_use_id": "t1", "content": "x"}, "user"),
    ],
)
def test_a_block_in_the_wrong_role_is_refused_with_its_path(role: str, block: dict[str, Any], only: str):
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": [text("x"), block]}]
    problem = refused(messages=messages)
    assert (problem.status, problem.param) == (400, "messages[1].content[1].type")
    assert f"only messages with the role {only} can have {block['type']}" in problem.message


def test_the_number_of_calls_of_a_message_is_bounded():
    most = [{**USE, "id": f"t{at}"} for at in range(MAX_CALLS)]
    assert len(convert(("user", "hi"), ("assistant", most))[1].tool_calls) == MAX_CALLS
    problem = refused(messages=[{"role": "assistant", "content": [*most, USE]}])
    assert (problem.status, problem.param) == (400, "messages[0].content")


@pytest.mark.parametrize(
    ("last", "continued"),
    [
        (("assistant", "The answer is"), True),
        (("assistant", [text("The answer is")]), True),
        (("user", "hi"), False),
        (("assistant", ""), False),
        (("assistant", [text("I look."), USE]), False),
    ],
)
def test_an_answer_that_the_client_has_begun_is_continued(last: tuple[str, object], continued: bool):
    turns = [{"role": "user", "content": "hi"}, {"role": last[0], "content": last[1]}]
    template = asked(MessagesRoute(), max_tokens=9, messages=turns)[1].template
    assert (json.loads(template) if template else {}) == ({"continue_final_message": True} if continued else {})


@pytest.mark.parametrize(("choice", "refuses"), [("auto", True), ("any", True), ("none", False)])
def test_a_choice_of_tools_needs_tools(choice: str, refuses: bool):
    body = {"messages": [{"role": "user", "content": "hi"}], "tool_choice": {"type": choice}}
    if refuses:
        assert refused(**body).param == "tool_choice"
    else:
        assert asked(MessagesRoute(), max_tokens=9, **body)[1].tools == ""


@pytest.mark.parametrize(
    ("metadata", "session"),
    [
        (None, ""),
        ({}, ""),
        ({"user_id": "u" * 64}, "u" * 64),
        ({"user_id": 7}, ""),
        ({"user_id": "u" * 257}, sha256(b"u" * 257).hexdigest()),
    ],
)
def test_the_session_is_the_client_s_user_id(metadata: object, session: str):
    _, job = asked(MessagesRoute(), max_tokens=9, messages=[{"role": "user", "content": "hi"}], metadata=metadata)
    assert job.session == session

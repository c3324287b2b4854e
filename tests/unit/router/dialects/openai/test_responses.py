"""Conversion of `/v1/responses` bodies to the frames of a node, value by value."""

import json
from hashlib import sha256

import pytest

from router.dialects.openai.responses import ResponsesRoute, build_unsupported_use
from router.errors import Problem
from tests.support.answers import FINISHED, WHOLE, asked, whole
from wire.frames import GenerationParams, GrammarSpec, Message

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def params(**body: object) -> GenerationParams:
    return asked(ResponsesRoute(), input="hi", **body)[1].params


def test_every_parameter_arrives():
    assert params() == GenerationParams()
    assert params(
        max_output_tokens=7, temperature=0.25, top_p=0.5, tools=[TOOL], parallel_tool_calls=False
    ) == GenerationParams(max_tokens=7, temperature=0.25, top_p=0.5, one_call=True)
    assert params(tools=[TOOL], parallel_tool_calls=True).one_call is False
    assert params(max_output_tokens=-1, reasoning={"effort": ""}) == GenerationParams()
    assert whole(ResponsesRoute(), input="hi", max_output_tokens=-1)["max_output_tokens"] is None


def test_a_conversation_begins_with_the_instructions():
    _, job = asked(ResponsesRoute(), input="hi", instructions="be brief")
    assert job.messages == (Message("system", "be brief"), Message("user", "hi"))
    assert asked(ResponsesRoute(), input="hi")[1].messages == (Message("user", "hi"),)


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"text": {"format": {"type": "text"}}}, None),
        ({"text": {"format": {"type": "json_object"}}}, GrammarSpec("json_object")),
        ({"tools": [TOOL]}, None),
        ({"tools": [TOOL], "tool_choice": "required"}, GrammarSpec(calls="required")),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}},
            GrammarSpec(calls="required", tool="weather"),
        ),
        ({"tools": [{**TOOL, "strict": True}]}, GrammarSpec(calls="free")),
        ({"tools": [TOOL, {**TOOL, "name": "clock", "strict": True}]}, GrammarSpec(calls="free")),
    ],
)
def test_formats_and_forced_calls_are_grammars(body: dict[str, object], grammar: GrammarSpec | None):
    assert params(**body).grammar == grammar


def test_a_schema_is_the_grammar_of_the_answer():
    found = params(text={"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}).grammar
    assert found is not None
    assert (found.kind, json.loads(found.value)) == ("json_schema", SCHEMA)


@pytest.mark.parametrize(
    ("effort", "template"),
    [("low", {"reasoning_effort": "low"}), ("none", {"reasoning_effort": "none", "enable_thinking": False})],
)
def test_an_effort_is_a_variable_of_the_template(effort: str, template: dict[str, object]):
    _, job = asked(ResponsesRoute(), input="hi", reasoning={"effort": effort})
    assert json.loads(job.template) == template


def test_further_tools_among_the_items_are_tools_of_the_request():
    more = {"type": "additional_tools", "role": "developer", "tools": [{**TOOL, "name": "clock"}]}
    hello = {"role": "user", "content": "hi"}
    _, job = asked(ResponsesRoute(), input=[more, hello], tools=[TOOL])
    assert [tool["function"]["name"] for tool in json.loads(job.tools)] == ["weather", "clock"]
    assert [message.content for message in job.messages] == ["hi"]
    alone = ResponsesRoute().parse(json.dumps({"model": "tiny", "input": [more]}).encode(), "k")
    assert isinstance(alone, Problem)
    assert alone.param == "input"


def test_tools_are_not_sent_with_tool_choice_none():
    told = asked(ResponsesRoute(), input="hi", tools=[TOOL])[1].tools
    assert json.loads(told)[0]["function"]["name"] == "weather"
    assert asked(ResponsesRoute(), input="hi", tools=[TOOL], tool_choice="none")[1].tools == ""


@pytest.mark.parametrize(
    ("body", "session"),
    [
        ({}, ""),
        ({"user": "u"}, "u"),
        ({"chat_id": "c", "user": "u"}, "c"),
        ({"session_id": "s", "chat_id": "c"}, "s"),
        ({"prompt_cache_key": "p", "session_id": "s"}, "p"),
        ({"user": "u" * 256}, "u" * 256),
        ({"user": "u" * 257}, sha256(b"u" * 257).hexdigest()),
    ],
)
def test_the_first_name_of_a_conversation_counts(body: dict[str, object], session: str):
    assert asked(ResponsesRoute(), input="hi", **body)[1].session == session


def test_an_answer_that_is_not_to_be_kept_is_not():
    for store, kept in ((None, 1), (True, 1), (False, 0)):
        responses = ResponsesRoute()
        body = {} if store is None else {"store": store}
        request, job = asked(responses, input="hi", **body)
        request.render_complete(job, WHOLE, FINISHED)
        assert len(responses.store) == kept


def test_included_extras_are_named_as_ignored():
    _, job = asked(ResponsesRoute(), input="hi", include=["reasoning.encrypted_content"])
    assert job.ignored == ("include=reasoning.encrypted_content",)


@pytest.mark.parametrize(
    ("name", "query", "status"),
    [
        ("resp_1", b"", None),
        ("resp_1", b"stream=false", None),
        ("resp_1", b"stream=true", 400),
        ("resp_1", b"stream=1", 400),
        ("resp_1", b"stream=true&stream=false", None),
        ("resp_1", b"stream=false&stream=true", 400),
        ("resp_1/cancel", b"", 404),
        ("resp_1/input_items", b"stream=true", 404),
    ],
)
def test_unsupported_uses_of_a_stored_answer_are_refused(name: str, query: bytes, status: int | None):
    problem = build_unsupported_use(name, query)
    assert (None if problem is None else problem.status) == status

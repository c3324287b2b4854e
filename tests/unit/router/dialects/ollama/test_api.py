"""Conversion of Ollama's bodies to the frames of a node, value by value."""

import json
from typing import Any

import pytest

from router.admission.request_limits import MAX_TOKENS
from router.dialects.ollama.api import (
    LOADING,
    MAX_WAITING_CALLS,
    OllamaChatRoute,
    OllamaGenerateRoute,
    OllamaRequest,
    strip_latest_tag,
)
from router.errors import Problem
from tests.support.answers import asked, whole
from wire.frames import CallConstraint, GenerationParams, GrammarKind, Message, ToolCall

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT, GENERATE = OllamaChatRoute(), OllamaGenerateRoute()


def refused(route: OllamaChatRoute | OllamaGenerateRoute, **body: object) -> Problem:
    problem = route.parse(json.dumps({"model": "tiny", **body}).encode(), "k1")
    assert isinstance(problem, Problem)
    return problem


def test_every_option_arrives():
    options = {
        "num_predict": 9,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 3,
        "stop": ["END", "x"],
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
        "repeat_penalty": 1.25,
    }
    _, job = asked(CHAT, messages=HELLO, options=options)
    assert job.params == GenerationParams(
        max_tokens=9,
        temperature=0.5,
        top_p=0.75,
        top_k=7,
        min_p=0.125,
        seed=3,
        stop=("END", "x"),
        presence_penalty=0.25,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
    )
    assert job.set_penalties == {"presence_penalty", "frequency_penalty", "repetition_penalty"}


def test_options_that_are_not_sent_have_the_defaults_of_a_node():
    _, job = asked(CHAT, messages=HELLO)
    assert job.params == GenerationParams()
    assert job.set_penalties == set()
    assert job.include_usage
    assert asked(CHAT, messages=HELLO, options={"num_predict": -1, "top_k": -1})[1].params == GenerationParams(top_k=0)
    assert asked(CHAT, messages=HELLO, options={"num_predict": 2**40})[1].params.max_tokens == MAX_TOKENS
    for number in (0, -5):
        options = {"num_predict": number, "seed": -1, "top_k": 40.0}
        assert asked(CHAT, messages=HELLO, options=options)[1].params == GenerationParams(top_k=40)


@pytest.mark.parametrize(
    ("think", "template"),
    [
        (None, None),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_think_is_a_switch_or_an_effort_of_the_template(think: object, template: object):
    _, job = asked(CHAT, messages=HELLO, think=think)
    assert (json.loads(job.template) if job.template else None) == template


def test_a_format_is_a_grammar_and_tools_leave_calls_free():
    _, plain = asked(CHAT, messages=HELLO, format="json")
    assert plain.params.grammar is not None
    assert (plain.params.grammar.kind, plain.params.grammar.calls) == (GrammarKind.JSON_OBJECT, "")
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    _, job = asked(CHAT, messages=HELLO, format=schema, tools=[TOOL])
    assert job.params.grammar is not None
    assert (job.params.grammar.kind, job.params.grammar.calls) == (GrammarKind.JSON_SCHEMA, CallConstraint.FREE)
    assert json.loads(job.tools)[0]["function"]["name"] == "weather"


@pytest.mark.parametrize(("name", "stripped"), [("a:latest", "a"), ("a:7b", "a:7b"), (":latest", ":latest")])
def test_the_tag_latest_is_no_part_of_a_name(name: str, stripped: str):
    assert strip_latest_tag(name) == stripped
    assert asked(CHAT, messages=HELLO, model=name)[1].demand.model == stripped


@pytest.mark.parametrize(("route", "body"), [(CHAT, {"messages": []}), (CHAT, {}), (GENERATE, {"prompt": ""})])
@pytest.mark.parametrize("stream", [True, False])
def test_a_body_without_a_prompt_loads_the_model(route: Any, body: dict[str, Any], stream: bool):
    request, job = asked(route, **body, stream=stream)
    assert isinstance(request, OllamaRequest)
    assert (job.messages, job.params, job.stream) == (LOADING, GenerationParams(max_tokens=1), False)
    answer = whole(route, **body, stream=stream)
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert "I look." not in json.dumps(answer)


@pytest.mark.parametrize("keep_alive", [0, "0", "0s", "-0m", "0.0h"])
def test_an_unload_by_keep_alive_is_refused_with_the_command(keep_alive: object):
    problem = refused(CHAT, messages=[], keep_alive=keep_alive)
    assert (problem.status, problem.param) == (501, "keep_alive")
    assert "cluster model unload" in problem.message
    _, load = asked(CHAT, messages=[], keep_alive="10m", options={"num_predict": 900, "top_k": 5})
    assert (load.messages, load.demand.max_tokens, load.demand.features) == (LOADING, 1, frozenset())


def test_generate_has_a_system_text_and_a_raw_prompt_has_no_template():
    _, job = asked(GENERATE, prompt="hi", system="be brief")
    assert job.messages == (Message("system", "be brief"), Message("user", "hi"))
    _, raw = asked(GENERATE, prompt="<s>hi", raw=True, think=True)
    assert (raw.messages, raw.text, raw.template) == ((), "<s>hi", "")
    assert refused(GENERATE, prompt="hi", raw=True, system="be brief").param == "system"


def call(name: str, **fields: object) -> dict[str, object]:
    return {"function": {"name": name, "arguments": {"city": "Ulm"}}, **fields}


def test_results_are_matched_to_calls_without_ids_by_name_and_order():
    _, job = asked(
        CHAT,
        messages=[
            *HELLO,
            {"role": "assistant", "thinking": "let me", "tool_calls": [call("weather"), call("time"), call("weather")]},
            {"role": "tool", "tool_name": "time", "content": "noon"},
            {"role": "tool", "name": "weather", "content": "sun"},
            {"role": "tool", "content": "rain"},
            {"role": "tool", "content": "nothing waits"},
        ],
    )
    calls = tuple(
        ToolCall(f"call_1_{at}", name, '{"city":"Ulm"}') for at, name in enumerate(("weather", "time", "weather"))
    )
    assert job.messages[1:] == (
        Message("assistant", "", "", calls, "", "let me"),
        Message("tool", "noon", "time", (), "call_1_1"),
        Message("tool", "sun", "weather", (), "call_1_0"),
        Message("tool", "rain", "", (), "call_1_2"),
        Message("tool", "nothing waits", "", (), ""),
    )


def test_an_id_of_the_client_is_kept_and_answered_first():
    _, job = asked(
        CHAT,
        messages=[
            {"role": "assistant", "tool_calls": [call("weather", id="a"), call("weather", id="b")]},
            {"role": "tool", "tool_call_id": "b", "content": "rain"},
            {"role": "tool", "tool_name": "weather", "content": "sun"},
        ],
    )
    assert [one.id for one in job.messages[0].tool_calls] == ["a", "b"]
    assert [message.tool_call_id for message in job.messages[1:]] == ["b", "a"]


def test_a_call_may_have_no_arguments():
    calls = [{"function": {"name": "clock"}}, {"function": {"name": "clock", "arguments": None}}]
    _, job = asked(CHAT, messages=[*HELLO, {"role": "assistant", "tool_calls": calls}])
    assert [one.arguments for one in job.messages[1].tool_calls] == ["{}", "{}"]


def test_the_newest_calls_wait_for_results():
    turns = [{"role": "assistant", "tool_calls": [call("weather")]} for _ in range(MAX_WAITING_CALLS + 3)]
    _, job = asked(CHAT, messages=[*turns, {"role": "tool", "content": "sun"}])
    assert job.messages[-1].tool_call_id == "call_3_0"


def test_arguments_that_are_too_long_name_the_call():
    long = {"function": {"name": "f", "arguments": {"text": "x" * 1_100_000}}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call("weather"), long]}]
    problem = refused(CHAT, messages=messages)
    assert (problem.status, problem.param) == (400, "messages[1].tool_calls[1].function.arguments")


def test_ignored_fields_and_options_are_named():
    tools = [TOOL, {"type": "web_search"}]
    request, job = asked(CHAT, messages=HELLO, keep_alive="5m", options={"num_ctx": 4096}, tools=tools)
    assert isinstance(request, OllamaRequest)
    assert set(request.ignored) == set(job.ignored) == {"keep_alive", "options.num_ctx", "tools[1].type=web_search"}


@pytest.mark.parametrize(("fields", "stream"), [({}, True), ({"stream": None}, True), ({"stream": False}, False)])
def test_an_answer_is_streamed_unless_the_client_refuses(fields: dict[str, Any], stream: bool):
    for route, prompt in ((CHAT, {"messages": HELLO}), (GENERATE, {"prompt": "hi"})):
        assert asked(route, **prompt, **fields)[1].stream is stream


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repeat_penalty"])
def test_only_penalties_that_are_sent_are_set(name: str):
    _, job = asked(CHAT, messages=HELLO, options={name: 1.0})
    assert job.set_penalties == {name.replace("repeat_", "repetition_")}

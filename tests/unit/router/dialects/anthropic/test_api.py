"""Conversion of `/v1/messages` bodies to the frames of a node, value by value."""

import json

import pytest

from router.dialects.anthropic.api import CountRequest, MessagesRoute, parse_count
from router.errors import Problem
from tests.support.answers import CREATED, asked
from wire.frames import GenerationParams, GrammarSpec, Message

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"name": "weather", "input_schema": {"type": "object"}}


def params(**body: object) -> GenerationParams:
    return asked(MessagesRoute(), max_tokens=9, messages=HELLO, **body)[1].params


def test_every_parameter_arrives():
    assert params() == GenerationParams(max_tokens=9)
    assert params(temperature=0.5, top_p=0.75, top_k=7, stop_sequences=["END", "", "x"]) == GenerationParams(
        max_tokens=9, temperature=0.5, top_p=0.75, top_k=7, stop=("END", "x")
    )
    assert asked(MessagesRoute(), max_tokens=-1, messages=HELLO)[1].params == GenerationParams()
    assert params(top_k=-1).top_k == 0
    assert params(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).one_call is True
    assert params(tools=[TOOL], tool_choice={"type": "auto"}).one_call is False


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [
        (None, None),
        ({"type": "auto"}, None),
        ({"type": "none"}, None),
        ({"type": "any"}, GrammarSpec(calls="required")),
        ({"type": "tool", "name": "weather"}, GrammarSpec(calls="required", tool="weather")),
    ],
)
def test_a_forced_call_is_a_grammar(choice: dict[str, object] | None, grammar: GrammarSpec | None):
    assert params(tools=[TOOL], tool_choice=choice).grammar == grammar
    strict = params(tools=[TOOL | {"strict": True}], tool_choice=choice).grammar
    assert strict == (grammar or (None if choice == {"type": "none"} else GrammarSpec(calls="free")))


@pytest.mark.parametrize(
    ("thinking", "template"),
    [
        (None, ""),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, ""),
        ({"type": "between_tools"}, ""),
    ],
)
def test_thinking_is_a_switch_of_the_template(thinking: dict[str, object] | None, template: object):
    _, job = asked(MessagesRoute(), max_tokens=9, messages=HELLO, thinking=thinking)
    assert (json.loads(job.template) if job.template else "") == template


def test_the_name_of_a_tool_has_up_to_128_characters():
    name = "mcp__server__".ljust(128, "x")
    tool, choice = TOOL | {"name": name}, {"type": "tool", "name": name}
    assert params(tools=[tool], tool_choice=choice).grammar == GrammarSpec(calls="required", tool=name)
    body = {"model": "m", "max_tokens": 9, "messages": HELLO, "tools": [tool | {"name": name + "x"}]}
    refused = MessagesRoute().parse(json.dumps(body).encode(), "key")
    assert isinstance(refused, Problem)
    assert (refused.status, refused.param) == (400, "tools[0].name")


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([("tool_addition", "clock")], ["weather", "clock"]),
        ([("tool_removal", "weather")], ["clock"]),
        ([("tool_removal", "weather"), ("tool_addition", "weather")], ["weather", "clock"]),
        ([("tool_addition", {"name": "news"}), ("tool_removal", "gone")], ["weather", "clock", "news"]),
        ([("tool_addition", {"name": "clock", "description": "new"})], ["weather", "clock: new"]),
    ],
)
def test_tools_change_in_the_middle_of_a_conversation(changes: list[tuple[str, object]], names: list[str]):
    """Claude Code adds and removes tools in messages of the system, so that the prompt keeps its beginning."""
    blocks: list[dict[str, object]] = [{"type": "text", "text": "now"}, {"type": "new_type"}]
    for kind, tool in changes:
        reference = {"type": "tool_reference", "name": tool}
        definition = {"type": "tool_definition", "definition": tool}
        blocks.append({"type": kind, "tool": reference if isinstance(tool, str) else definition})
    messages = [*HELLO, {"role": "system", "content": blocks}]
    clock = {"name": "clock", "defer_loading": True}
    _, job = asked(MessagesRoute(), max_tokens=9, messages=messages, tools=[TOOL, clock])
    functions = [tool["function"] for tool in json.loads(job.tools)]
    assert [": ".join(str(one[key]) for key in ("name", "description") if key in one) for one in functions] == names
    assert job.messages == (Message("user", "hi"), Message("system", "now"))
    assert job.ignored == ("messages[].content[].type=new_type",)
    only = [*HELLO, {"role": "system", "content": blocks[1:]}]
    assert asked(MessagesRoute(), max_tokens=9, messages=only)[1].messages == (Message("user", "hi"),)
    none = MessagesRoute().parse(json.dumps({"model": "m", "max_tokens": 9, "messages": only[1:]}).encode(), "key")
    assert isinstance(none, Problem)
    assert none.param == "messages"


def test_a_count_has_the_prompt_of_the_request_that_it_counts():
    foreign = {"type": "web_search_20250305", "name": "web_search"}
    body = {"messages": HELLO, "system": "be brief", "tools": [TOOL, foreign], "service_tier": "auto"}
    _, job = asked(MessagesRoute(), max_tokens=9, **body)
    found = parse_count(json.dumps({"model": "tiny", **body}).encode(), CREATED)
    assert isinstance(found, CountRequest)
    assert (found.tokens.messages, found.tokens.tools, found.tokens.template) == (job.messages, job.tools, job.template)
    assert found.tokens.messages[0] == Message("system", "be brief")
    assert (found.tokens.model, found.tokens.created) == ("tiny", CREATED)
    assert found.ignored == job.ignored
    assert set(found.ignored) == {"service_tier", "tools[1].type=web_search_20250305"}


def test_anthropic_answer_has_usage_and_thinking_unless_omitted():
    request, job = asked(MessagesRoute(), max_tokens=9, messages=HELLO)
    assert (job.include_usage, request.thoughts) == (True, True)  # pyright: ignore[reportAttributeAccessIssue]
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    request, _ = asked(MessagesRoute(), max_tokens=9, messages=HELLO, thinking=thinking)
    assert request.thoughts is False  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0, "stream": True}, "stream"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "weather"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto"}}, "tool_choice"),
    ],
)
def test_fields_that_contradict_each_other_are_refused_by_name(fields: dict[str, object], param: str):
    body: dict[str, object] = {"model": "m", "max_tokens": 9, "messages": HELLO}
    problem = MessagesRoute().parse(json.dumps(body | fields).encode(), "key")
    assert isinstance(problem, Problem)
    assert (problem.status, problem.param) == (400, param)


def test_tools_count_towards_the_demand_of_a_request():
    plain, with_tools = (
        asked(MessagesRoute(), max_tokens=9, messages=HELLO, **fields)[1] for fields in ({}, {"tools": [TOOL]})
    )
    assert with_tools.demand.prompt_bytes == plain.demand.prompt_bytes + len(with_tools.tools)
    assert (plain.demand.features, with_tools.demand.features) == (frozenset(), frozenset({"tools"}))

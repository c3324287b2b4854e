"""Unknown fields of a body are ignored and named, or refused by the setting. Fields that change an answer are never
ignored."""

import json
import time
from hashlib import sha256
from typing import Any

import pytest

from router.admission.request_limits import MAX_IGNORED
from router.dialects.anthropic.api import MessagesRoute, parse_count
from router.dialects.ollama.api import OllamaChatRoute
from router.dialects.openai.chat import ChatRoute
from router.dialects.openai.chat_response import ChatChunks, convert_call
from router.dialects.openai.completion import CompletionRoute
from router.dialects.openai.responses import ResponsesRoute
from router.errors import Problem
from wire.frames import Channel, Delta, GrammarSpec, Message, ToolCall

HELLO = [{"role": "user", "content": "hello"}]
CHAT = {"model": "m", "messages": HELLO}
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
FLAT = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
PATCH = {
    "name": "apply_patch",
    "description": "Change files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
BASE: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (ChatRoute, CHAT),
    "completions": (CompletionRoute, {"model": "m", "prompt": "x"}),
    "messages": (MessagesRoute, CHAT | {"max_tokens": 9}),
    "responses": (ResponsesRoute, {"model": "m", "input": "x"}),
    "ollama": (OllamaChatRoute, CHAT),
}


def parse(dialect: str, *, strict: bool = False, **fields: Any) -> Any:
    route, base = BASE[dialect]
    return route(strict=strict).parse(json.dumps(base | fields).encode(), "key")


def good(dialect: str, **fields: Any) -> Any:
    found = parse(dialect, **fields)
    assert not isinstance(found, Problem), found
    return found


@pytest.mark.parametrize("dialect", BASE)
def test_an_unknown_field_is_ignored_and_named_or_refused(dialect: str):
    found = good(dialect, colour="red", top_n_sigma=1)
    assert found.ignored == ("colour", "top_n_sigma")
    assert found.to_specs("key", "id", 0)[0].ignored == found.ignored
    refused = parse(dialect, strict=True, colour="red")
    assert isinstance(refused, Problem)
    assert (refused.status, refused.param) == (400, "colour")


def test_an_unknown_field_that_is_null_is_no_field():
    assert good("chat", prompt=None, input=None, colour=None).ignored == ()
    assert good("completions", messages=None).ignored == ()
    assert not isinstance(parse("responses", strict=True, messages=None), Problem)


@pytest.mark.parametrize("dialect", BASE)
def test_a_typing_error_is_refused_because_it_would_change_the_answer(dialect: str):
    refused = parse(dialect, strem=True)
    assert isinstance(refused, Problem)
    assert "did you mean stream?" in refused.message
    assert isinstance(parse("chat", temprature=1), Problem)


def test_unknown_parts_of_parts_are_named_by_their_place():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}], "colour": 1},
        {"role": "user", "content": "y", "shape": 1},
    ]
    found = good(
        "chat",
        messages=messages,
        stream=True,
        stream_options={"include_usage": True, "chunk": 1},
        tools=[FUNCTION | {"x": 1}, {"type": "function", "function": {"name": "b", "cache": 1}}],
    )
    assert set(found.ignored) == {
        "messages[].content[].cache_control",
        "messages[].colour",
        "messages[].shape",
        "stream_options.chunk",
        "tools[].x",
        "tools[].function.cache",
    }
    assert "cache" not in found.tools, "a template prints tools whole"
    assert [message.content for message in found.messages] == ["x", "y"]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "kind": 1}}},
        {"structured_outputs": {"regex": "a", "structural_tag": 1}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        {"messages": [{"role": "user", "content": "x", "images": ["x"]}]},
        {"logit_bias": {"x": 1}},
        {"functions": [{}]},
        {"modalities": ["audio"]},
    ],
)
def test_unsupported_field_with_an_effect_is_refused(fields: dict[str, Any]):
    found = parse("chat", **fields)
    assert isinstance(found, Problem)
    assert found.status == 400


def test_a_new_option_next_to_the_format_of_an_answer_is_ignored_and_named():
    """New versions of Claude Code send further members of `output_config` in each request."""
    assert good("messages", output_config={"effort": "low", "pace": 1}).ignored == ("output_config.pace",)
    assert good("responses", text={"verbosity": "low", "tone": 1}).ignored == ("text.tone",)
    for option in ("formt", "schema", "json_schema", "response_format"):
        refused = parse("messages", output_config={option: {}})
        assert isinstance(refused, Problem)
        assert refused.param == f"output_config.{option}"


def test_wrong_value_is_refused_together_with_an_unknown_field():
    found = parse("chat", n="many", colour="red")
    assert isinstance(found, Problem)
    assert (found.status, found.param) == (400, "n")


def test_a_field_of_another_dialect_is_ignored_unless_it_holds_the_question():
    assert good("chat", text={"verbosity": "low"}).ignored == ("text",)
    found = parse("chat", prompt="hello")
    assert isinstance(found, Problem)
    assert found.param == "prompt"


def test_refusal_of_an_image_names_the_server_as_the_limit():
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    assert "is not supported by this server, with any model" in parse("chat", messages=image).message


@pytest.mark.parametrize(
    ("fields", "template", "ignored"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}, ()),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, ()),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, {"enable_thinking": True}, ()),
        ({"thinking": True, "think": False}, {"enable_thinking": True}, ()),
        ({"thinking": "much"}, {}, ("thinking",)),
        ({"reasoning": {"effort": "low", "exclude": True}}, {"reasoning_effort": "low"}, ("reasoning.exclude",)),
        ({"reasoning": {"enabled": False, "max_tokens": 9}}, {"enable_thinking": False}, ("reasoning.max_tokens",)),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, {"reasoning_effort": "high"}, ()),
        ({"reasoning": "x"}, {}, ("reasoning",)),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}, ()),
    ],
)
def test_reasoning_fields_of_other_servers_are_accepted(
    fields: dict[str, object], template: dict[str, object], ignored: tuple[str, ...]
):
    found = good("chat", **fields)
    assert (json.loads(found.template or "{}"), found.ignored) == (template, ignored)


def test_fields_of_other_servers_are_accepted():
    found = good(
        "chat",
        session_id="s",
        chat_id="c",
        user="u",
        repeat_penalty=1.5,
        cache_prompt=True,
        keep_alive="5m",
        stop_token_ids=[1],
        skip_special_tokens=False,
        include_reasoning=True,
        provider={"order": []},
        usage={"include": True},
        stream=True,
    )
    assert (found.session, found.params.repetition_penalty, found.include_usage) == ("s", 1.5, True)
    assert found.ignored == ("cache_prompt", "keep_alive", "stop_token_ids", "include_reasoning", "provider")
    assert good("chat", chat_id="c", user="u").session == "c"
    assert not good("chat", usage={"include": True}).include_usage, "only a stream has a last chunk"
    assert good("chat", store=False, metadata=None).ignored == (), "what asks for nothing is not named"


def test_names_that_a_header_cannot_carry_are_not_repeated():
    found = good("chat", **{"evil\r\nx-injected": 1, "ä" * 100: 1, "plain": 1})
    assert found.ignored == ("(unprintable)", "plain")
    many = good("chat", **{f"strange_{number}": 1 for number in range(MAX_IGNORED)})
    assert len(many.ignored) == MAX_IGNORED
    one_more: dict[str, Any] = {f"strange_{number}": 1 for number in range(MAX_IGNORED + 1)}
    assert isinstance(parse("chat", **one_more), Problem)
    long: dict[str, Any] = {"x" * 300: 1}
    assert isinstance(parse("chat", **long), Problem)
    deep = good("chat", stream=True, stream_options={f"strange_{number}": 1 for number in range(100)})
    assert (len(deep.ignored), deep.ignored[-1]) == (MAX_IGNORED + 1, "and-68-more")


def test_a_long_conversation_with_unknown_parts_is_read_in_linear_time():
    messages = [{"role": "user", "content": "x", f"strange_{number % 500}": 1} for number in range(8_000)]
    began = time.process_time()
    assert len(good("chat", messages=messages).ignored) == MAX_IGNORED + 1
    assert time.process_time() - began < 1.0


# tools


SERVERS = [{"type": kind} for kind in ("web_search", "local_shell", "mcp", "code_interpreter", "image_generation")]


@pytest.mark.parametrize(
    ("dialect", "tool"),
    [
        ("chat", FUNCTION),
        ("responses", FLAT),
        ("ollama", FUNCTION),
        ("messages", {"name": "look", "input_schema": {"type": "object", "properties": {}}}),
    ],
)
def test_tools_that_would_have_to_run_here_are_left_out_and_named(dialect: str, tool: dict[str, Any]):
    found = good(dialect, tools=[SERVERS[0] | {"name": "search"}, tool, *SERVERS[1:]])
    assert found.ignored[:2] == ("tools[0].type=web_search", "tools[2].type=local_shell")
    assert [one["function"]["name"] for one in json.loads(found.tools)] == ["look"]
    refused = parse(dialect, strict=True, tools=[tool, SERVERS[0]])
    assert isinstance(refused, Problem)
    assert (refused.code, refused.param) == ("unsupported_parameter", "tools[1].type")


NESTED = {"name": "look", "parameters": {"type": "object", "properties": {}}}
SHAPES: list[dict[str, Any]] = [
    FUNCTION,
    FLAT,
    {"function": NESTED},
    {"type": None} | NESTED,
    {"name": "look", "input_schema": NESTED["parameters"]},
    {"type": "custom", "name": "look", "input_schema": NESTED["parameters"]},
]


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "ollama"])
def test_a_tool_in_the_shape_of_another_route_is_accepted(dialect: str):
    """Agents that use several routes send such tools, and some leave out the type."""
    for shape in SHAPES:
        found = good(dialect, tools=[shape])
        assert (json.loads(found.tools), found.ignored) == ([FUNCTION], ()), shape
    assert isinstance(parse(dialect, tools=[{"type": "function"}]), Problem)
    assert good(dialect, tools=[{"name": "look"}]).tools == good("chat", tools=[FUNCTION]).tools


@pytest.mark.parametrize(("name", "accepted"), [("srv.list-files", True), ("a/b:c", True), ("a b", False), ("", False)])
def test_the_name_of_a_tool_may_have_the_characters_of_mcp(name: str, accepted: bool):
    for dialect in ("chat", "responses", "messages", "ollama"):
        found = parse(dialect, tools=[{"name": name}])
        assert isinstance(found, Problem) != accepted
        if accepted:
            assert json.loads(found.tools)[0]["function"]["name"] == name


def test_a_custom_tool_may_have_the_shape_of_the_other_route():
    chat, responses = {"type": "custom", "custom": PATCH}, {"type": "custom", **PATCH}
    assert good("chat", tools=[responses]).custom == good("chat", tools=[chat]).custom == {"apply_patch"}
    assert good("responses", tools=[chat]).tools == good("responses", tools=[responses]).tools


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [
        ({"type": "auto"}, None),
        ({"type": "any"}, GrammarSpec(calls="required")),
        ({"type": "tool", "name": "look"}, GrammarSpec(calls="required", tool="look")),
        ({"function": {"name": "look"}}, GrammarSpec(calls="required", tool="look")),
    ],
)
def test_a_choice_of_tools_may_have_the_shape_of_another_route(choice: dict[str, Any], grammar: GrammarSpec | None):
    assert good("chat", tools=[FUNCTION], tool_choice=choice).params.grammar == grammar
    assert good("responses", tools=[FLAT], tool_choice=choice).params.grammar == grammar


def test_the_arguments_of_a_call_may_be_text_or_an_object():
    for arguments in ({"a": [1]}, '{"a":[1]}'):
        function = {"name": "look", "arguments": arguments}
        called = {"role": "assistant", "tool_calls": [{"id": "1", "type": None, "function": function}]}
        item = {"type": "function_call", "call_id": "1"} | function
        block = {"type": "tool_use", "id": "1", "name": "look", "input": arguments}
        for found in (
            good("chat", messages=[*HELLO, called]),
            good("ollama", messages=[*HELLO, called]),
            good("responses", input=[item]),
            good("messages", messages=[*HELLO, {"role": "assistant", "content": [block]}]),
        ):
            assert found.messages[-1].tool_calls == (ToolCall("1", "look", '{"a":[1]}'),)


def test_a_long_id_of_a_call_is_shortened_also_in_its_result():
    """Gateways put the signatures of other models' reasoning into the ids of calls."""
    name = "call_1__thought__" + "x" * 1000
    function = {"name": "look", "arguments": "{}"}
    used = {"type": "tool_use", "id": name, "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": name, "content": "x"}
    called = {"role": "assistant", "tool_calls": [{"id": name, "function": function}]}
    answered = {"role": "tool", "tool_call_id": name, "content": "x"}
    items = [
        {"type": "function_call", "call_id": name} | function,
        {"type": "function_call_output", "call_id": name, "output": "x"},
    ]
    turns = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    for found in (
        good("chat", messages=[*HELLO, called, answered]),
        good(
            "ollama", messages=[*HELLO, called | {"tool_calls": [{"id": name, "function": {"name": "look"}}]}, answered]
        ),
        good("responses", input=items),
        good("messages", messages=[*HELLO, *turns]),
    ):
        call, answer = found.messages[-2:]
        assert call.tool_calls[0].id == answer.tool_call_id == sha256(name.encode()).hexdigest()


def test_a_result_without_content_is_empty():
    results = [{"role": "tool", "tool_call_id": "1", "content": None}, {"role": "tool", "tool_call_id": "1"}]
    messages = good("chat", messages=[*HELLO, *results]).messages
    assert [message.content for message in messages[1:]] == ["", ""]
    output = {"type": "function_call_output", "call_id": "1", "output": None}
    message = {"type": "message", "role": "assistant", "content": None}
    assert [message.content for message in good("responses", input=[output, message]).messages] == ["", ""]


def test_calls_and_results_may_be_parts_as_in_anthropic_s_messages():
    """Cursor sends them to chats."""
    used = {"type": "tool_use", "id": "1", "name": "look", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}
    more: Any = [{"type": "tool_result", "tool_use_id": "2"}, {"type": "text", "text": "and?"}]
    turns = [
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, used]},
        {"role": "user", "content": [result]},
        {"role": "user", "content": more},
    ]
    found = good("chat", messages=[*HELLO, *turns])
    assert found.messages[1:] == (
        Message("assistant", "I look.", tool_calls=(ToolCall("1", "look", '{"a":1}'),)),
        Message("tool", "x[image omitted: the model gets only text]", tool_call_id="1"),
        Message("tool", tool_call_id="2"),
        Message("user", "and?"),
    )
    assert found.ignored == ("messages[].content[].content[].type=image",)
    for role, parts in (("user", [used]), ("assistant", [result]), ("system", [result]), ("assistant", [used] * 129)):
        refused = parse("chat", messages=[{"role": role, "content": parts}])
        assert isinstance(refused, Problem)
        assert refused.param == "messages[0].content"


def test_an_image_in_a_result_becomes_a_text_and_is_named():
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a.png "}, image]}
    found = good("chat", messages=[*HELLO, result])
    assert found.messages[1].content == "a.png [image_url omitted: the model gets only text]"
    assert found.ignored == ("messages[].content[].type=image_url",)
    refused = parse("chat", strict=True, messages=[*HELLO, result])
    assert isinstance(refused, Problem)
    assert refused.param == "messages[].content[].type=image_url"


def test_a_count_leaves_out_the_same_tools():
    counted = parse_count(json.dumps(CHAT | {"tools": [{"type": "web_search_20250305", "name": "x"}]}).encode(), 0)
    assert not isinstance(counted, Problem)
    assert (counted.tokens.tools, counted.ignored) == ("", ("tools[0].type=web_search_20250305",))


def test_a_call_cannot_be_demanded_of_a_tool_that_was_left_out():
    for choice in ("required", {"type": "web_search"}):
        assert isinstance(parse("chat", tools=[SERVERS[0]], tool_choice=choice), Problem)
        assert isinstance(parse("responses", tools=[SERVERS[0]], tool_choice=choice), Problem)


def test_allowed_tools_restrict_the_tools_that_the_model_gets():
    chat_tools = [FUNCTION, {"type": "custom", "custom": PATCH}]
    inner = {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]}
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}, SERVERS[0]]}
    for route, tools, choice in (
        ("chat", chat_tools, {"type": "allowed_tools", "allowed_tools": inner}),
        ("responses", [FLAT, {"type": "custom", **PATCH}], flat),
    ):
        found = good(route, tools=tools, tool_choice=choice)
        assert [tool["function"]["name"] for tool in json.loads(found.tools)] == ["look"]
        assert found.params.grammar == GrammarSpec(calls="required")
        assert good(route, tools=tools, tool_choice=flat | {"mode": "auto", "tools": []}).tools == ""
        unknown = flat | {"tools": [{"type": "custom", "name": "x"}]}
        problem = parse(route, tools=tools, tool_choice=unknown)
        assert isinstance(problem, Problem)
        assert problem.message == "tool_choice names x, which is not in tools"
        assert isinstance(parse(route, tool_choice=unknown), Problem)


def test_a_custom_tool_is_a_function_to_the_model_and_its_calls_are_turned_back():
    found = good(
        "chat",
        tools=[FUNCTION, {"type": "custom", "custom": PATCH}],
        tool_choice={"type": "custom", "custom": {"name": "apply_patch"}},
        messages=[
            *HELLO,
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "apply_patch", "input": "a\nb"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "done"},
        ],
    )
    offered = json.loads(found.tools)[1]["function"]
    assert offered["parameters"]["required"] == ["input"]
    assert "lark grammar:\nstart: /.+/" in offered["description"]
    assert (found.params.grammar.calls, found.params.grammar.tool) == ("required", "apply_patch")
    assert found.messages[1].tool_calls == (ToolCall("1", "apply_patch", '{"input":"a\\nb"}'),)
    assert found.custom == {"apply_patch"}
    call = json.dumps({"id": "2", "name": "apply_patch", "arguments": '{"input": "x"}'})
    assert convert_call(call, found.custom) == {
        "id": "2",
        "type": "custom",
        "custom": {"name": "apply_patch", "input": "x"},
    }
    (job,) = found.to_specs("key", "id", 0)
    events = ChatChunks(job, found.custom).encode_deltas([Delta(0, 0, (), ((Channel.TOOL_CALL, call),))])
    assert b'"type":"custom","custom":{"name":"apply_patch","input":"x"}' in events
    broken = json.dumps({"id": "2", "name": "apply_patch", "arguments": "no JSON"})
    assert (convert_call(broken, found.custom) or {})["custom"] == {"name": "apply_patch", "input": "no JSON"}


def test_tools_of_a_namespace_are_offered_and_their_calls_name_it():
    agents = {
        "type": "namespace",
        "name": "agents",
        "tools": [FLAT | {"name": "spawn"}, FLAT, {"type": "custom", **PATCH}, {"type": "web_search"}],
    }
    found = good("responses", tools=[FLAT, agents])
    names = [one["function"]["name"] for one in json.loads(found.tools)]
    assert names == ["look", "spawn", "agents__look", "apply_patch"]
    assert found.ignored == ("tools[1].tools[3].type=web_search",)
    crowd = {"type": "namespace", "name": "crowd", "tools": [FLAT | {"name": f"f{number}"} for number in range(300)]}
    refused = parse("responses", tools=[crowd, crowd | {"name": "other"}])
    assert isinstance(refused, Problem)
    assert "600 tools in the request, the limit is 512: leave some out" in refused.message


def test_a_returned_call_has_the_name_under_which_its_tool_is_offered():
    agents = {"type": "namespace", "name": "agents", "tools": [FLAT, {"type": "custom", **PATCH}]}
    called = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    patched = {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "a"}
    calls = [
        called,
        called | {"namespace": "agents"},
        called | {"namespace": "gone"},
        called | {"namespace": {"no": "text"}},
        patched | {"namespace": "agents"},
        patched,
    ]
    found = good("responses", tools=[FLAT, {"type": "custom", **PATCH}, agents], input=calls)
    names = [call.name for message in found.messages for call in message.tool_calls]
    assert names == ["look", "agents__look", "look", "look", "agents__apply_patch", "apply_patch"]

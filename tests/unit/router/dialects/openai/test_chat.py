import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.admission.request_limits import MAX_CALLS, MAX_TOKENS, TEMPLATE_BYTES
from router.dialects.openai.chat import ChatRequest, parse
from router.dialects.openai.chat_schema import HARMLESS, INSTEAD, NEUTRAL
from router.dialects.shared.common_fields import MIN_TOP_P
from router.dialects.shared.tools import NO_PARAMETERS
from router.errors import Problem
from wire.codec import decode, encode
from wire.frames import Generate, GenerationParams, Message, ToolCall

HELLO = [{"role": "user", "content": "hello"}]


def body(**fields: object) -> bytes:
    return json.dumps({"model": "tiny", "messages": HELLO} | fields).encode()


def good(raw: bytes) -> ChatRequest:
    found = parse(raw)
    assert isinstance(found, ChatRequest), found
    return found


def bad(raw: bytes) -> Problem:
    found = parse(raw)
    assert isinstance(found, Problem), found
    assert found.status == 400
    return found


def test_the_plainest_body():
    found = good(body())
    assert found.messages == (Message("user", "hello"),)
    assert found.params == GenerationParams()
    assert (found.stream, found.include_usage, found.demand.model) == (False, False, "tiny")
    assert found.demand.prompt_tokens is None
    assert found.demand.prompt_bytes >= 5


def test_every_parameter_arrives():
    found = good(
        body(
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=5,
            n=3,
            stop=["a", "b"],
            temperature=1,
            top_p=0.5,
            seed=-7,
        )
    )
    assert found.params == GenerationParams(5, 1.0, 0.5, -7, ("a", "b"), 3)
    assert (found.stream, found.include_usage) == (True, True)
    assert (found.demand.max_tokens, found.demand.choices) == (5, 3)
    assert good(body(stop="x")).params.stop == ("x",)
    assert good(body(stop="")).params.stop == good(body(stop=[""])).params.stop == ()
    assert good(body(stop=["", "x"])).params.stop == ("x",)
    assert good(body(max_tokens=5, max_completion_tokens=9)).params.max_tokens == 9


def test_a_top_p_of_0_leaves_the_most_likely_token():
    assert good(body(top_p=0)).params.top_p == good(body(top_p=0.0)).params.top_p == MIN_TOP_P


def test_null_means_not_given():
    nothing = dict.fromkeys(("stream", "stream_options", "max_tokens", "n", "stop", "temperature", "top_p", "seed"))
    assert good(body(**nothing)).params == GenerationParams()


def test_text_parts_are_joined_and_assistant_messages_accepted():
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "annotations": [], "audio": None},
        {"role": "user", "content": "äöü", "name": "Ann", "tool_calls": []},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}]},
        {"role": "assistant", "content": "so", "reasoning_content": "hm"},
        {"role": "assistant", "content": None, "reasoning": "cut"},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "output_text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "t"}, {"type": "text", "text": "u"}]},
                {"type": "reasoning", "text": "v"},
            ],
        },
    ]
    assert good(body(messages=messages)).messages == (
        Message("system", "be brief"),
        Message("assistant", "yes"),
        Message("user", "äöü", "Ann"),
        Message("assistant", "no"),
        Message("assistant", "never"),
        Message("assistant", "so", reasoning="hm"),
        Message("assistant", reasoning="cut"),
        Message("assistant"),
        Message("assistant"),
        Message("user", "a"),
        Message("assistant", "b", reasoning="t"),
        Message("assistant", reasoning="tu\nv"),
    )


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
ASKED = ToolCall("c1", "weather", '{"city": "Ulm"}')


def test_tool_calls_and_their_results_are_accepted_as_input():
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "c2", "index": 1}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "weather"},
        {"role": "tool", "content": [{"type": "text", "text": "dry"}], "tool_call_id": "c2"},
        {"role": "assistant", "content": "see", "tool_calls": [{"id": "c3", "function": CALL["function"]}]},
        {"role": "assistant", "tool_calls": [{"id": "c4", "function": {"name": "now"}}]},
        {"role": "assistant", "tool_calls": [{"id": "c5", "function": {"name": "now", "arguments": None}}]},
    ]
    assert good(body(messages=messages)).messages == (
        Message("assistant", tool_calls=(ASKED, ToolCall("c2", ASKED.name, ASKED.arguments))),
        Message("tool", "sunny", "weather", tool_call_id="c1"),
        Message("tool", "dry", tool_call_id="c2"),
        Message("assistant", "see", tool_calls=(ToolCall("c3", ASKED.name, ASKED.arguments),)),
        Message("assistant", tool_calls=(ToolCall("c4", "now", ""),)),
        Message("assistant", tool_calls=(ToolCall("c5", "now", ""),)),
    )


def test_tool_result_without_its_call_is_accepted():
    assert good(body(messages=[*HELLO, {"role": "tool", "content": "42", "tool_call_id": "gone"}]))


def test_message_fields_of_client_libraries_are_accepted():
    function = CALL["function"] | {"parsed_arguments": {"city": "Ulm"}}  # pyright: ignore
    message = {"role": "assistant", "content": None, "tool_calls": [CALL | {"function": function}], "parsed": None}
    assert good(body(messages=[message])).messages[0].tool_calls == (ASKED,)


def test_ignored_fields_and_neutral_values_are_accepted():
    assert good(body(**dict.fromkeys(HARMLESS, "x"))).params == GenerationParams()
    for name, values in NEUTRAL.items():
        for value in values:
            good(body(**{name: value}))


SAMPLING = {
    "top_k": 40,
    "min_p": 0.25,
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.5,
    "logit_bias": {"7": 2, "0": -100, "9": 0},
}


def test_sampling_arrives():
    assert good(body(**SAMPLING)).params == GenerationParams(
        top_k=40,
        min_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias=((7, 2.0), (0, -100.0)),
    )
    assert good(body(top_k=-1)).params.top_k == 0
    assert good(body(top_k=0)).params.top_k == 0
    assert good(body(logprobs=True, top_logprobs=20)).params == GenerationParams(logprobs=True, top_logprobs=20)
    assert good(body(logprobs=False, top_logprobs=0)).params == GenerationParams()
    assert good(body(repetition_penalty=1.5, repeat_penalty=1.25)).params.repetition_penalty == 1.5
    assert good(body(repeat_penalty=1.25)).params.repetition_penalty == 1.25


def test_of_two_limits_the_newer_name_counts():
    assert good(body(max_tokens=5)).params.max_tokens == 5
    assert good(body(max_tokens=5, max_completion_tokens=7)).params.max_tokens == 7
    assert good(body(max_completion_tokens=7)).demand.max_tokens == 7
    whole = good(body(max_tokens=5, max_completion_tokens=7, logprobs=True))  # the fast parser does not read this
    assert (whole.params.max_tokens, whole.demand.max_tokens) == (7, 7)


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_that_has_an_effect_is_demanded(name: str):
    assert good(body(**{name: SAMPLING[name]})).demand.features == {"sampling"}


def test_only_fields_with_an_effect_are_required():
    off = {
        "top_k": -1,
        "min_p": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {"5": 0},
        "logprobs": False,
        "tools": [],
        "tool_choice": "auto",
    }
    assert good(body(**off)).demand.features == frozenset()
    everything = good(body(**SAMPLING, logprobs=True, tools=[TOOL])).demand.features
    assert everything == {"sampling", "logprobs", "tools"}


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}},
    },
}


def test_tools_arrive_as_they_were_written():
    found = good(body(tools=[TOOL], tool_choice="auto", parallel_tool_calls=True))
    assert json.loads(found.tools) == [TOOL]
    assert list(json.loads(found.tools)[0]["function"]["parameters"]) == ["type", "required", "properties"]
    assert found.demand.prompt_bytes == good(body()).demand.prompt_bytes + len(found.tools)
    job = found.to_spec("k", "r", 5)
    assert (job.tools, job.template, job.key, job.request_id, job.created) == (found.tools, "", "k", "r", 5)


def test_one_call_at_most():
    assert good(body(tools=[TOOL], parallel_tool_calls=False)).params == GenerationParams(one_call=True)
    assert good(body(tools=[TOOL], parallel_tool_calls=None)).params == GenerationParams()


def test_a_function_without_parameters_takes_none():
    bare = {"type": "function", "function": {"name": "now", "parameters": None, "description": None, "strict": True}}
    assert json.loads(good(body(tools=[bare])).tools) == [
        {"type": "function", "function": {"name": "now", "strict": True, "parameters": NO_PARAMETERS}}
    ]


def test_tools_are_not_sent_with_tool_choice_none():
    found = good(body(tools=[TOOL], tool_choice="none"))
    assert (found.tools, found.demand) == ("", good(body()).demand)
    assert bad(body(tools=[TOOL | {"type": "custom"}], tool_choice="none")).param == "tools[0].custom"


def test_unsupported_tool_choice_type_is_refused():
    problem = bad(body(tools=[TOOL], tool_choice={"type": "web_search"}))
    assert (problem.code, problem.param) == ("unsupported_parameter", "tool_choice.type")
    assert "'web_search'" in problem.message


def test_calls_and_reasoning_count_as_prompt():
    said = [*HELLO, {"role": "assistant", "content": "äö", "tool_calls": [CALL], "reasoning_content": "x" * 50}]
    plain = [*HELLO, {"role": "assistant", "content": "äö"}]
    more = good(body(messages=said)).demand.prompt_bytes - good(body(messages=plain)).demand.prompt_bytes
    assert more == 50 + len('c1weather{"city": "Ulm"}') + TEMPLATE_BYTES


def test_variables_of_the_template_arrive():
    def variables(**fields: object) -> object:
        text = good(body(**fields)).template
        return json.loads(text) if text else {}

    assert variables() == {}
    assert variables(chat_template_kwargs={}) == {}
    assert variables(chat_template_kwargs={"documents": [1, {"b": None}]}) == {"documents": [1, {"b": None}]}
    for default in ("", "default", "auto"):
        assert variables(reasoning_effort=default) == {}
    assert variables(reasoning_effort="low") == {"reasoning_effort": "low"}
    assert variables(reasoning_effort="none") == {"reasoning_effort": "none", "enable_thinking": False}
    given = {"enable_thinking": True, "reasoning_effort": "max"}
    assert variables(reasoning_effort="none", chat_template_kwargs=given) == given


RESERVED = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
    "strftime_now",
    "anything",
)


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_template_variables_are_refused(name: str):
    problem = bad(body(chat_template_kwargs={name: "x"}))
    assert (problem.code, problem.param) == ("invalid_request", f"chat_template_kwargs.{name}")


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"chat_template_kwargs": {"task": "x" * 16_400}}, "16384"),
        ({"chat_template_kwargs": {"task": deep(64)}}, "nested"),
        ({"chat_template_kwargs": {"task": deep(900)}}, "nested"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "ä" * 140_000}}]}, "262144"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": deep(61)}}}]}, "nested"),
    ],
)
def test_forwarded_json_is_bounded(fields: dict[str, object], text: str):
    problem = bad(body(**fields))
    assert problem.param == next(iter(fields))
    assert text in problem.message


def test_non_finite_number_is_refused():
    raw = body()[:-1] + b',"chat_template_kwargs":{"task":1e999}}'
    assert bad(raw).param == "chat_template_kwargs"
    assert good(body(chat_template_kwargs={"task": deep(63)}))


ASKS = {
    "functions": [{}],
    "function_call": {"name": "f"},
    "modalities": ["audio"],
    "audio": {},
    "prediction": {},
    "web_search_options": {},
    "moderation": {},
    "verbosity": "low",
    "store": True,
}


@pytest.mark.parametrize("name", list(NEUTRAL))
def test_unsupported_field_is_refused_by_name(name: str):
    problem = bad(body(**{name: ASKS[name]}))
    assert (problem.code, problem.param) == ("unsupported_parameter", name)
    assert name in problem.message
    assert INSTEAD.get(name, "") in problem.message


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "messages[0].content[0].type"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content[0].type"),
        ({"type": "file", "file": {}}, "messages[0].content[0].type"),
    ],
)
def test_parts_that_are_no_text_are_unsupported(part: dict[str, object], param: str):
    problem = bad(body(messages=[{"role": "user", "content": [part]}]))
    assert (problem.code, problem.param) == ("unsupported_parameter", param)
    assert str(part["type"]) in problem.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": ""}},
                ]
            },
            "messages[1].function_call",
        ),
        ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL | {"type": "shell"}]}]},
            "messages[0].tool_calls[0].type",
        ),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
def test_parts_that_are_not_offered_are_refused_by_name(fields: dict[str, object], param: str):
    problem = bad(body(**fields))
    assert (problem.code, problem.param) == ("unsupported_parameter", param)


def test_minus_one_is_no_limit_and_a_random_seed():
    """LM Studio, llama.cpp, vLLM and Ollama have these values, and their clients send them."""
    found = good(body(max_tokens=-1, seed=-1))
    assert found.params == GenerationParams()
    assert found.demand == good(body()).demand
    assert good(body(max_tokens=5, max_completion_tokens=-1)).params == GenerationParams()
    assert "at least 1, or -1 for no limit" in bad(body(max_tokens=0)).message
    assert good(body(max_tokens=2**40)).params.max_tokens == MAX_TOKENS


def test_a_whole_number_may_have_a_decimal_point():
    """Clients in languages without whole numbers send `100.0`."""
    numbers = {"max_tokens": 100.0, "seed": 3.0, "top_k": 40.0, "n": 2.0, "logprobs": True, "top_logprobs": 2.0}
    found = good(body(**numbers)).params
    assert found == GenerationParams(max_tokens=100, seed=3, top_k=40, n=2, logprobs=True, top_logprobs=2)
    assert [type(value) for value in (found.max_tokens, found.seed, found.top_k, found.n)] == [int] * 4


def test_the_name_of_a_function_may_have_128_characters():
    """Clients of MCP servers build names from those of servers and tools."""
    name = "x" * 128
    tools = [{"type": "function", "function": {"name": name}}]
    named = {"type": "function", "function": {"name": name}}
    assert f'"name":"{name}"' in good(body(tools=tools, tool_choice=named)).tools


WRONG: list[tuple[dict[str, object], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"model": ""}, "model"),
    ({"model": 7}, "model"),
    ({"model": "x" * 300}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": -2}, "max_completion_tokens"),
    ({"n": 10**9}, "n"),
    ({"n": 0}, "n"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"seed": 2**64}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["a", "x" * 600]}, "stop[1]"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"frequency_penalty": True}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 10.5}, "repetition_penalty"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"1": 100.5}}, "logit_bias.1"),
    ({"logit_bias": {"1": "2"}}, "logit_bias.1"),
    ({"logit_bias": {"hello": 1}}, "logit_bias.hello"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    ({"logit_bias": {"05": 1}}, "logit_bias.05"),
    ({"logit_bias": {"٣": 1}}, "logit_bias.٣"),
    ({"logit_bias": {"9" * 10: 1}}, "logit_bias.9999999999"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": {}}, "tools"),
    ({"tools": [TOOL] * 513}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x", "parameters": 5}}]}, "tools[0].function.parameters"),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}}, "tool_choice.mode"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"reasoning_effort": "most"}, "reasoning_effort"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"no spaces": 1}}, "chat_template_kwargs.no spaces"),
    ({"messages": [{"role": "tool", "content": "42"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": [{"type": "reasoning", "text": "x"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "42", "tool_call_id": ""}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "reasoning": "hm"}]}, "messages[0].reasoning"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"id": ""}]}]}, "messages[0].tool_calls[0].id"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": []}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {"a": deep(900)}}}]}
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]}, "messages[0].tool_calls"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_a_wrong_value_is_a_400_that_names_it(fields: dict[str, object], param: str):
    problem = bad(body(**fields))
    assert (problem.param, problem.code) == (param, "invalid_request")


def test_a_missing_field_is_named():
    assert bad(b"{}").param == "model"
    assert bad(b'{"model":"x"}').param == "messages"


def test_an_unknown_field_suggests_the_nearest():
    assert "did you mean temperature?" in bad(body(temprature=1)).message


UNUSABLE: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"nonsense", "not JSON"),
    (b"[]", "must be a JSON object"),
    (b'"x"', "must be a JSON object"),
    (b"null", "must be a JSON object"),
    (body()[:-1] + b',"model":"other"}', "'model' appears twice"),
    (b'{"model":"x","messages":[{"role":"user","role":"system"}]}', "'role' appears twice"),
    (b'{"model":"\xff"}', "not UTF-8"),
    (b'{"model":"\xed\xa0\x80"}', "not UTF-8"),
    (b'{"temperature":NaN}', "NaN is not a JSON number"),
    (b'{"temperature":-Infinity}', "-Infinity is not a JSON number"),
    (b'{"model":"\\ud800"}', "surrogate"),
    (b'{"model":"x","metadata":{"\\udfff":1}}', "surrogate"),
    (b'{"model":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "too many levels of nesting"),
    (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "too many levels of nesting"),
    (b'{"seed":' + b"9" * 5000 + b"}", "cannot be used"),
    (b'{"model":"a\nb"}', "not JSON"),
    (b"\xef\xbb\xbf{}", "not JSON"),
]


@pytest.mark.parametrize(("raw", "text"), UNUSABLE)
def test_invalid_body_is_a_400(raw: bytes, text: str):
    assert text in bad(raw).message


def test_proper_surrogate_pairs_are_characters():
    assert good(b'{"model":"tiny","messages":[{"role":"user","content":"\\ud83d\\ude00"}]}').messages[0].content == "😀"


def test_a_number_too_large_for_a_float_is_out_of_range():
    assert bad(body()[:-1] + b',"temperature":1e999}').param == "temperature"


@given(st.binary(max_size=200))
def test_garbage_is_always_a_400(raw: bytes):
    assert isinstance(parse(raw), Problem)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    [
        "model",
        "messages",
        "stream",
        "stop",
        "n",
        "max_tokens",
        "temperature",
        "seed",
        "tools",
        "tool_choice",
        "top_k",
        "logit_bias",
        "logprobs",
        "reasoning_effort",
        "chat_template_kwargs",
        "user",
        "x",
    ]
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first text builds a table of characters
@given(st.dictionaries(names, json_values))
def test_any_accepted_body_can_be_encoded_as_a_frame(fields: dict[str, object]):
    found = parse(json.dumps({"model": "tiny", "messages": HELLO} | fields).encode())
    if isinstance(found, ChatRequest):
        frame = Generate(
            1, 1, "r", found.demand.model, found.messages, found.params, 0, 1, found.stream, found.tools, found.template
        )
        raw = encode(frame)
        assert decode(raw[4], raw[5:]) == frame
    else:
        assert found.status == 400
        assert found.message


def test_calls_in_parts_precede_those_in_the_field_and_count_with_them():
    part = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    call = {"id": "b", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": [part], "tool_calls": [call]}
    (found,) = good(body(messages=[message])).messages
    assert found.tool_calls == (ToolCall("a", "look", "{}"), ToolCall("b", "look", "{}"))
    full = message | {"tool_calls": [call] * (MAX_CALLS - 1)}
    assert len(good(body(messages=[full])).messages[0].tool_calls) == MAX_CALLS
    problem = bad(body(messages=[full | {"content": [part] * 2}]))
    assert (problem.message, problem.param) == (f"a message has at most {MAX_CALLS} tool calls", "messages[0].content")


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"reasoning_content": "one", "reasoning": "two"}, "one"),
        ({"reasoning": "two"}, "two"),
        ({"reasoning_content": "", "reasoning": ""}, "three\nfour"),
    ],
)
def test_reasoning_in_parts_is_used_only_without_the_fields(fields: dict[str, str], reasoning: str):
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "th"}, {"type": "text", "text": "ree"}]}
    parts = [thought, {"type": "reasoning", "text": "four"}, {"type": "text", "text": "hi"}]
    (found,) = good(body(messages=[{"role": "assistant", "content": parts, **fields}])).messages
    assert (found.content, found.reasoning) == ("hi", reasoning)


def test_all_parts_of_a_body_reach_the_dispatcher():
    raw = body(user="u", presence_penalty=0, stream=True, metadata={"a": "b"}, chat_template_kwargs={"persona": "x"})
    job = good(raw).to_spec("k", "r", 7)
    assert (job.key, job.request_id, job.created, job.stream, job.include_usage) == ("k", "r", 7, True, False)
    assert (job.session, job.ignored, job.set_penalties) == ("u", ("metadata",), {"presence_penalty"})
    assert (job.template, job.tools, job.messages) == ('{"persona":"x"}', "", (Message("user", "hello"),))
    assert good(body(stream=True, stream_options={"include_usage": True})).to_spec("k", "r", 7).include_usage


def test_a_request_has_at_most_sixteen_answers():
    assert good(body(n=16)).params.n == 16
    assert bad(body(n=17)).param == "n"

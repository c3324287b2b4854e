import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.dialects.chat import HARMLESS, NEUTRAL, ChatRequest, parse
from router.problems import Problem
from wire.codec import decode, encode
from wire.frames import Generate, Message, Params

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
    assert found.params == Params()
    assert (found.stream, found.include_usage, found.demand.model) == (False, False, "tiny")
    assert found.demand.prompt_tokens is None
    assert found.demand.prompt_bytes >= 5


def test_every_parameter_arrives():
    found = good(body(
        stream=True, stream_options={"include_usage": True}, max_tokens=5, n=3, stop=["a", "b"], temperature=1,
        top_p=0.5, seed=-7,
    ))  # fmt: skip
    assert found.params == Params(5, 1.0, 0.5, -7, ("a", "b"), 3)
    assert (found.stream, found.include_usage) == (True, True)
    assert (found.demand.max_tokens, found.demand.choices) == (5, 3)
    assert good(body(stop="x")).params.stop == ("x",)
    assert good(body(max_tokens=5, max_completion_tokens=9)).params.max_tokens == 9


def test_null_means_not_given():
    nothing = dict.fromkeys(("stream", "stream_options", "max_tokens", "n", "stop", "temperature", "top_p", "seed"))
    assert good(body(**nothing)).params == Params()


def test_text_parts_are_joined_and_assistant_turns_taken_back():
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "annotations": [], "audio": None},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "user", "content": "äöü", "name": "Ann"},
    ]
    assert good(body(messages=messages)).messages == (
        Message("system", "be brief"), Message("assistant", ""), Message("tool", "42"), Message("user", "äöü", "Ann"),
    )  # fmt: skip


def test_harmless_fields_pass_and_neutral_values_too():
    assert good(body(**dict.fromkeys(HARMLESS, "x"))).params == Params()
    for name, values in NEUTRAL.items():
        for value in values:
            good(body(**{name: value}))


ASKS = {
    "tools": [{"type": "function"}], "tool_choice": "required", "functions": [{}], "function_call": {"name": "f"},
    "response_format": {"type": "json_object"}, "logprobs": True, "top_logprobs": 3, "logit_bias": {"1": 2},
    "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.1, "top_k": 40, "min_p": 0.1,
    "modalities": ["audio"], "audio": {}, "prediction": {}, "web_search_options": {}, "reasoning_effort": "high",
    "verbosity": "low",
}  # fmt: skip


@pytest.mark.parametrize("name", list(NEUTRAL))
def test_what_is_not_offered_is_refused_by_name(name: str):
    problem = bad(body(**{name: ASKS[name]}))
    assert (problem.code, problem.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(("part", "param"), [
    ({"type": "image_url", "image_url": {"url": "data:"}}, "messages[0].content[0].type"),
    ({"type": "input_audio", "input_audio": {}}, "messages[0].content[0].type"),
])  # fmt: skip
def test_parts_that_are_no_text_are_unsupported(part: dict[str, object], param: str):
    problem = bad(body(messages=[{"role": "user", "content": [part]}]))
    assert (problem.code, problem.param) == ("unsupported_parameter", param)


def test_tool_calls_of_earlier_turns_are_unsupported():
    problem = bad(body(messages=[*HELLO, {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]))
    assert (problem.code, problem.param) == ("unsupported_parameter", "messages[1].tool_calls")


WRONG: list[tuple[dict[str, object], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"model": ""}, "model"),
    ({"model": 7}, "model"),
    ({"model": "x" * 300}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"n": 10**9}, "n"),
    ({"n": 0}, "n"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"seed": 2**64}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stop": ""}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["a", "x" * 600]}, "stop[1]"),
    ({"colour": "red"}, "colour"),
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
    (b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    (b'{"seed":' + b"9" * 5000 + b"}", "not usable"),
    (b'{"model":"a\nb"}', "not JSON"),
    (b"\xef\xbb\xbf{}", "not JSON"),
]


@pytest.mark.parametrize(("raw", "text"), UNUSABLE)
def test_a_body_that_is_not_what_it_should_be(raw: bytes, text: str):
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
names = st.sampled_from([
    "model", "messages", "stream", "stop", "n", "max_tokens", "temperature", "seed", "tools", "user", "x",
])  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first text is slow: it builds a table of characters
@given(st.dictionaries(names, json_values))
def test_whatever_is_taken_can_be_sent(fields: dict[str, object]):
    found = parse(json.dumps({"model": "tiny", "messages": HELLO} | fields).encode())
    if isinstance(found, ChatRequest):
        frame = Generate(1, 1, "r", found.demand.model, found.messages, found.params, 0)
        raw = encode(frame)
        assert decode(raw[4], raw[5:]) == frame
    else:
        assert found.status == 400
        assert found.message

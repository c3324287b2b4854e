"""The fast parser accepts only bodies that the strict parser accepts, with the same result."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dialects.openai import chat, chat_fast_parse
from router.errors import Problem

PLAIN = b'{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":8,"temperature":1}'

NUMBERS = st.one_of(st.integers(-3, 20), st.floats(-1, 3), st.booleans(), st.none(), st.integers(), st.just("8"))
WORDS = st.one_of(st.text(max_size=5), st.sampled_from(['"a":', '\\":', '{"path": "/a"}', "\\"]))
CALLS = st.lists(
    st.fixed_dictionaries(
        {"id": WORDS, "function": st.fixed_dictionaries({"name": WORDS, "arguments": st.one_of(WORDS, st.none())})},
        optional={"type": st.sampled_from(["function", "custom"]), "index": st.just(0)},
    ),
    max_size=2,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "robot"])},
        optional={
            "content": st.one_of(WORDS, st.none()),
            "name": st.text(max_size=5),
            "tool_calls": st.one_of(CALLS, st.none()),
            "tool_call_id": st.one_of(WORDS, st.none()),
        },
    ),
    max_size=4,
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["read", "write", "a b", ""])},
    optional={
        "description": st.one_of(WORDS, st.none()),
        "strict": st.sampled_from([True, False, None]),
        "parameters": st.one_of(
            st.none(), st.dictionaries(WORDS, st.dictionaries(WORDS, WORDS, max_size=2), max_size=2)
        ),
        "strange": st.just(1),
    },
)
TOOLS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["function", "custom", "web_search"]), "function": FUNCTIONS}),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {"model": st.one_of(st.text(max_size=5), st.integers()), "messages": MESSAGES},
    optional={
        "stream": st.one_of(st.booleans(), st.none(), st.integers(0, 1)),
        "max_tokens": NUMBERS,
        "max_completion_tokens": NUMBERS,
        "n": NUMBERS,
        "temperature": NUMBERS,
        "top_p": NUMBERS,
        "seed": NUMBERS,
        "stop": st.just("x"),
        "stream_options": st.one_of(
            st.none(), st.fixed_dictionaries({}, optional={"include_usage": st.sampled_from([True, False, None, 1])})
        ),
        "top_k": NUMBERS,
        "min_p": NUMBERS,
        "presence_penalty": NUMBERS,
        "frequency_penalty": NUMBERS,
        "repetition_penalty": NUMBERS,
        "tools": st.one_of(TOOLS, st.none()),
        "tool_choice": st.sampled_from(["auto", "none", "required", None]),
        "parallel_tool_calls": st.sampled_from([True, False, None]),
        "strange": st.just(1),
    },
)


def quick(body: bytes) -> chat.ChatRequest | None:
    return chat_fast_parse.read(body, chat.encode_plain_tools, chat.ChatRequest)


def agree(body: bytes) -> None:
    plain = quick(body)
    if plain is not None:
        strict = chat.parse_wholly(body)
        assert not isinstance(strict, Problem), strict
        assert plain == strict


@given(BODIES, st.booleans(), st.booleans())
def test_fast_parser_agrees_with_the_complete_parser(body: dict[str, Any], ascii_: bool, wide: bool) -> None:
    agree(json.dumps(body, ensure_ascii=ascii_, indent=2 if wide else None).encode("utf-8", "surrogatepass"))


AGENT = json.dumps(
    {
        "model": "m",
        "stream": True,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "messages": [
            {"role": "system", "content": "You read files."},
            {"role": "user", "content": 'What does "a": 1 mean in it?'},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "/a"}'}},
                    {"id": "c2", "type": "function", "function": {"name": "read", "arguments": '{"path": "/b\\\\"}'}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": '{"a": 1}'},
            {"role": "tool", "tool_call_id": "c2", "content": ""},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "read",
                    "description": "Read a file.",
                    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
                },
            }
        ],
    }
).encode()


@pytest.mark.parametrize("whole", [PLAIN, AGENT], ids=["plain", "agent"])
@given(wound=st.binary(max_size=6), part=st.floats(0, 1))
def test_bodies_with_a_wound_are_left_to_the_strict_reader_or_understood_the_same(
    whole: bytes, wound: bytes, part: float
) -> None:
    place = int(part * len(whole))
    agree(whole[:place] + wound + whole[place:])
    agree(whole[:place] + wound + whole[place + len(wound) :])


def test_fast_parser_accepts_the_body_of_an_agent() -> None:
    plain = quick(AGENT)
    assert plain is not None
    assert [len(one.tool_calls) for one in plain.messages] == [0, 0, 2, 0, 0]
    assert json.loads(plain.tools)[0]["function"]["name"] == "read"
    agree(AGENT)
    spoken = quick(AGENT.replace(b'"content": null', b'"content": "I look."'))
    assert spoken is not None
    assert [one.content for one in spoken.messages][2] == "I look."


@pytest.mark.parametrize(
    "body",
    [
        PLAIN.replace(b"hello", b"gr\\u00fcn \\u0022: \\\\"),
        AGENT.replace(b"Read a file.", b"Reads the user\\u2019s file \\ud83d\\ude00."),
        AGENT.replace(b'": ', b'" : '),
    ],
)
def test_fast_parser_accepts_escapes_and_white_space(body: bytes) -> None:
    assert body not in (PLAIN, AGENT)
    assert quick(body) is not None
    agree(body)


@pytest.mark.parametrize(
    "body",
    [
        AGENT.replace(b'"type": "object", ', b'"type": "object", "type": "object", '),
        AGENT.replace(b'"id": "c1", ', b'"id": "c1", "id": "c3", '),
        AGENT.replace(b'"arguments": "', b'"arguments": "", "arguments": "', 1),
        AGENT.replace(b'"tool_choice": "auto"', b'"tool_choice": "auto", "tool_choice": "auto"'),
        AGENT.replace(b'"tools": [', b'"tools": [], "tools": ['),
        AGENT.replace(b'"parallel_tool_calls": true', b'"parallel_tool_calls": false'),
        AGENT.replace(b'"name": "read", "desc', b'"strict": true, "name": "read", "desc'),
        AGENT.replace(b'"name": "read", "desc', b'"strange": true, "name": "read", "desc'),
        AGENT.replace(
            b'[{"type": "function", "function": {"name": "read", "desc',
            b'[{"type": "web_search"}, {"type": "function", "function": {"name": "read", "desc',
        ),
        AGENT.replace(b', "tool_call_id": "c2"', b""),
        AGENT.replace(b'"tool_call_id": "c2", "content": ""', b'"tool_call_id": "c2", "content": null'),
        AGENT.replace(b'"tool_call_id": "c2", ', b'"tool_call_id": "c2", "tool_calls": [], '),
        AGENT.replace(b'"role": "assistant"', b'"role": "user"'),
        AGENT.replace(b'"role": "user", ', b'"role": "user", "tool_call_id": "c1", '),
        AGENT.replace(b'"path"', b'"path\\u0022'),
    ],
)
def test_an_agents_body_with_something_unusual_is_left_to_the_strict_reader(body: bytes) -> None:
    assert body != AGENT
    assert quick(body) is None


@pytest.mark.parametrize(
    "body",
    [
        PLAIN.replace(b'"max_tokens":8', b'"max_tokens":8,"max_tokens":9'),
        PLAIN.replace(b'"content":"hello"', b'"content":"hello","content":"other"'),
        PLAIN.replace(b'"model":"m"', b'"model":"m", "model" : "m"'),
        PLAIN.replace(b"hello", b"\\ud800"),
        PLAIN.replace(b"hello", b"\xff"),
        PLAIN.replace(b"hello", b"x" * chat_fast_parse.MAX_BODY_BYTES),
        PLAIN.replace(b"user", b"robot"),
        PLAIN.replace(b"user", b"tool"),
        PLAIN.replace(b'"max_tokens":8', b'"stream_options":{"include_usage":true}'),
        PLAIN.replace(b'"max_tokens":8', b'"stream":true,"stream_options":{}'),
        PLAIN.replace(
            b'"max_tokens":8', b'"stream":true,"stream_options":{"include_usage":true,"include_usage":false}'
        ),
        PLAIN.replace(b'"max_tokens":8', b'"logprobs":true'),
        PLAIN.replace(b'"max_tokens":8', b'"user":"ann"'),
        PLAIN.replace(b'"max_tokens":8', b'"top_p":1e-7'),
        b"[]",
        b"",
    ],
)
def test_fast_parser_leaves_unusual_bodies_to_the_complete_parser(body: bytes) -> None:
    assert quick(body) is None


WHOLE = {
    "stream": True,
    "max_tokens": 8,
    "max_completion_tokens": 9,
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "stream_options": {"include_usage": True},
    "top_k": 40,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
}


NO_USAGE = {"stream": True, "stream_options": {"include_usage": False}}


@pytest.mark.parametrize(
    "fields", [{}, WHOLE, NO_USAGE, {"top_k": -1, "min_p": 0}, *({k: v} for k, v in WHOLE.items())]
)
def test_fast_parser_accepts_plain_bodies(fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]} | fields).encode()
    assert (quick(body) is not None) == ("stream_options" not in fields or "stream" in fields)
    agree(body)

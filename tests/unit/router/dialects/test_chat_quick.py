"""The quick reader says nothing that the strict one would not."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dialects import chat, chat_quick
from router.problems import Problem

PLAIN = b'{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":8,"temperature":1}'

NUMBERS = st.one_of(st.integers(-3, 20), st.floats(-1, 3), st.booleans(), st.none(), st.integers(), st.just("8"))
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool", "robot"]),
            "content": st.one_of(st.text(), st.none()),
        },
        optional={"name": st.text(max_size=5)},
    ),
    max_size=4,
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
        "tools": st.just([]),
        "strange": st.just(1),
    },
)


def agree(body: bytes) -> None:
    quick = chat_quick.read(body)
    if quick is not None:
        strict = chat.parse_strictly(body)
        assert not isinstance(strict, Problem), strict
        assert chat.ChatRequest(*quick) == strict


@given(BODIES, st.booleans(), st.booleans())
def test_what_is_understood_quickly_is_understood_the_same_strictly(
    body: dict[str, Any], ascii_: bool, wide: bool
) -> None:
    agree(json.dumps(body, ensure_ascii=ascii_, indent=2 if wide else None).encode("utf-8", "surrogatepass"))


@given(st.binary(max_size=6), st.integers(0, len(PLAIN)))
def test_bodies_with_a_wound_are_left_to_the_strict_reader_or_understood_the_same(wound: bytes, place: int) -> None:
    agree(PLAIN[:place] + wound + PLAIN[place:])
    agree(PLAIN[:place] + wound + PLAIN[place + len(wound) :])


@pytest.mark.parametrize(
    "body",
    [
        PLAIN.replace(b'"max_tokens":8', b'"max_tokens":8,"max_tokens":9'),
        PLAIN.replace(b'"content":"hello"', b'"content":"hello","content":"other"'),
        PLAIN.replace(b'"model":"m"', b'"model":"m", "model" : "m"'),
        PLAIN.replace(b"hello", b"\\ud800"),
        PLAIN.replace(b"hello", b"\xff"),
        PLAIN.replace(b"hello", b"x" * chat_quick.LONGEST),
        PLAIN.replace(b"user", b"robot"),
        PLAIN.replace(b"user", b"tool"),
        PLAIN.replace(b'"max_tokens":8', b'"stream_options":{"include_usage":true}'),
        PLAIN.replace(b'"max_tokens":8', b'"stream":true,"stream_options":{}'),
        PLAIN.replace(
            b'"max_tokens":8', b'"stream":true,"stream_options":{"include_usage":true,"include_usage":false}'
        ),
        PLAIN.replace(b'"max_tokens":8', b'"logprobs":true'),
        PLAIN.replace(b'"max_tokens":8', b'"user":"ann"'),
        b"[]",
        b"",
    ],
)
def test_what_might_need_a_word_is_left_to_the_strict_reader(body: bytes) -> None:
    assert chat_quick.read(body) is None


WHOLE = {
    "stream": True, "max_tokens": 8, "max_completion_tokens": 9, "n": 2, "temperature": 0.5, "top_p": 0.9, "seed": 3,
    "stream_options": {"include_usage": True}, "top_k": 40, "min_p": 0.1, "presence_penalty": 1,
    "frequency_penalty": -0.5, "repetition_penalty": 1.1,
}  # fmt: skip


@pytest.mark.parametrize("fields", [{}, WHOLE, {"top_k": -1, "min_p": 0}, *({k: v} for k, v in WHOLE.items())])
def test_plain_bodies_take_the_short_cut(fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]} | fields).encode()
    assert (chat_quick.read(body) is not None) == ("stream_options" not in fields or "stream" in fields)
    agree(body)

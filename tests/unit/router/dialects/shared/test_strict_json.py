"""Ambiguous JSON, which two readers could read differently, is refused. A large body is refused before it is parsed."""

import json

import pytest

from router.admission.request_limits import MAX_JSON_DEPTH, MAX_KEYS, MAX_TEXT_BYTES, MAX_TEXTS
from router.dialects.shared.strict_json import PROMPT_FIELDS, encode_json, read_object
from router.errors import Problem

CHARACTERS = MAX_TEXT_BYTES // 4
"""Maximum characters that are read if one of them needs four bytes."""


def message_of(body: bytes, max_values: int = 100) -> str:
    found = read_object(body, max_values)
    return found.message if isinstance(found, Problem) else ""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xff{}", "the body is not UTF-8: byte 0 (invalid start byte)"),
        (b'{"a":}', "the body is not JSON: Expecting value at line 1 column 6"),
        (b"[" * 60_000, "the body has too many levels of nesting"),
        (b"[]", "the body must be a JSON object"),
        (b'{"a":NaN}', "the body cannot be used: NaN is not a JSON number"),
        (b'{"a":[{"c":2,"b":1,"b":3}]}', "the body cannot be used: the key 'b' appears twice in one object"),
        (b'{"' + b"k" * 70 + b'":1,"' + b"k" * 70 + b'":2}', f"the key '{'k' * 64}' appears twice in one object"),
        (rb'{"a":"\ud800"}', "half of a surrogate pair"),
        (rb'{"a":{"\udfff":1}}', "half of a surrogate pair"),
        (rb'{"a":["b",["\uD83D"]]}', "half of a surrogate pair"),
        (rb'{"a":"\ud83d\ude00"}', ""),
        (rb'{"a":"\\ud800"}', ""),
        ('{"a":"é😀"}'.encode(), ""),
        (b"{}", ""),
    ],
)
def test_a_body_is_read_strictly(body: bytes, message: str):
    assert message in message_of(body, 65_536)
    assert bool(message) == bool(message_of(body, 65_536))


def test_half_a_surrogate_pair_is_replaced_in_the_texts_of_a_prompt_only():
    """A client that cuts a text within an emoji sends it in each request of the conversation."""
    text = rb'{"messages":[{"content":"\ud83d b\ud83d\ude00\udc00"},["\udfff"]],"prompt":"a\ud800","n":[1,null]}'
    assert read_object(text, 100, PROMPT_FIELDS) == {
        "messages": [{"content": "\ufffd b😀\ufffd"}, ["\ufffd"]],
        "prompt": "a\ufffd",
        "n": [1, None],
    }
    for refused in (rb'{"messages":[{"\ud800":1}]}', rb'{"model":"\ud800","prompt":"x"}'):
        problem = read_object(refused, 100, PROMPT_FIELDS)
        assert isinstance(problem, Problem)
        assert "half of a surrogate pair" in problem.message


def test_an_object_is_read_as_json_reads_it():
    text = '{"a": [1, 2.5, null, {"b": "é\\u00e9\\ud83d\\ude00"}], "": true}'
    assert read_object(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"a":[' + b"1," * 97 + b"1]}", ""),
        (b'{"a":[' + b"1," * 98 + b"1]}", ""),
        (
            b'{"a":[' + b"1," * 99 + b"1]}",
            "the body has 101 values (commas, lists and objects), the limit is 100: shorten it",
        ),
        (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "the body has 101 values"),
        (b'{"a":"' + b",[{" * 100 + b'"}', ""),
        (rb'{"a":"' + rb"\"," * 300 + b'"}', ""),
        (b'{"b":",","a":[' + b"1," * 97 + b"1]}", ""),
        (rb'{"a":"\\"' + b",1" * 101 + b"}", "the body has 102 values"),
    ],
)
def test_values_are_counted_before_a_body_is_read(body: bytes, message: str):
    assert message in message_of(body)
    assert bool(message) == bool(message_of(body))


@pytest.mark.parametrize(
    ("texts", "message"),
    [(MAX_TEXTS, ""), (MAX_TEXTS + 1, f"the body has {MAX_TEXTS + 1} strings, the limit is {MAX_TEXTS}: shorten it")],
)
def test_texts_are_counted_before_a_body_is_read(texts: int, message: str):
    body = b'{"a":[' + b'"",' * (texts - 2) + rb'"\"\""]}'
    assert message_of(body, 2 * MAX_TEXTS) == message


@pytest.mark.parametrize(
    ("text", "characters"),
    [
        ("x" * (CHARACTERS - 10) + "😀", 0),
        ("x" * (CHARACTERS - 9) + "😀", 0),
        ("x" * (CHARACTERS - 8) + "😀", CHARACTERS + 1),
        ("é" * CHARACTERS + "😀", CHARACTERS + 9),
        ("x" * (CHARACTERS + 100), 0),
        ("é" * (CHARACTERS + 100), 0),
        ("x" * (CHARACTERS - 10) + r"\ud83d\ude00", 0),
        ("x" * (CHARACTERS - 9) + r"\ud83d\ude00", CHARACTERS + 1),
        (r"\u00e9" * CHARACTERS, 0),
        (r"\u00e9" * CHARACTERS + r"\ud83d\ude00", CHARACTERS + 10),
    ],
)
def test_characters_are_counted_where_one_of_them_needs_four_bytes(text: str, characters: int):
    message = (
        f"the body has {characters} characters; the limit is {CHARACTERS} if one is beyond U+FFFF, such as an emoji"
        ": shorten it"
    )
    assert message_of(b'{"a":"' + text.encode() + b'"}') == (message if characters else "")


@pytest.mark.parametrize(("keys", "message"), [(MAX_KEYS, ""), (MAX_KEYS + 1, f"an object has {MAX_KEYS + 1} keys")])
def test_keys_of_an_object_are_bounded(keys: int, message: str):
    body = json.dumps({"a": [dict.fromkeys(map(str, range(keys)), 1)]}).encode()
    assert message in message_of(body, 10_000)
    assert bool(message) == bool(message_of(body, 10_000))


def nested(depth: int) -> object:
    """Make alternating lists and objects, one inside the other."""
    value: object = 0
    for level in range(depth):
        value = {"a": value, "b": 1} if level % 2 else [1, value]
    return value


def test_a_part_is_written_compactly_and_within_its_bounds():
    assert encode_json({"a": [1, "é"], "b": None}, "tools", 24) == '{"a":[1,"é"],"b":null}'
    assert encode_json({"a": [1, "é"], "b": None}, "tools", 23) == '{"a":[1,"é"],"b":null}'
    refused = encode_json({"a": [1, "é"], "b": None}, "tools", 22)
    assert isinstance(refused, Problem)
    assert (refused.message, refused.param) == ("tools has 23 bytes of JSON, the limit is 22", "tools")
    infinite = encode_json([float("inf")], "tools", 99)
    assert isinstance(infinite, Problem)
    assert infinite.message == "tools has a number that is too large"
    assert isinstance(encode_json(nested(MAX_JSON_DEPTH), "tools", 10_000), str)
    deep = encode_json(nested(MAX_JSON_DEPTH + 1), "tools", 10_000)
    assert isinstance(deep, Problem)
    assert deep.message == f"tools is nested deeper than {MAX_JSON_DEPTH} levels"

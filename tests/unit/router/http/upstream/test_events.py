"""Events of upstreams: any division of the bytes gives the same events, and nothing is unbounded."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.upstream.events import (
    MAX_EVENT_BYTES,
    EventReader,
    UpstreamStreamError,
    Usage,
    check_answer,
    is_finished,
    parse_object,
    read_usage,
)

STREAM = (
    b': wait\r\n\r\nevent: x\nid: 7\ndata: {"a":1}\n\ndata:{"b":\ndata: 2}\r\n\r\n'
    b"retry: 5\n\n\ndata: [DONE]\n\ndata: rest"
)
EVENTS = [b"", b'{"a":1}', b'{"b":\n2}', b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_the_division_of_the_bytes(cuts: list[int]):
    places = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader()
    found: list[bytes] = []
    for begin, end in itertools.pairwise(places):
        found += reader.feed(STREAM[begin:end])
    assert found == EVENTS


@given(st.binary(max_size=300))
def test_feed_accepts_any_bytes(received: bytes):
    assert all(isinstance(one, bytes) for one in EventReader().feed(received))


def test_a_line_without_end_and_an_event_without_end_are_refused():
    half = b"x" * (MAX_EVENT_BYTES // 2)
    for part in (half, b"data: " + half + b"\n"):
        reader = EventReader()
        reader.feed(part)
        with pytest.raises(UpstreamStreamError, match="more than 1048576 bytes"):
            reader.feed(part + b"x")
    reader = EventReader()
    for _ in range(3):
        assert len(reader.feed(b"data: " + half + b"\n\n")) == 1, "whole events are no problem"


def test_feed_counts_the_finished_lines_of_an_event_with_its_last_one():
    line = b"data: x\n"
    largest = b"y" * (MAX_EVENT_BYTES - len(line) + 1)
    reader = EventReader()
    assert reader.feed(line + largest) == [], "the line feed does not count"
    with pytest.raises(UpstreamStreamError, match="more than 1048576 bytes"):
        reader.feed(b"y")


@pytest.mark.parametrize("data", [b"{", b"[]", b"1", b"null", b"\xff", b"[" * 5000])
def test_parse_object_refuses_other_json(data: bytes):
    with pytest.raises(UpstreamStreamError):
        parse_object(data)


@pytest.mark.parametrize("answer", [{}, {"choices": 1}, {"choices": [], "error": {"message": "x"}}])
def test_an_answer_needs_choices_and_no_error(answer: dict[str, object]):
    with pytest.raises(UpstreamStreamError):
        check_answer(answer)


@pytest.mark.parametrize(
    ("usage", "found"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {}}, Usage(5, 2, 0)),
        (
            {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": None}},
            Usage(5, 2, 0),
        ),
        ({"prompt_tokens": 5, "completion_tokens": 2}, Usage(5, 2, 0)),
        ({"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}, Usage(5, 2, 3)),
        ({"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": None}, Usage(5, 2, 0)),
        ({"prompt_tokens": 5}, None),
        ({"prompt_tokens": -5, "completion_tokens": 2}, None),
        ({"prompt_tokens": 10**12, "completion_tokens": 2}, None),
        ({"prompt_tokens": True, "completion_tokens": 2}, None),
        (None, None),
    ],
)
def test_only_valid_token_counts_are_read(usage: object, found: Usage | None):
    assert read_usage({"usage": usage}) == found


def test_a_chunk_with_a_finish_reason_ends_a_choice():
    assert is_finished([{"finish_reason": None}, {"finish_reason": "stop"}])
    assert not is_finished([{"finish_reason": None}, "x"])


def test_feed_refuses_a_large_event_that_arrives_at_once():
    line = b"data: " + b"x" * (MAX_EVENT_BYTES // 2) + b"\n"
    assert len(EventReader().feed(line + b"\n" + line + b"\n")) == 2
    with pytest.raises(UpstreamStreamError, match="more than 1048576 bytes"):
        EventReader().feed(line + line + b"\n")
    with pytest.raises(UpstreamStreamError, match="more than 1048576 bytes"):
        EventReader().feed(b"id: " + b"x" * MAX_EVENT_BYTES + b"\n\n")
    largest = b"data:" + b"x" * (MAX_EVENT_BYTES - 5)
    assert len(EventReader().feed(largest + b"\n\n")) == 1
    with pytest.raises(UpstreamStreamError, match="more than 1048576 bytes"):
        EventReader().feed(largest + b"x\n\n")


def test_objects_and_their_choices_are_returned():
    assert parse_object(b'{"a": [1]}') == {"a": [1]}
    assert check_answer({"choices": [{"index": 0}], "error": None}) == [{"index": 0}]
    assert check_answer({"choices": []}) == []

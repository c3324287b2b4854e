"""Answers of the dialects that have a single choice."""

import pytest

from router.dialects.shared.single_choice import StreamSplitter, assemble_answer, decode_arguments
from router.dialects.shared.tool_calls import MAX_CALLS_SENT, AnswerToolCall
from router.dispatch.request import CompleteAnswer
from tests.support.answers import CALL
from wire.frames import Channel, Delta

WEATHER = AnswerToolCall("call_1", "weather", '{"city":"Ulm"}')
CONTENT, REASONING, TOOL_CALL = map(int, (Channel.CONTENT, Channel.REASONING, Channel.TOOL_CALL))


def test_a_stream_has_the_texts_and_calls_of_the_first_choice_only():
    splitter = StreamSplitter()
    pieces = ((REASONING, "hm"), (CONTENT, ""), (CONTENT, "yes"), (TOOL_CALL, CALL), (TOOL_CALL, "{"), (99, "x"))
    parts = list(splitter.split([Delta(1, 1, (), pieces), Delta(1, 0, (), pieces)]))
    assert parts == [
        (Channel.REASONING, "hm", None),
        (Channel.CONTENT, "yes", None),
        (Channel.TOOL_CALL, "", WEATHER),
    ]
    assert splitter.calls == 1


def test_calls_above_the_maximum_are_omitted():
    splitter = StreamSplitter()
    assert len(list(splitter.split([Delta(1, 0, (), ((TOOL_CALL, CALL),) * (MAX_CALLS_SENT + 2))]))) == MAX_CALLS_SENT
    assert splitter.calls == MAX_CALLS_SENT
    pieces = ["{", *[CALL] * (MAX_CALLS_SENT + 2)]
    assert assemble_answer(CompleteAnswer({}, {0: pieces}, {})).calls == [WEATHER] * MAX_CALLS_SENT


def test_a_complete_answer_has_the_parts_of_the_first_choice_only():
    texts = {(0, CONTENT): "yes", (1, CONTENT): "no", (0, REASONING): "hm"}
    answer = CompleteAnswer(texts, {0: ["{", CALL], 1: [CALL, CALL]}, {})
    assert assemble_answer(answer) == ("hm", "yes", [WEATHER])
    assert assemble_answer(CompleteAnswer({}, {}, {})) == ("", "", [])


@pytest.mark.parametrize(
    ("arguments", "decoded"),
    [('{"a":1}', {"a": 1}), ("[1]", {}), ("null", {}), ('"a"', {}), ("{", {}), ("", {}), ("[" * 10_000, {})],
)
def test_arguments_that_are_no_object_are_empty(arguments: str, decoded: object):
    assert decode_arguments(AnswerToolCall("c", "n", arguments)) == decoded

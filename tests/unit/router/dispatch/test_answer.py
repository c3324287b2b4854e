"""Content and counts that a request without a stream collects."""

import math
import struct

import pytest

from router.dispatch.answer import DELTA_BYTES, CollectedAnswer, VectorsAnswer
from router.dispatch.request import CompleteAnswer
from wire.frames import Channel, Delta, Logprob, Vectors


def an_answer(*, logprobs: bool = False) -> CollectedAnswer:
    return CollectedAnswer(1, logprobs)


def delta(channel: Channel, text: str, **more: object) -> Delta:
    return Delta(1, 0, (7,), ((channel, text),), **more)  # pyright: ignore[reportArgumentType]


def test_add_collects_texts_and_calls_and_counts_them():
    whole = an_answer()
    for piece in ("Hel", "lo"):
        assert whole.add(delta(Channel.CONTENT, piece)) is False
    assert whole.buffered == 5
    for call in ("{}", "[]"):
        whole.add(delta(Channel.TOOL_CALL, call))
    assert whole.buffered == 5 + 2 * (2 + DELTA_BYTES)
    assert whole.build_answer("f") == CompleteAnswer({(0, Channel.CONTENT): "Hello"}, {0: ["{}", "[]"]}, {}, "f")


def test_add_keeps_requested_log_probabilities_only():
    logprob = Logprob(b"a", -1.0, ())
    for asked, kept in ((True, {0: [logprob, logprob]}), (False, {})):
        whole = an_answer(logprobs=asked)
        for _ in range(2):
            whole.add(delta(Channel.CONTENT, "a", logprobs=(logprob,)))
        assert whole.build_answer().logprobs == kept
        assert (whole.buffered > 2) is asked


def test_add_ignores_unrequested_choices():
    whole = an_answer()
    assert whole.add(Delta(1, 1, (7,), ((Channel.CONTENT, "a"),))) is False
    assert (whole.buffered, whole.build_answer().texts) == (0, {})


# vectors


def packed(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def test_vectors_arrive_in_any_order():
    answer = VectorsAnswer(3)
    answer.add_vectors(Vectors(1, (2, 0), packed(5, 6, 1, 2)))
    assert not answer.complete
    answer.add_vectors(Vectors(1, (1,), packed(3, 4)))
    assert answer.complete
    assert answer.build_answer().vectors == (packed(1, 2), packed(3, 4), packed(5, 6))


@pytest.mark.parametrize(
    "frame",
    [
        Vectors(1, (), b""),
        Vectors(1, (0,), b""),
        Vectors(1, (0,), b"abc"),
        Vectors(1, (0, 1), packed(1, 2, 3)),
        Vectors(1, (0,), packed(1, math.nan)),
        Vectors(1, (0,), packed(1, -math.inf)),
        Vectors(1, (9,), packed(1, 2)),
    ],
)
def test_an_invalid_frame_of_vectors_is_ignored(frame: Vectors):
    answer = VectorsAnswer(1)
    answer.add_vectors(frame)
    assert not answer.complete
    assert answer.build_answer().vectors == ()


def test_vectors_of_different_lengths_are_never_complete():
    answer = VectorsAnswer(2)
    answer.add_vectors(Vectors(1, (0,), packed(1, 2)))
    answer.add_vectors(Vectors(1, (1,), packed(1)))
    assert not answer.complete


def test_another_attempt_starts_without_vectors():
    answer = VectorsAnswer(2)
    answer.add_vectors(Vectors(1, (0,), packed(1)))
    answer.discard()
    answer.add_vectors(Vectors(2, (1,), packed(1)))
    assert not answer.complete

"""Content and counts of the answer of a request, and how its reader is notified."""

import math
import struct

import pytest

from router.dispatch.answer import (
    DELTA_BYTES,
    LOGPROB_BYTES,
    MAX_DELTAS_TAKEN,
    CollectedAnswer,
    StreamedAnswer,
    VectorsAnswer,
)
from router.dispatch.request import CANCELLED, CompleteAnswer
from wire.frames import Channel, Delta, Finished, Logprob, Vectors


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


# reader


async def test_the_reader_is_woken_by_the_first_end_and_by_an_upstream():
    answer, end = an_answer(), Finished(1, ("stop",), 1, 1)
    waiting = answer.wait()
    answer.end(end)
    assert waiting.done()
    waiting = answer.wait()
    answer.end(CANCELLED)
    assert (answer.outcome, waiting.done()) == (end, False)
    answer.set_upstream("home")
    assert (answer.upstream, waiting.done()) == ("home", True)
    answer.flush()


async def test_a_sink_is_called_in_place_of_the_future_until_it_is_detached():
    answer, calls = StreamedAnswer(), list[str]()
    waiting = answer.wait()
    answer.attach(lambda: calls.append("flushed"))
    answer.flush()
    assert (calls, waiting.done()) == (["flushed"], False)
    answer.detach()
    answer.flush()
    assert (calls, waiting.done()) == (["flushed"], True)


async def test_a_cancelled_wait_is_left_alone():
    answer = an_answer()
    answer.wait().cancel()
    answer.flush()


def test_a_stream_is_ready_with_deltas_an_outcome_or_a_keepalive():
    answer = StreamedAnswer()
    assert not answer.ready
    answer.request_keepalive()
    assert answer.ready
    assert (answer.take_deltas(), answer.begun, answer.takes, answer.ready) == ([], False, 1, False)
    answer.add(delta(Channel.CONTENT, "a"))
    assert answer.ready
    answer.discard()
    assert not answer.ready
    answer.end(CANCELLED)
    assert answer.ready


def test_only_the_first_pending_delta_asks_for_a_flush():
    answer, piece = StreamedAnswer(), delta(Channel.CONTENT, "a")
    assert [answer.add(piece), answer.add(piece)] == [True, False]
    assert answer.take_deltas() == [piece, piece]
    assert answer.begun
    assert answer.add(piece)


def test_only_deltas_of_a_blocked_reader_are_counted_until_they_are_taken():
    answer, piece = StreamedAnswer(), delta(Channel.CONTENT, "four")
    answer.set_blocked(blocked=False)
    answer.add(piece)
    assert answer.buffered == 0
    answer.set_blocked(blocked=True)
    for _ in range(MAX_DELTAS_TAKEN + 1):
        answer.add(piece)
    assert answer.buffered == (MAX_DELTAS_TAKEN + 1) * (4 + DELTA_BYTES)
    assert len(answer.take_deltas()) == MAX_DELTAS_TAKEN
    assert answer.buffered == 2 * (4 + DELTA_BYTES)
    answer.discard()
    assert (answer.buffered, answer.pending) == (0, [])


def test_log_probabilities_are_counted_with_their_alternatives():
    logprob = Logprob(b"ab", -1.0, ((b"cde", -2.0), (b"f", -3.0)))
    size = 3 * LOGPROB_BYTES + 2 + 3 + 1
    whole, stream = an_answer(logprobs=True), StreamedAnswer()
    for answer in (whole, stream):
        answer.add(delta(Channel.CONTENT, "ab", logprobs=(logprob, logprob)))
    assert whole.buffered == 2 + 2 * size
    assert stream.buffered == 2 + DELTA_BYTES + 2 * size


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
        Vectors(1, (1,), packed(1, 2)),
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


def test_text_of_a_request_for_vectors_is_ignored():
    answer = VectorsAnswer(1)
    assert answer.add(delta(Channel.CONTENT, "text")) is False
    assert (answer.buffered, answer.build_answer().texts) == (0, {})

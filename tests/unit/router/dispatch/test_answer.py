"""Content and counts that a request without a stream collects."""

from router.dispatch.answer import DELTA_BYTES, CollectedAnswer
from router.dispatch.request import CompleteAnswer
from wire.frames import Channel, Delta, Logprob


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


def test_add_keeps_log_probabilities_only_where_they_were_asked_for():
    logprob = Logprob(b"a", -1.0, ())
    for asked, kept in ((True, {0: [logprob, logprob]}), (False, {})):
        whole = an_answer(logprobs=asked)
        for _ in range(2):
            whole.add(delta(Channel.CONTENT, "a", logprobs=(logprob,)))
        assert whole.build_answer().logprobs == kept
        assert (whole.buffered > 2) is asked


def test_add_leaves_out_choices_that_were_not_asked_for():
    whole = an_answer()
    assert whole.add(Delta(1, 1, (7,), ((Channel.CONTENT, "a"),))) is False
    assert (whole.buffered, whole.build_answer().texts) == (0, {})

"""Content and counts that a request without a stream collects."""

from router.dispatch.request import DELTA_BYTES, BufferedRequest, CompleteAnswer, RequestSpec
from router.placement.candidate import ResourceDemand
from wire.capacity.fairness import WeightedKey
from wire.frames import Channel, Delta, GenerationParams, Logprob, Message


def ticket(**params: object) -> BufferedRequest:
    asked = GenerationParams(**params)  # pyright: ignore[reportArgumentType]
    job = RequestSpec(
        ResourceDemand("tiny", 10, None, 10), "key", "r", (Message("user", "hello"),), asked, 0, stream=False
    )
    return BufferedRequest(job, WeightedKey("key"), 1, 0.0)


def delta(channel: Channel, text: str, **more: object) -> Delta:
    return Delta(1, 0, (7,), ((channel, text),), **more)  # pyright: ignore[reportArgumentType]


def test_add_collects_texts_and_calls_and_counts_them():
    whole = ticket()
    for piece in ("Hel", "lo"):
        assert whole.add(delta(Channel.CONTENT, piece)) is False
    assert whole.buffered == 5
    for call in ("{}", "[]"):
        whole.add(delta(Channel.TOOL_CALL, call))
    assert whole.buffered == 5 + 2 * (2 + DELTA_BYTES)
    assert whole.answer() == CompleteAnswer({(0, Channel.CONTENT): "Hello"}, {0: ["{}", "[]"]}, {}, whole.fingerprint)


def test_add_keeps_log_probabilities_only_where_they_were_asked_for():
    logprob = Logprob(b"a", -1.0, ())
    for asked, kept in ((True, {0: [logprob, logprob]}), (False, {})):
        whole = ticket(logprobs=asked)
        for _ in range(2):
            whole.add(delta(Channel.CONTENT, "a", logprobs=(logprob,)))
        assert whole.answer().logprobs == kept
        assert (whole.buffered > 2) is asked


def test_add_leaves_out_choices_that_were_not_asked_for():
    whole = ticket()
    assert whole.add(Delta(1, 1, (7,), ((Channel.CONTENT, "a"),))) is False
    assert (whole.buffered, whole.answer().texts) == (0, {})

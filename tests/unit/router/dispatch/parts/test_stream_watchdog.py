"""Keep-alives and the end of readers that fall behind."""

from router.dispatch.active_request import ActiveRequest
from router.dispatch.answer import MAX_ANSWER_CHARS, StreamedAnswer
from router.dispatch.parts.composition import SWEEP_INTERVAL_SECONDS
from router.dispatch.request import SLOW, RequestFailure
from tests.support.cluster.manual_pool import A, Cluster
from wire.frames import Finished
from wire.refusals import FailureCode


def sweep(cluster: Cluster, seconds: float) -> None:
    for _ in range(int(seconds / SWEEP_INTERVAL_SECONDS)):
        cluster.dispatcher.sweep()


async def test_a_keepalive_is_due_after_its_seconds_without_an_event() -> None:
    cluster = Cluster(A, keepalive_seconds=10.0)
    answer = cluster.submit().answer
    assert isinstance(answer, StreamedAnswer)
    for _ in range(3):
        answer.take_deltas()
        sweep(cluster, SWEEP_INTERVAL_SECONDS)
        sweep(cluster, 10.0 - SWEEP_INTERVAL_SECONDS)
        assert not answer.keepalive_due
        sweep(cluster, SWEEP_INTERVAL_SECONDS)
        assert answer.keepalive_due
    cluster.finish()
    cluster.dispatcher.shutdown()
    cluster.settled()


def submit_stream(cluster: Cluster) -> tuple[ActiveRequest, StreamedAnswer]:
    """Submit a request with a streamed answer whose client has its status."""
    request = cluster.submit()
    assert isinstance(request.answer, StreamedAnswer)
    request.answer.mark_opened()
    return request, request.answer


async def test_a_reader_ends_after_its_seconds_without_progress() -> None:
    cluster = Cluster(A, slow_client_seconds=20.0, keepalive_seconds=10.0)
    request, answer = submit_stream(cluster)
    for _ in range(2):
        answer.take_deltas()
        sweep(cluster, 20.0)
        assert request.outcome is None, "the first sweep sees the progress"
    sweep(cluster, SWEEP_INTERVAL_SECONDS)
    assert request.outcome is SLOW
    assert cluster.dispatcher.counters.slow_clients == 1
    cluster.dispatcher.shutdown()
    cluster.settled()


async def test_a_reader_of_a_complete_answer_ends_once_and_gets_no_end_without_its_text() -> None:
    cluster = Cluster(A, slow_client_seconds=10.0)
    request, answer = submit_stream(cluster)
    cluster.speak()
    cluster.finish()
    flushed: list[object] = []
    answer.attach(lambda: flushed.append(answer.outcome))
    sweep(cluster, 30.0)
    assert flushed == [SLOW], "the reader abandons its stream"
    assert cluster.dispatcher.counters.slow_clients == 1
    assert isinstance(request.outcome, Finished)
    cluster.dispatcher.close(request)
    cluster.settled()


async def test_a_collected_answer_ends_above_its_maximum_of_characters() -> None:
    cluster = Cluster(A)
    request = cluster.submit(stream=False)
    quarter = "x" * (MAX_ANSWER_CHARS // 4)
    for _ in range(4):
        cluster.speak(quarter)
    assert request.outcome is None
    cluster.speak("y")
    assert isinstance(request.outcome, RequestFailure)
    assert request.outcome.code is FailureCode.ANSWER_TOO_LONG
    assert "use stream or lower max_tokens" in request.outcome.message
    assert cluster.dispatcher.counters.slow_clients == 0
    cluster.dispatcher.shutdown()
    cluster.settled()


async def test_an_answer_of_an_upstream_gets_no_keepalive() -> None:
    cluster = Cluster(A, keepalive_seconds=10.0)
    _, answer = submit_stream(cluster)
    answer.set_blocked(False)
    answer.set_upstream("cloud")
    sweep(cluster, 30.0)
    assert not answer.keepalive_due
    cluster.dispatcher.shutdown()
    cluster.settled()

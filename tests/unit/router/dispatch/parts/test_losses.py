"""Requests whose node stops or is lost."""

import pytest

from router.dispatch.answer import CollectedAnswer, StreamedAnswer
from router.dispatch.request import RequestFailure
from router.dispatch.request_state import RequestState
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.support.cluster.manual_pool import A, B, C, Cluster, full, turn
from wire.frames import Failed, Finished
from wire.refusals import FailureCode
from wire.report import Model
from wire.units import GIB


@pytest.mark.parametrize("begun", [False, True])
async def test_a_request_does_not_return_to_the_node_that_stops(two: Cluster, begun: bool) -> None:
    request = two.submit()
    stopping, _ = two.last()
    if begun:
        two.speak("hello")
    other = B if stopping == A else A
    two.memory[other] = a_memory(GIB)
    two.report()  # the stopping node still looks ready, and has the most room
    two.say(lambda number: Failed(number, FailureCode.NODE_STOPPING, "the agent stops"))
    assert [node for node, _ in two.generates()] == [stopping, other]
    two.finish()
    assert isinstance(request.outcome, Finished)


async def test_an_answer_that_starts_again_has_nothing_of_the_lost_one() -> None:
    cluster = Cluster(A, B, C)
    cluster.models = (a_model(fingerprint="tiny-2"),)
    cluster.report(C)
    request = cluster.submit(stream=False)
    first = cluster.generates()[-1][1]
    cluster.speak("lost")
    cluster.dispatcher.handle_lost_node(cluster.last()[0], "cable")
    resumed = cluster.generates()[-1][1]
    assert resumed.resume == ((1,),)
    assert resumed.expected > first.expected
    cluster.dispatcher.handle_lost_node(cluster.last()[0], "cable")
    node, again = cluster.generates()[-1]
    assert (node, again.resume, again.expected) == (C, (), first.expected)
    cluster.speak("new")
    cluster.finish()
    assert isinstance(request.answer, CollectedAnswer)
    assert request.answer.build_answer().texts == {(0, 0): "new"}
    cluster.dispatcher.shutdown()
    cluster.settled()


async def test_a_lost_node_that_joins_as_a_new_member_takes_the_request(two: Cluster) -> None:
    request = two.submit()
    lost, _ = two.last()
    other = B if lost == A else A
    full(two, other)
    two.dispatcher.handle_lost_node(lost, "cable")
    assert request.state is RequestState.QUEUED
    two.nodes = (other,)
    two.report()
    two.dispatcher.remove_node(lost)
    two.nodes = (A, B)
    two.report()
    await turn()
    assert [node for node, _ in two.generates()] == [lost, lost]
    two.finish()


async def test_a_lost_node_that_is_ready_again_takes_its_request_back(two: Cluster) -> None:
    request = two.submit()
    lost, _ = two.last()
    other = B if lost == A else A
    two.speak("hello")
    two.state[lost] = "lost"
    two.report()
    two.dispatcher.handle_lost_node(lost, "cable")
    two.state[lost] = "ready"
    two.report()
    two.state[other] = "lost"
    two.report()
    two.dispatcher.handle_lost_node(other, "cable")
    assert [node for node, _ in two.generates()] == [lost, other, lost]
    two.finish()
    assert isinstance(request.outcome, Finished)


@pytest.mark.parametrize(
    ("fingerprint", "others", "explained"),
    [
        ("tiny-1", (), False),
        ("tiny-1", (a_model(fingerprint="tiny-2"),), True),
        ("", (), False),
        ("", (a_model(fingerprint="tiny-2"),), False),
    ],
)
async def test_an_answer_that_no_node_can_resume_names_another_model_of_the_same_name(
    fingerprint: str, others: tuple[Model, ...], explained: bool
) -> None:
    cluster = Cluster(A, B)
    cluster.models = (a_model(fingerprint=fingerprint),)
    cluster.report()
    request = cluster.submit()
    assert isinstance(request.answer, StreamedAnswer)
    cluster.speak("hello")
    request.answer.take_deltas()
    lost, _ = cluster.last()
    cluster.models = others
    cluster.report(B if lost == A else A)
    cluster.dispatcher.handle_lost_node(lost, "cable")
    outcome = request.outcome
    assert isinstance(outcome, RequestFailure)
    assert outcome.code == FailureCode.NODE_LOST
    assert f"node node-{lost} was lost (cable): retry" in outcome.message
    assert ("a different model with the name tiny (`cluster models`)" in outcome.message) is explained
    cluster.dispatcher.shutdown()
    cluster.settled()


async def test_a_node_that_has_left_cannot_continue_an_answer(two: Cluster) -> None:
    request = two.submit()
    two.speak("hello")
    assert isinstance(request.answer, StreamedAnswer)
    request.answer.take_deltas()
    lost, _ = two.last()
    two.state[B if lost == A else A] = "left"
    two.report()
    two.dispatcher.handle_lost_node(lost, "cable")
    assert isinstance(request.outcome, RequestFailure)
    assert request.outcome.code == FailureCode.NODE_LOST

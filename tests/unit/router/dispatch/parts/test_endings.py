"""Ends of requests: the messages of refusals and failures."""

import pytest

from router.admission.rate_limits import KeyLimits
from router.dispatch.answer import StreamedAnswer
from router.dispatch.request import RequestFailure
from router.dispatch.request_state import RequestState
from tests.support.cluster.loopback_cluster import a_model
from tests.support.cluster.manual_pool import A, B, Cluster, full, taken
from wire.refusals import FailureCode, RefusalCode, Refused


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (None, "no node serves the model 'tiny'; the nearest names are tinier"),
        (KeyLimits(models=("tiny",)), "no node serves the model 'tiny'"),
    ],
)
async def test_a_key_with_a_list_of_models_learns_no_other_names(one: Cluster, limits: KeyLimits | None, message: str):
    if limits is not None:
        one.limits["k"] = limits
    one.models = (a_model("tinier"),)
    one.report()
    outcome = one.submit().outcome
    assert isinstance(outcome, Refused)
    assert (outcome.code, outcome.message) == (RefusalCode.NO_MODEL, message)


@pytest.mark.parametrize("begun", [True, False])
async def test_a_lost_answer_ends_with_its_loss_if_the_client_has_a_part_of_it(two: Cluster, begun: bool):
    request = two.submit()
    assert isinstance(request.answer, StreamedAnswer)
    two.speak("hello")
    if begun:
        assert taken(request) == ["hello"]
    lost, _ = two.last()
    full(two, B if lost == A else A)
    two.dispatcher.handle_lost_node(lost, "cable")
    assert request.state is RequestState.QUEUED
    two.now += two.settings.queue_timeout_seconds + 1
    two.report()
    two.dispatcher.sweep()
    outcome = request.outcome
    if begun:
        assert isinstance(outcome, RequestFailure)
        assert outcome.code == FailureCode.NODE_LOST
        assert f"node node-{lost} was lost (cable): retry; no other node can resume the answer" in outcome.message
        assert outcome.message.endswith("(waited 31 s in the queue)")
    else:
        assert isinstance(outcome, Refused)
        assert outcome.code is RefusalCode.NO_ROOM


async def test_an_answer_counts_for_its_model_although_no_node_has_it_any_more(one: Cluster):
    one.submit()
    one.models = ()
    one.report()
    one.finish()
    assert set(one.dispatcher.counters.models) == {"tiny"}
    assert set(one.dispatcher.usage.drain()) == {("k", "tiny")}

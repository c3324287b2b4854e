"""Requests that wait in the queue: for a model that is being pulled, and for room."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.dispatch.parts.assignment import MAX_NODES_IN_A_ROW
from router.dispatch.request import PULL
from router.dispatch.request_state import RequestState
from tests.support.cluster.loopback_cluster import a_model
from tests.support.cluster.manual_pool import A, B, Cluster, full, roomy, turn
from wire.refusals import RefusalCode, Refused

PULLING = Refused(RefusalCode.NOT_READY, "tiny is being pulled (25% of 4.0 GiB)", None, 12.0)


class PullingCluster(Cluster):
    """A cluster whose only node has another model, while the model of the requests is being pulled."""

    def __init__(self) -> None:
        super().__init__(A, queue_timeout_seconds=10.0)
        self.models = (a_model("other"),)
        self.report()
        self.pull: Refused | None = PULLING
        self.dispatcher.placer.watch_pulls(lambda model: self.pull if model == "tiny" else None)

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            self.dispatcher.sweep()


@pytest.fixture
async def pulling() -> AsyncIterator[PullingCluster]:
    cluster = PullingCluster()
    yield cluster
    cluster.dispatcher.shutdown()
    cluster.settled()


async def test_a_request_waits_for_the_pull_and_starts_with_the_model(pulling: PullingCluster) -> None:
    request = pulling.submit()
    pulling.pass_time(35)
    assert (request.outcome, request.answer.waits_for) == (None, PULL)
    pulling.models = (a_model("other"), a_model())
    pulling.pull = None
    pulling.report()
    await asyncio.sleep(0)
    assert [node for node, _ in pulling.generates()] == [A]
    assert request.answer.waits_for == ""
    pulling.finish()
    pulling.dispatcher.close(request)


async def test_a_request_ends_when_the_pull_has_failed(pulling: PullingCluster) -> None:
    request = pulling.submit()
    pulling.pass_time(35)
    pulling.pull = None
    pulling.pass_time(11)
    assert isinstance(request.outcome, Refused)
    assert request.outcome.code is RefusalCode.NO_MODEL
    pulling.dispatcher.close(request)


async def test_a_request_for_an_unknown_model_ends_at_once(pulling: PullingCluster) -> None:
    pulling.pull = None
    request = pulling.submit()
    assert isinstance(request.outcome, Refused)
    assert request.outcome.code is RefusalCode.NO_MODEL
    pulling.dispatcher.close(request)


async def test_a_request_that_a_node_refuses_keeps_its_deadline() -> None:
    cluster = Cluster(A, queue_timeout_seconds=30.0)
    full(cluster, A)
    request = cluster.submit()
    deadline = cluster.now + 30.0
    assert request.deadline == deadline
    for _ in range(2):
        cluster.now += 10.0
        roomy(cluster, A)
        await turn()
        assert request.node == A
        cluster.refuse()
        assert (request.state, request.deadline) == (RequestState.QUEUED, deadline)
    cluster.now += 10.0
    cluster.dispatcher.sweep()
    assert isinstance(request.outcome, Refused)
    cluster.dispatcher.close(request)
    cluster.settled()


async def test_a_request_for_the_share_of_its_key_goes_to_the_node_that_answers_first() -> None:
    cluster = Cluster(A, B)
    requests = [cluster.submit() for _ in range(5)]
    counts = {node: cluster.dispatcher.count_in_flight(node) for node in (A, B)}
    assert counts == {A: 3, B: 2}, "both nodes have more than the share of one key"
    full(cluster, A, B)
    requests.append(cluster.submit(key="other"))
    assert requests[-1].node == B
    for request in requests:
        cluster.dispatcher.close(request)
    cluster.settled()


async def test_sends_without_a_link_do_not_count_against_a_request_at_its_deadline() -> None:
    cluster = Cluster(A, queue_timeout_seconds=30.0)
    full(cluster, A)
    request = cluster.submit()
    cluster.cut.add(A)
    for _ in range(MAX_NODES_IN_A_ROW):
        roomy(cluster, A)
        await turn()
    assert (request.state, request.attempts) == (RequestState.QUEUED, MAX_NODES_IN_A_ROW)
    cluster.cut.clear()
    cluster.now += 30.0
    cluster.report()
    cluster.dispatcher.sweep()
    assert (request.state, request.node) == (RequestState.SENT, A)
    cluster.finish()
    cluster.dispatcher.shutdown()
    cluster.settled()

"""Requests that wait in the queue: for a model that is being pulled, and for room."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.dispatch.parts.assignment import MAX_NODES_IN_A_ROW
from router.dispatch.request import PULL
from router.dispatch.request_state import RequestState
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.support.cluster.manual_pool import A, B, Cluster, full, roomy, turn
from wire.refusals import RefusalCode, Refused
from wire.units import GIB

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


async def test_a_late_sweep_does_not_end_a_wait_for_a_pull(pulling: PullingCluster) -> None:
    request = pulling.submit()
    pulling.now += 35.0
    pulling.dispatcher.sweep()
    assert (request.outcome, request.deadline) == (None, pulling.now + 10.0)
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


async def test_the_placement_of_a_queued_request_is_recorded_when_it_starts(two: Cluster) -> None:
    full(two, A, B)
    request = two.submit()
    roomy(two, B)
    await turn()
    assert request.node == B
    decisions = two.dispatcher.history.find_decisions(request.spec.request_id)
    assert [decision.chosen for decision in decisions] == [None, B]
    two.finish()


async def test_a_hold_is_on_the_node_that_lacks_the_fewest_bytes(two: Cluster) -> None:
    two.memory = {A: a_memory(GIB // 4), B: a_memory(GIB // 8)}
    two.report()
    large = two.submit(prompt_tokens=4000)
    for room in (8, 16):
        two.now += 6.0
        two.memory[B] = a_memory(GIB // room)
        two.report()
        await turn()
        assert two.dispatcher.ledger.find_hold_node(large.number) == A
    two.dispatcher.close(large)


async def test_a_hold_moves_from_a_node_that_is_lost_to_a_ready_one(two: Cluster) -> None:
    two.memory = {A: a_memory(GIB // 4), B: a_memory(GIB // 8)}
    two.report()
    large = two.submit(prompt_tokens=4000)
    two.now += 6.0
    two.report()
    await turn()
    assert two.dispatcher.ledger.find_hold_node(large.number) == A
    two.state[A] = "lost"
    two.report()
    await turn()
    assert two.dispatcher.ledger.find_hold_node(large.number) == B
    two.dispatcher.close(large)


async def test_a_request_that_lost_its_node_gets_a_hold_as_soon_as_one_is_possible(two: Cluster) -> None:
    two.state[B] = "lost"
    two.report()
    request = two.submit()
    two.speak()
    two.state[A] = "lost"
    two.report()
    two.dispatcher.handle_lost_node(A, "cable")
    assert (request.state, two.dispatcher.ledger.find_hold_node(request.number)) == (RequestState.QUEUED, None)
    two.state[B] = "ready"
    full(two, B)
    await turn()
    assert two.dispatcher.ledger.find_hold_node(request.number) == B, "at once, and not after five seconds"
    two.dispatcher.close(request)


async def test_a_full_node_that_refused_a_request_gets_it_again_after_its_next_report() -> None:
    cluster = Cluster(A, B)
    held = [cluster.submit() for _ in range(8)]
    full(cluster, A, B)
    request = cluster.submit(key="other")
    first = request.node
    assert first is not None
    cluster.refuse()
    second = request.node
    assert {first, second} == {A, B}
    cluster.report(first)
    cluster.refuse()
    assert request.node == first
    cluster.refuse()
    assert request.state is RequestState.QUEUED, "both have refused, and none has reported since"
    for one in (*held, request):
        cluster.dispatcher.close(one)
    cluster.settled()


async def test_a_retry_without_room_is_not_recorded_as_a_decision(two: Cluster) -> None:
    full(two, A, B)
    request = two.submit()
    for _ in range(3):
        full(two, A, B)
        await turn()
    assert request.state is RequestState.QUEUED
    assert len(two.dispatcher.history.find_decisions(request.spec.request_id)) == 1
    two.dispatcher.close(request)

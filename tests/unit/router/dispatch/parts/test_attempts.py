"""Attempts of requests on nodes."""

import dataclasses
import struct

import pytest
from msgspec.structs import replace

from router.dispatch.circuit_breaker import MAX_FAULTS, MIN_OPEN_SECONDS, SAME_FAULT_SECONDS
from router.dispatch.parts.assignment import MAX_NODES_IN_A_ROW
from router.dispatch.request import EmbeddingInput, RequestFailure, RequestSpec
from router.dispatch.request_state import RequestState
from router.placement.candidate import ResourceDemand
from router.placement.cluster_view import ClusterView
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.support.cluster.manual_pool import A, B, Cluster, roomy, turn
from wire.capacity.fairness import WeightedKey
from wire.frames import Embed, Failed, Finished, GenerationParams, Message, Vectors
from wire.identity import NodeId
from wire.models.kind import ModelKind
from wire.refusals import FailureCode
from wire.units import GIB


async def test_requests_on_other_nodes_are_untouched_by_a_loss(two: Cluster) -> None:
    first, second = two.submit(), two.submit()
    assert {first.node, second.node} == {A, B}
    assert second.node is not None
    two.dispatcher.handle_lost_node(second.node, "cable")
    assert (first.attempts, second.attempts) == (1, 2)
    assert first.node == second.node
    two.dispatcher.close(first)
    two.finish()


@pytest.mark.parametrize("drained", [False, True])
async def test_vectors_of_a_lost_attempt_do_not_complete_the_next(two: Cluster, drained: bool) -> None:
    two.models = (a_model(features=("embed",)),)
    two.report()
    demand = ResourceDemand("tiny", 10, kind=ModelKind.EMBED)
    embed = EmbeddingInput(("one", "two"))
    request = two.dispatcher.submit(RequestSpec(demand, "k", "r", (), GenerationParams(), 0, False, embed=embed))

    def answer(place: int) -> None:
        node, frame = two.sent[-1]
        assert isinstance(frame, Embed)
        two.dispatcher.receive(node, Vectors(frame.request, (place,), struct.pack("<f", 1)))

    answer(0)
    first, _ = two.sent[-1]
    if drained:
        assert two.dispatcher.migrate_node(first) == 0
        two.sent = [(node, frame) for node, frame in two.sent if isinstance(frame, Embed)]
    else:
        two.dispatcher.handle_lost_node(first, "cable")
    answer(1)
    node, frame = two.sent[-1]
    assert isinstance(frame, Embed)
    two.dispatcher.receive(node, Finished(frame.request, (), 2, 0))
    assert isinstance(request.outcome, RequestFailure)
    assert "did not send a valid vector for each text" in request.outcome.message


async def test_vectors_are_kept_when_a_move_finds_no_link(two: Cluster) -> None:
    two.models = (a_model(features=("embed",)),)
    two.report()
    demand = ResourceDemand("tiny", 10, kind=ModelKind.EMBED)
    embed = EmbeddingInput(("one", "two"))
    request = two.dispatcher.submit(RequestSpec(demand, "k", "r", (), GenerationParams(), 0, False, embed=embed))
    node, frame = two.sent[-1]
    assert isinstance(frame, Embed)
    two.dispatcher.receive(node, Vectors(frame.request, (0,), struct.pack("<f", 1)))
    two.cut.add(B if node == A else A)
    assert two.dispatcher.migrate_node(node) == 1
    two.dispatcher.receive(node, Vectors(frame.request, (1,), struct.pack("<f", 1)))
    two.dispatcher.receive(node, Finished(frame.request, (), 2, 0))
    assert isinstance(request.outcome, Finished)


async def test_a_node_without_a_link_is_a_step_and_the_next_node_is_tried(two: Cluster) -> None:
    two.submit()
    cut, _ = two.last()
    two.finish()
    two.cut = {cut}
    request = two.submit()
    assert request.node not in (None, cut)
    assert [(what, node) for _, what, node in request.steps] == [
        ("sent", f"node-{cut}"),
        ("no link", f"node-{cut}"),
        ("sent", f"node-{request.node}"),
    ]
    two.finish()


async def test_a_request_that_all_nodes_refused_is_queued_and_sent_after_a_report() -> None:
    cluster = Cluster(*map(NodeId, "abcdef"[:MAX_NODES_IN_A_ROW]))
    request = cluster.submit()
    for _ in range(MAX_NODES_IN_A_ROW):
        assert request.state is RequestState.SENT
        cluster.refuse()
    assert request.state is RequestState.QUEUED
    assert len({node for node, _ in cluster.generates()}) == MAX_NODES_IN_A_ROW
    roomy(cluster, A)
    await turn()
    assert request.node == A
    cluster.finish()
    cluster.dispatcher.shutdown()
    cluster.settled()


async def test_a_cancelled_probe_lets_the_next_request_probe_the_node(one: Cluster) -> None:
    for _ in range(MAX_FAULTS):
        one.submit()
        one.say(lambda number: Failed(number, FailureCode.ENGINE_ERROR, "broken"))
        one.now += 2 * SAME_FAULT_SECONDS
        one.report()
    one.now += MIN_OPEN_SECONDS
    one.report()
    probe, other = one.submit(), one.submit()
    assert (probe.node, other.node) == (A, None)
    one.dispatcher.close(probe)
    await turn()
    assert other.node == A
    one.finish()


async def test_a_shared_system_prompt_is_marked_for_the_engine() -> None:
    cluster = Cluster(A, prompts=("be brief",))
    chat = RequestSpec(ResourceDemand("tiny", 100), "k", "r", (), GenerationParams(), 0, stream=True)
    for text, shared in (("be brief", True), ("be long", False)):
        messages = (Message("system", text), Message("user", "hi"))
        cluster.dispatcher.submit(replace(chat, messages=messages))
        assert cluster.generates()[-1][1].shared is shared
        cluster.finish()
    cluster.dispatcher.shutdown()


async def test_weights_that_were_not_reserved_are_not_released(one: Cluster) -> None:
    one.models = (a_model(weights=8 * GIB, loaded=False), a_model("idle", weights=8 * GIB))
    one.memory[A] = a_memory(GIB)
    one.report()
    request = one.submit()
    assert request.node == A, "only the node can tell whether it can unload the idle model"
    assert one.dispatcher.ledger.get_unacknowledged_bytes(A) == 0
    one.models = (a_model(weights=8 * GIB, loaded=False, loading=True), a_model("idle", loaded=False))
    one.report()
    assert one.dispatcher.ledger.get_unacknowledged_bytes(A) == 0
    one.finish()


@pytest.mark.parametrize("stream", [True, False])
async def test_the_engine_learns_whether_the_answer_is_streamed(one: Cluster, stream: bool) -> None:
    one.submit(stream=stream)
    assert one.generates()[-1][1].stream is stream
    one.finish()


async def test_a_request_for_vectors_has_all_parts_of_its_input(one: Cluster) -> None:
    one.models = (a_model(features=("embed",)),)
    one.report()
    embed = EmbeddingInput(("one", "two"), ((7,), (8,)), 8, truncate=True, prompt="query", query="why", max_tokens=5)
    demand = ResourceDemand("tiny", 10, kind=ModelKind.EMBED)
    request = one.dispatcher.submit(RequestSpec(demand, "k", "r", (), GenerationParams(), 0, False, embed=embed))
    assert one.sent[-1] == (
        A,
        Embed(
            request=request.attempt,
            seq=1,
            request_id="r",
            model="tiny",
            texts=embed.texts,
            ids=embed.ids,
            dimensions=8,
            truncate=True,
            prompt="query",
            weighted_key=WeightedKey("k", 4),
            query="why",
            max_tokens=5,
            cache_scope="",
        ),
    )
    one.dispatcher.close(request)


async def test_weights_are_released_when_the_node_of_the_request_loads_its_model(two: Cluster) -> None:
    two.models = tuple(a_model(name, weights=2 * GIB, loaded=False) for name in ("tiny", "other"))
    two.report()
    request = two.submit()
    here = request.node
    assert here is not None
    there = B if here == A else A
    need = two.dispatcher.ledger.get_unacknowledged_bytes(here)

    def load(where: NodeId, name: str) -> None:
        """Report that one node loads one model."""
        nodes = [
            dataclasses.replace(
                node,
                models=dict(node.models)
                | ({name: a_model(name, loaded=False, loading=True)} if node.id == where else {}),
            )
            for node in map(two.seen, two.nodes)
        ]
        two.dispatcher.set_view(ClusterView(tuple(nodes)))

    for where, name, left in ((there, "tiny", need), (here, "other", need), (here, "tiny", need - 2 * GIB)):
        load(where, name)
        assert two.dispatcher.ledger.get_unacknowledged_bytes(here) == left
    two.finish()

"""Placement decisions over the newest view, with pulls and corrections."""

import dataclasses

import pytest

from router.dispatch.request import PULL
from router.dispatch.request_state import RequestState
from router.placement.candidate import Placement, ResourceDemand
from router.placement.cluster_view import ClusterView
from router.placement.model_load import LoadPlacement
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.support.cluster.manual_pool import A, B, Cluster, full
from wire.identity import NodeId
from wire.refusals import RefusalCode, Refused
from wire.units import GIB

PULLED = Refused(RefusalCode.NOT_READY, "it is being pulled", None)


async def test_a_model_that_a_node_has_is_not_waited_for_although_another_node_pulls_it(one: Cluster) -> None:
    one.dispatcher.placer.watch_pulls(lambda _: PULLED)
    full(one, A)
    request = one.submit()
    assert (request.state, request.answer.waits_for) == (RequestState.QUEUED, "")
    one.now += one.settings.queue_timeout_seconds + 1
    one.report()
    one.dispatcher.sweep()
    assert isinstance(request.outcome, Refused)
    one.models = ()
    one.report()
    waiting = one.submit()
    assert (waiting.state, waiting.answer.waits_for) == (RequestState.QUEUED, PULL)
    one.dispatcher.placer.watch_pulls(lambda _: None)
    assert one.dispatcher.placer.find_pull("tiny") is None
    one.dispatcher.close(waiting)


async def test_the_time_of_a_report_is_that_of_its_node(two: Cluster) -> None:
    two.now += 5.0
    two.report(B)
    view = {node.id: node for node in two.dispatcher.view.nodes}
    times = [two.dispatcher.placer.get_report_time(node) for node in (A, B, NodeId("unknown"))]
    assert times == [view[A].reported_at, view[B].reported_at, -1.0]
    assert times[0] < times[1]


@pytest.mark.parametrize("policy", ["balanced", "most_headroom"])
async def test_previews_and_loads_follow_the_policy_and_the_refusals_of_a_load(policy: str) -> None:
    cluster = Cluster(A, B, policy=policy)
    cluster.memory[B] = a_memory(16 * GIB)
    cluster.report()
    slow = {A: 1.0, B: 90.0}
    nodes = (
        dataclasses.replace(node, models={"tiny": a_model(loaded=False, load_seconds=slow[node.id])})
        for node in cluster.dispatcher.view.nodes
    )
    cluster.dispatcher.set_view(ClusterView(tuple(nodes)))
    chosen, other = (A, B) if policy == "balanced" else (B, A)
    placer = cluster.dispatcher.placer
    preview = placer.preview(ResourceDemand("tiny", 100))
    assert isinstance(preview, Placement)
    assert preview.chosen.node == chosen
    for tried, node in (({}, chosen), ({chosen: Refused(RefusalCode.NO_ROOM, "no")}, other)):
        load = placer.choose_load_node("tiny", tried)
        assert isinstance(load, LoadPlacement)
        assert (load.node, load.loaded) == (node, False)

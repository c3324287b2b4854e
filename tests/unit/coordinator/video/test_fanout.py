"""The fan-out of the registry's callbacks to the dispatcher and to the real controllers of videos and pulls."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator.models.pull_controller import MODEL_ORDER_FRAMES
from coordinator.video.controller import LEASE_FRAMES
from coordinator.video.fanout import ListenerFanout
from router.placement.cluster_view import ClusterView
from tests.unit.coordinator.models.test_pull_controller import MANIFEST, A, Pool
from tests.unit.coordinator.video.state.test_lease_placement import a_node
from tests.unit.coordinator.video.test_controller import NODE, Cluster
from wire.frames import Finished, Frame, LeaseGranted, LeaseRequest, PullModel, VerifyModel
from wire.identity import NodeId


class Dispatcher:
    """A listener that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.receivers: Mapping[type[Frame], Callable[[NodeId, Any], None]] = {Finished: self.receive}

    def receive(self, node: NodeId, frame: Frame) -> None:
        self.calls.append((node, frame))

    def set_view(self, view: ClusterView) -> None:
        self.calls.append((view,))

    def handle_lost_node(self, node: NodeId, reason: str) -> None:
        self.calls.append((node, reason))

    def remove_node(self, node: NodeId) -> None:
        self.calls.append((node,))


class Listeners:
    """A fan-out with its three listeners. `wakes` is the number of calls of `on_view`."""

    def __init__(self, folder: Path) -> None:
        self.dispatcher, self.videos, self.pulls, self.wakes = Dispatcher(), Cluster(folder), Pool(folder), 0
        self.fanout = ListenerFanout(self.dispatcher, self.videos.controller, self.pulls.controller, self.wake)

    def wake(self) -> None:
        self.wakes += 1


@pytest.fixture
async def listeners(tmp_path: Path) -> AsyncIterator[Listeners]:
    made = Listeners(tmp_path)
    yield made
    made.pulls.controller.close()
    await made.videos.controller.close()


async def test_each_frame_has_the_receiver_of_its_kind(listeners: Listeners):
    receivers = listeners.fanout.receivers
    assert receivers.keys() == {Finished, *LEASE_FRAMES, *MODEL_ORDER_FRAMES}
    frame = Finished(1, (), 0, 0)
    receivers[Finished](NODE, frame)
    assert listeners.dispatcher.calls == [(NODE, frame)]
    assert {receivers[kind] for kind in LEASE_FRAMES} == {listeners.videos.controller.handle_frame}
    assert {receivers[kind] for kind in MODEL_ORDER_FRAMES} == {listeners.pulls.controller.handle_frame}


async def test_a_view_reaches_all_listeners(listeners: Listeners):
    listeners.pulls.controller.start_pull(MANIFEST, (A,), "key")
    listeners.pulls.take()
    for number, node in enumerate((a_node(A, state="lost"), a_node(A, epoch=2)), 1):
        view = ClusterView((node,))
        listeners.fanout.set_view(view)
        assert listeners.dispatcher.calls[-1] == (view,)
        assert listeners.videos.controller.view is view
        assert listeners.wakes == number
    assert [type(frame) for _, frame in listeners.pulls.take()] == [PullModel], "the order is sent on the new link"


async def test_a_lost_and_a_removed_node_concern_all_listeners(listeners: Listeners):
    job = await listeners.videos.submit()
    lease = listeners.videos.frames[-1]
    assert isinstance(lease, LeaseRequest)
    listeners.videos.controller.handle_frame(NODE, LeaseGranted(lease.lease, lease.generation))
    pull = listeners.pulls.controller.start_pull(MANIFEST, (A,), "key")
    verifying = asyncio.create_task(listeners.pulls.controller.orders.run(VerifyModel, A, "model"))
    await asyncio.sleep(0)
    listeners.fanout.handle_lost_node(A, "its link has ended")
    assert listeners.dispatcher.calls == [(A, "its link has ended")]
    assert listeners.videos.find(job).away
    assert "the link to the node was lost" in (await asyncio.wait_for(verifying, 5)).message
    listeners.fanout.remove_node(A)
    assert listeners.dispatcher.calls[-1] == (A,)
    assert listeners.videos.find(job).node == ""
    assert listeners.pulls.controller.pulls[pull.id].ended is not None

"""Orders about model files whose end is awaited: their limit, and nodes that are lost."""

import asyncio
import itertools

from coordinator.models.model_orders import MAX_OPEN_ORDERS, ModelOrders
from wire.frames import Frame, ModelOrderCode, ModelOrderEnded, ModelOrderPhase, ModelOrderProgress, VerifyModel
from wire.identity import NodeId

A, B = NodeId("a"), NodeId("b")


class Orders:
    """Orders to linked nodes, and the frames that were sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[NodeId, Frame]] = []
        counter = itertools.count(1)
        self.orders = ModelOrders(self.send, lambda: next(counter))

    def send(self, node: NodeId, frame: Frame) -> bool:
        self.sent.append((node, frame))
        return True

    async def start(self, node: NodeId) -> "asyncio.Task[ModelOrderEnded]":
        """Start a verification and return once its frame is sent."""
        task = asyncio.create_task(self.orders.run(VerifyModel, node, "pub/model"))
        await asyncio.sleep(0)
        return task


async def test_the_number_of_open_orders_is_bounded_and_an_end_makes_room() -> None:
    one = Orders()
    tasks = [await one.start(A) for _ in range(MAX_OPEN_ORDERS)]
    assert len(one.sent) == MAX_OPEN_ORDERS
    refused = await one.orders.run(VerifyModel, A, "pub/model")
    assert (refused.code, len(one.sent)) == (ModelOrderCode.RATE_LIMITED, MAX_OPEN_ORDERS)
    assert "64 orders about model files are open" in refused.message
    one.orders.handle_frame(A, ModelOrderEnded(1, ModelOrderCode.COMPLETED))
    assert (await tasks[0]).code == ModelOrderCode.COMPLETED
    tasks.append(await one.start(A))
    assert one.sent[-1] == (A, VerifyModel(MAX_OPEN_ORDERS + 2, "pub/model"))
    one.orders.handle_lost_node(A)
    assert {ended.code for ended in await asyncio.gather(*tasks[1:])} == {ModelOrderCode.FAILED}


async def test_a_lost_node_ends_its_own_orders_only() -> None:
    one = Orders()
    lost, other = await one.start(A), await one.start(B)
    one.orders.handle_lost_node(A)
    assert "the link to the node was lost" in (await lost).message
    assert not other.done()
    one.orders.handle_frame(B, ModelOrderEnded(2, ModelOrderCode.COMPLETED, freed=7))
    assert (await other).freed == 7


async def test_an_order_that_ended_is_not_ended_again_by_a_lost_link_or_a_late_frame() -> None:
    one = Orders()
    task = await one.start(A)
    one.orders.handle_frame(A, ModelOrderEnded(1, ModelOrderCode.COMPLETED, freed=7))
    one.orders.handle_frame(A, ModelOrderEnded(1, ModelOrderCode.FAILED))
    one.orders.handle_lost_node(A)
    assert (await task).freed == 7


async def test_progress_does_not_end_an_order() -> None:
    one = Orders()
    task = await one.start(A)
    one.orders.handle_frame(A, ModelOrderProgress(1, ModelOrderPhase.VERIFYING))
    await asyncio.sleep(0)
    assert not task.done()
    one.orders.handle_frame(A, ModelOrderEnded(1, ModelOrderCode.CONTENT_MISMATCH, "model.safetensors differs"))
    assert (await task).message == "model.safetensors differs"


async def test_only_the_node_of_an_order_ends_it() -> None:
    one = Orders()
    task = await one.start(A)
    one.orders.handle_frame(B, ModelOrderEnded(1, ModelOrderCode.FAILED))
    one.orders.handle_frame(A, ModelOrderEnded(1, ModelOrderCode.COMPLETED))
    assert (await task).code == ModelOrderCode.COMPLETED

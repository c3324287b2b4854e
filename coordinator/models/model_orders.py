"""Orders about model files whose result is awaited: verify or remove a model on a node."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from wire.frames import Frame, ModelOrderCode, ModelOrderEnded, ModelOrderProgress, RemoveModel, VerifyModel
from wire.identity import NodeId

ORDER_TIMEOUT_SECONDS = 6 * 3600.0
"""Maximum wait for the end of an order, in seconds: enough to verify a terabyte on a slow disk.

After that, the order continues on the node.
"""
MAX_OPEN_ORDERS = 64


@dataclass(slots=True)
class _OpenOrder:
    node: NodeId
    ended: asyncio.Future[ModelOrderEnded]


class ModelOrders:
    """Orders to nodes whose result is awaited.

    `send` sends a frame to a node and returns False if the node is not linked. `number` returns the number of the next
    order.
    """

    def __init__(self, send: Callable[[NodeId, Frame], bool], number: Callable[[], int]) -> None:
        self._send = send
        self._number = number
        self._open: dict[int, _OpenOrder] = {}

    async def run(self, kind: type[VerifyModel] | type[RemoveModel], node: NodeId, model: str) -> ModelOrderEnded:
        """Send an order about a model to a node, wait for its end, and return the end.

        If `MAX_OPEN_ORDERS` are open, the end has the code `rate_limited`. If the node is not linked or its link is
        lost, or after `ORDER_TIMEOUT_SECONDS`, it has the code `failed`. After a timeout or a cancellation of this
        call, the node continues the order.
        """
        order = self._number()
        if len(self._open) >= MAX_OPEN_ORDERS:
            text = f"{MAX_OPEN_ORDERS} orders about model files are open, which is the limit: wait for one to end"
            return ModelOrderEnded(order, ModelOrderCode.RATE_LIMITED, text)
        if not self._send(node, kind(order, model)):
            return ModelOrderEnded(order, ModelOrderCode.FAILED, "the node is not linked: try again when it is back")
        opened = self._open[order] = _OpenOrder(node, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(ORDER_TIMEOUT_SECONDS):
                return await opened.ended
        except TimeoutError:
            text = f"the order did not end within {ORDER_TIMEOUT_SECONDS / 3600:.0f} hours"
            return ModelOrderEnded(order, ModelOrderCode.FAILED, text)
        finally:
            del self._open[order]

    def handle_frame(self, node: NodeId, frame: ModelOrderProgress | ModelOrderEnded) -> None:
        """End the order that a node reports as ended. Ignore progress, and frames about unknown orders."""
        opened = self._open.get(frame.order)
        if opened is None or opened.node != node or opened.ended.done():
            return
        if isinstance(frame, ModelOrderEnded):
            opened.ended.set_result(frame)

    def handle_lost_node(self, node: NodeId) -> None:
        """End the orders of a node whose link is lost, with the code `failed`."""
        for order, opened in list(self._open.items()):
            if opened.node == node and not opened.ended.done():
                text = "the link to the node was lost: the order may have been performed, look at `cluster models`"
                opened.ended.set_result(ModelOrderEnded(order, ModelOrderCode.FAILED, text))

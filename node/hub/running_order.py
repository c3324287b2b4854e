"""Track an order about model files that is in progress on this node: its numbers, its task and its process."""

import asyncio
from collections.abc import Coroutine

from node.hub.child_messages import ChildEnd, build_end
from node.hub.order_child import OrderChild
from wire.frames.model_files import ModelOrderCode


class RunningOrder:
    """Order in progress. A pull or quantization can have the numbers of several orders for the same result.

    `key` is the model whose files the order changes or reads. `commit` is the commit that a pull downloads; empty for
    other orders. `from_mirror` is whether a pull can use a mirror or relay. `result` has name and bits of the model
    that a quantization creates; None for other orders.
    """

    def __init__(
        self,
        number: int,
        key: str,
        commit: str = "",
        *,
        from_mirror: bool = False,
        result: tuple[str, int] | None = None,
    ) -> None:
        self.numbers = {number}
        self.key = key
        self.commit = commit
        self.from_mirror = from_mirror
        self.cancelled = False
        """Whether the order was cancelled and has not ended yet."""
        self.result = result
        self._child: OrderChild | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Start the task that performs the order."""
        self._task = asyncio.get_running_loop().create_task(work)

    async def run_child(self, child: OrderChild) -> ChildEnd:
        """Run the process of the order, and return its end (`OrderChild.run`).

        If the order was cancelled before, return the end `cancelled` without starting the process.
        """
        if self.cancelled:
            return build_end(ModelOrderCode.CANCELLED)
        self._child = child
        return await child.run()

    def cancel(self) -> None:
        """Cancel the order: end its process (`OrderChild.cancel`), or prevent its start. Do not wait for the end.

        A removal has no process and continues.
        """
        self.cancelled = True
        if self._child is not None:
            self._child.cancel()

    async def wait_end(self) -> None:
        """Wait for the end of the order, without a time limit. A cancellation of this call does not end the order."""
        if self._task is not None:
            await asyncio.wait((self._task,))

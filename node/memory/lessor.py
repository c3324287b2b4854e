"""Lease memory to a process other than the engine: lower the ceiling, and wait until the engine has confirmed it.

A node has one lease at a time. `lower_ceiling` refuses a lease while another kind of process (`LeaseHolder`) has one;
the caller ensures that its own kind has none. The caller first checks that the memory fits. It calls `return_memory`
after a failed `lower_ceiling`, and after the process that used the lease has ended.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from node.engine_process.supervisor import Supervisor
from node.memory.limits import LeaseHolder, Limiter
from node.memory.poll import MemoryPoll
from wire.capacity.arithmetic import judge
from wire.refusals import Refused
from wire.units import show_size

CONFIRM_TIMEOUT_SECONDS = 5.0
"""Timeout in seconds of the engine's confirmation that lower limits are in force, or that an order was executed."""


class LeaseObstacle(StrEnum):
    """Reason why the ceiling is not lowered for a lease."""

    HELD = "other lease"
    """A process of another kind holds a lease."""
    ENGINE_SILENT = "no confirmation"
    """The engine did not confirm the lower limits."""
    NEW_REQUESTS = "new requests"
    """New requests used the memory before the lower limits were in force."""


@dataclass(frozen=True, slots=True)
class LeaseFailure:
    """Failure to lower the ceiling for a lease."""

    obstacle: LeaseObstacle
    """Reason of the failure."""
    message: str
    """Reason as a sentence for people."""
    refused: Refused | None = None
    """Refusal with the memory numbers, for the obstacle `NEW_REQUESTS`; None for other obstacles."""


class MemoryLessor:
    """Lessor of memory to processes of the kind `holder`. A lease lowers the ceiling of the engine.

    Call every method on the event loop of the memory poll.
    """

    def __init__(self, limiter: Limiter, poll: MemoryPoll, supervisor: Supervisor, holder: LeaseHolder) -> None:
        self._limiter = limiter
        self._poll = poll
        self._supervisor = supervisor
        self._holder = holder
        self._changed = asyncio.Event()

    @property
    def holding(self) -> bool:
        """Whether memory is leased to a process of this kind."""
        return self._limiter.holder is self._holder

    def on_engine_change(self) -> None:
        """Handle a new report of the engine: waiting calls check their conditions again."""
        self._changed.set()

    def find_other_holder(self) -> str:
        """Return a sentence about a lease of another kind of process; empty without one."""
        if self._limiter.holder is None or self.holding:
            return ""
        leased = show_size(self._limiter.leases)
        return f"this node has leased {leased} to {self._limiter.holder}: one lease at a time"

    async def make_room(self, size: int) -> None:
        """Order the engine to make room for `size` bytes, and wait for its confirmation.

        The engine frees buffers, cached prefixes and idle models, and aborts a load for which no request waits. If all
        of these together would not suffice, the engine frees only MLX's free buffers. Return after the confirmation of
        the engine, at the latest after `CONFIRM_TIMEOUT_SECONDS`, even if the engine freed less than `size` bytes.
        """
        number = self._supervisor.orders.free_memory(size)
        await self._wait_until(lambda: self._supervisor.reports.freed_order >= number)

    async def lower_ceiling(self, size: int) -> LeaseFailure | None:
        """Lower the ceiling by `size` bytes, and wait until the engine has confirmed it. Return None on success.

        Return a failure if a process of another kind has a lease, or if new requests used the memory meanwhile. Return
        a failure as well if the engine does not confirm within `CONFIRM_TIMEOUT_SECONDS`. After a failure other than
        `HELD`, and after a cancellation of this call, the ceiling stays lowered until `return_memory`.
        """
        other = self.find_other_holder()
        if other:
            return LeaseFailure(LeaseObstacle.HELD, other)
        self._limiter.begin_lease(size, self._holder)
        self._poll.poll_once()
        number = self._supervisor.orders.limits_number
        await self._wait_until(lambda: self._supervisor.reports.limits_number >= number)
        if self._supervisor.reports.limits_number < number:
            text = f"the engine did not confirm the lower ceiling within {CONFIRM_TIMEOUT_SECONDS:.0f} s"
            return LeaseFailure(LeaseObstacle.ENGINE_SILENT, text)
        after = judge(self._poll.read_memory(), 0)
        if isinstance(after, Refused):
            text = "requests arrived while the ceiling was lowered"
            return LeaseFailure(LeaseObstacle.NEW_REQUESTS, text, after)
        return None

    def return_memory(self) -> None:
        """End the lease and restore the ceiling at once. Do nothing if this kind of process has no lease."""
        if self.holding:
            self._limiter.end_lease()
            self._poll.poll_once()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait at most `CONFIRM_TIMEOUT_SECONDS` for the engine to meet a condition."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM_TIMEOUT_SECONDS):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

"""Send the agent's orders about the engine's memory, and store the reports that confirm these orders."""

from collections.abc import Callable

from msgspec.structs import replace

from wire.codec import encode
from wire.frames import EngineReport, MemoryLimits, ReclaimMemory, ReduceMemory


class EngineReports:
    """Store of the latest report of the current child, with its time of arrival."""

    def __init__(self) -> None:
        self._latest: EngineReport | None = None
        self._received_at: float | None = None

    @property
    def latest(self) -> EngineReport | None:
        """Latest report of the current child; None before its first report."""
        return self._latest

    @property
    def received_at(self) -> float | None:
        """Monotonic time in seconds at which `latest` arrived; None before the first report of the current child."""
        return self._received_at

    @property
    def limits_number(self) -> int:
        """Sequence number of the limits that the engine reports to be in force; 0 before its first report."""
        return 0 if self._latest is None else self._latest.limits_number

    @property
    def freed_order(self) -> int:
        """Number of the last `free_memory` order that the current child reports as done; 0 before the first."""
        return 0 if self._latest is None else self._latest.freed_order

    def has_model_in_memory(self, name: str) -> bool:
        """Return whether the latest report names a model as loaded, loading or queued for loading."""
        models = self._latest.models if self._latest is not None else ()
        return any(model.name == name and (model.loaded or model.loading) for model in models)

    def store(self, report: EngineReport, now: float) -> None:
        """Store a report that arrived at `now` (monotonic seconds)."""
        self._latest, self._received_at = report, now

    def clear(self) -> None:
        """Delete the report of a child that has ended."""
        self._latest, self._received_at = None, None


class EngineOrders:
    """Orders to the engine. `write` sends an encoded frame to the current child, or discards it if no child runs."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._limits: MemoryLimits | None = None
        self._limits_number = self._free_orders = 0

    @property
    def limits_number(self) -> int:
        """Sequence number of the limits that were set last (`set_limits`); 0 before the first."""
        return self._limits_number

    def set_limits(self, limits: MemoryLimits) -> int:
        """Send limits to the current child and to all later children. Return their sequence number.

        The limits are in force once `EngineReports.limits_number` has reached that number.
        """
        self._limits_number += 1
        self._limits = replace(limits, number=self._limits_number)
        self.resend_limits()
        return self._limits_number

    def resend_limits(self) -> None:
        """Send the last limits to the current child. Do nothing before the first limits."""
        if self._limits is not None:
            self._write(encode(self._limits))

    def reduce_memory(self, order: ReduceMemory) -> None:
        """Send the engine an order to reduce its memory. Do nothing without an engine."""
        self._write(encode(order))

    def free_memory(self, size: int) -> int:
        """Ask the current child to free reclaimable memory until `size` bytes fit. Do nothing without a child.

        Return the sequence number of the order. `EngineReports.freed_order` reaches this number once the order is
        done. If the child ends earlier, `freed_order` never reaches it.
        """
        self._free_orders += 1
        self._write(encode(ReclaimMemory(self._free_orders, size)))
        return self._free_orders

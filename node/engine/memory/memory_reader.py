"""Reader of the engine's memory: the footprint with the limits in force and the reserved bytes."""

import time
from collections.abc import Callable

from node.engine.memory.footprint import EngineMemory
from node.engine.memory.gate import MemoryGate
from node.engine.memory.trailing import TRAILING_SECONDS
from wire.report import Memory


class MemoryReader:
    """Reader of the memory that the gate judges. `reserved()` returns the bytes that are committed and not yet
    in use."""

    def __init__(self, footprint: EngineMemory, gate: MemoryGate, reserved: Callable[[], int]) -> None:
        self.gate = gate
        self._footprint = footprint
        self._reserved = reserved

    def read(self, now: float) -> Memory:
        """Read the memory now, count it in the recent peak, and return it with the limits in force.

        `now` is the monotonic time. `phys`, `current` and `headroom` are None without a live reading of the footprint.
        """
        return self._footprint.read_memory(self.gate, self._reserved(), now)

    def read_now(self) -> Memory:
        """Read the memory now, count it in the recent peak, and return it with the limits in force, as `read` does."""
        return self.read(time.monotonic())

    def read_settled(self) -> Memory:
        """Read the memory without bytes that MLX has freed and that are still in the footprint
        (`EngineMemory.read_memory`). Use this to decide whether to free more, never whether work fits."""
        return self._footprint.read_memory(self.gate, self._reserved(), time.monotonic(), settled=True)

    def wait_until_settled(self, seconds: float = TRAILING_SECONDS) -> None:
        """Block for up to `seconds` until the footprint no longer contains freed memory."""
        self._footprint.wait_until_settled(seconds)

    def find_peak_expiry(self, now: float) -> float | None:
        """Return the monotonic time at which the memory in use may fall without further work; None if none is known
        (`EngineMemory.find_peak_expiry`). `now` is the monotonic time."""
        return self._footprint.find_peak_expiry(now)

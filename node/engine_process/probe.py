"""Read footprint, high-water marks and the running native call of the current engine process."""

import time
from collections.abc import Callable

from node.engine_process.child import EngineChild
from node.engine_process.timeouts import SupervisorTimeouts
from node.memory.reading import HighWaterMarks, MemoryReading


class EngineProbe:
    """Reader of the current child's state. `child()` returns the current child; None while no child runs."""

    def __init__(self, child: Callable[[], EngineChild | None], timeouts: SupervisorTimeouts) -> None:
        self._child = child
        self._timeouts = timeouts

    @property
    def call_until(self) -> float:
        """Monotonic time in seconds until which the native call in progress may run.

        A call may take `SupervisorTimeouts.turn_factor` times its expected duration. The value is computed from the
        last pong; 0 if that names no call.
        """
        child = self._child()
        return 0.0 if child is None else child.compute_call_deadline(self._timeouts.turn_factor)

    def read_high_water_marks(self) -> HighWaterMarks:
        """Read the kernel's high-water marks of the child's footprint. Without a child, all values are None."""
        child = self._child()
        return HighWaterMarks() if child is None else child.sensor.read_high_water_marks()

    def read_footprint(self) -> MemoryReading:
        """Read the footprint of the child now. Without a child, the reading has no value."""
        child = self._child()
        return MemoryReading(None, "no engine", time.monotonic()) if child is None else child.sensor.read_footprint()

    def ping(self) -> None:
        """Ping the child now, unless an answer is pending. The answer updates `call_until`.

        Do nothing without a child.
        """
        child = self._child()
        if child is not None:
            child.ping(time.monotonic())

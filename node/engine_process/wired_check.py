"""Check of the system's wired memory after the end of each engine process.

A killed process can leave its memory wired until the Mac restarts (`node.memory.wired_leak`).
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from node.engine_process.timeouts import SupervisorTimeouts
from node.memory.wired_leak import WiredLeaks, WiredReadings
from wire.frames import EngineReport
from wire.units import show_size

MAX_WIRED_LEAKS = 2
"""Number of leaks whose wired memory has not returned, at which no further engine is started.

Each new engine would have less memory than its predecessor, and end the same way. oMLX#2184 logged 233 starts, two
minutes apart.
"""

log = structlog.get_logger("supervise")


class WiredCheck:
    """Checker for wired memory that ended engine processes left behind and that has not returned.

    `read_wired()` returns the wired bytes of the system, None if they cannot be read. `stopping` is set when the agent
    stops.
    """

    def __init__(
        self, read_wired: Callable[[], int | None], timeouts: SupervisorTimeouts, stopping: asyncio.Event
    ) -> None:
        self._read_wired = read_wired
        self._timeouts = timeouts
        self._stopping = stopping
        self._leaks = WiredLeaks()

    @property
    def leaked_bytes(self) -> int:
        """Wired bytes that ended engines left behind and that have not returned."""
        return self._leaks.missing

    @property
    def warning(self) -> str:
        """Warning with the numbers and the remedy; empty without a leak."""
        return self._leaks.describe_leak()

    @property
    def is_exceeded(self) -> bool:
        """Whether `MAX_WIRED_LEAKS` is reached. No further engine is started then."""
        return self._leaks.count >= MAX_WIRED_LEAKS

    def begin(self) -> WiredReadings:
        """Read the wired memory before the start of an engine."""
        return WiredReadings(self._read_wired())

    def observe(self, wired: WiredReadings) -> None:
        """Read the wired memory during the lifetime of an engine. Leaks whose memory has returned no longer count."""
        now = self._read_wired()
        wired.observe(now)
        self._leaks.update(now)

    async def compare(self, wired: WiredReadings) -> bool:
        """Return whether an ended engine leaked wired memory that has not returned after `settle` seconds.

        `WiredReadings.compute_leaked_bytes` has the thresholds. Return False as soon as the memory has returned or the
        agent stops. Count and log a leak.
        """
        deadline = time.monotonic() + self._timeouts.settle
        while wired.compute_leaked_bytes(after := self._read_wired()) and time.monotonic() < deadline:
            if await self.wait_stopped(self._timeouts.look):
                return False
        missing = self._leaks.add(wired, after)
        if missing:
            log.error("wired memory lost", missing=show_size(missing), leaks=self._leaks.count, warning=self.warning)
        return bool(missing)

    async def wait_returned(self) -> None:
        """Wait until the leaked memory has returned (`is_exceeded` is False), or until the agent stops."""
        while self.is_exceeded and not await self.wait_stopped(self._timeouts.ping_idle):
            self._leaks.update(self._read_wired())

    async def wait_stopped(self, seconds: float) -> bool:
        """Wait `seconds`, or until the agent stops. Return whether the agent stops."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()


def sum_weights(report: EngineReport) -> int:
    """Return the bytes of weights in an engine, including the loaded part of models that are loading."""
    return sum(model.weights if model.loaded else int(model.weights * model.progress) for model in report.models)

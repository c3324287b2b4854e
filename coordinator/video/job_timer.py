"""Timer of the next check of the job table."""

import asyncio
from collections.abc import Callable

TICK_SECONDS = 0.5
"""Seconds between two checks of the job table while a job is open or a node holds a lease."""
IDLE_TICK_SECONDS = 60.0
"""Seconds between two checks while there are only ended jobs and no leases."""


class JobTimer:
    """Timer that calls `tick` once, at the earliest of the scheduled times."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def schedule(self, *, busy: bool) -> None:
        """Schedule a tick after `TICK_SECONDS` if `busy`, else after `IDLE_TICK_SECONDS`.

        `busy` means that a job is open or a node holds a lease. A tick that is already scheduled for an earlier time
        remains.
        """
        due = self._loop.time() + (TICK_SECONDS if busy else IDLE_TICK_SECONDS)
        if self._timer is None or due < self._due:
            self.cancel()
            self._timer, self._due = self._loop.call_at(due, self._run_tick), due

    def cancel(self) -> None:
        """Cancel the scheduled tick, if any."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run_tick(self) -> None:
        self._timer = None
        self._tick()

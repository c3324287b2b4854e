"""Timer for one call, which can be moved forward.

The timer keeps its own due time, because uvloop returns a handle without one for calls that are due at once.
"""

import asyncio
from collections.abc import Callable


class Timer:
    """Timer that calls `ring` on the running loop at the time of the last `set`, once, unless cancelled.

    Times are seconds of the loop's clock.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._handle: asyncio.Handle | None = None
        self._when = 0.0

    def set(self, when: float) -> None:
        """Schedule the call for the time `when`, in place of an earlier schedule."""
        self.cancel()
        self._when = when
        self._handle = asyncio.get_running_loop().call_at(when, self._run_callback)

    def move_forward(self, when: float) -> None:
        """Move the scheduled call to the earlier time `when`. Do nothing if no call is scheduled, or if the call is not
        due later than `when`."""
        if self._handle is not None and when < self._when:
            self.set(when)

    def cancel(self) -> None:
        """Cancel the scheduled call, if there is one."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _run_callback(self) -> None:
        self._handle = None
        self._ring()

"""Timer for one call on the event loop, which can be moved forward.

The timer stores the due time, because uvloop's handle of a call that is due at once has none.
"""

import asyncio
from collections.abc import Callable


class Timer:
    """Timer that calls `ring()` once on the running loop, at the time of the last `set`, unless cancelled.

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
        """Move the scheduled call to the time `when` if that is earlier. Do nothing if no call is scheduled."""
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

"""One call planned ahead, and brought forward when there is a reason.

It keeps its own time, for a handle need not know it: uvloop gives a plain one for what is due at once.
"""

import asyncio
from collections.abc import Callable


class Alarm:
    """Calls `ring` once for each `set`, on the running loop. Times are the loop's, in seconds."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._handle: asyncio.Handle | None = None
        self._when = 0.0

    def set(self, when: float) -> None:
        """Ring at this time and at no other."""
        self.cancel()
        self._when = when
        self._handle = asyncio.get_running_loop().call_at(when, self._rung)

    def sooner(self, when: float) -> None:
        """Ring at this time if it was set for a later one."""
        if self._handle is not None and when < self._when:
            self.set(when)

    def cancel(self) -> None:
        """Do not ring."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _rung(self) -> None:
        self._handle = None
        self._ring()

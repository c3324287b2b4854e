"""Event loop with virtual time: a wait advances the clock at once and takes no real time.

The production code uses the time and the timers of the running loop, and therefore runs unchanged. Timers of the same
moment fire in heap order, which is the same in every run.
"""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class Deadlock(RuntimeError):
    """Raised if no event is scheduled before the end of the simulation. A modelled Mac or the router has a bug."""


class _Leap(selectors.SelectSelector):
    """Selector that reports each wait to the clock instead of waiting. No socket is ever ready."""

    def __init__(self, leap: Callable[[float], None]) -> None:
        super().__init__()
        self._leap = leap

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("no event is scheduled")
        self._leap(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop with a virtual clock, which starts at 0 s and advances to the next timer instead of waiting.

    A run of the loop raises Deadlock if no event is scheduled, and the exception of any callback.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        super().__init__(_Leap(self._forward))

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._seconds

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Raise the exception of a callback, because the results would be wrong. By default, asyncio only logs it."""
        if isinstance(context.get("exception"), Exception):
            raise context["exception"]
        super().call_exception_handler(context)

    def _forward(self, seconds: float) -> None:
        if seconds > 0:
            self._seconds += seconds

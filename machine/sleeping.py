"""Notices that this machine goes to sleep and that it woke, before the fact where the system tells, else after it.

Theory. Two clocks of the system differ by the time that it slept: one goes on meanwhile (Linux CLOCK_BOOTTIME, macOS
CLOCK_MONOTONIC), the other stands still (CLOCK_MONOTONIC; CLOCK_UPTIME_RAW). Their difference is compared at every
look, so a clock on the wall that somebody sets plays no part. That finds a sleep after it. Before it only the system
can tell: macOS does, by IOKit, and waits some seconds for those who asked to be told (`machine.iokit`). A system that
says nothing costs the pool what a pulled cable costs.

`on_sleep` is called on the loop with a callable that must be called when all is said; `on_wake` with the seconds slept,
`on_look` at every look.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Protocol

import structlog

log = structlog.get_logger("machine.sleeping")

LOOK_SECONDS = 2.0
LEAST_SECONDS = 3.0
"""A shorter difference is no sleep that anybody noticed."""

Said = Callable[[], None]
Clocks = tuple[Callable[[], float], Callable[[], float]]
"""A clock that goes on while the machine sleeps, and one that does not; seconds."""


class Notice(Protocol):
    """What tells of a sleep before it comes."""

    def start(self, on_sleep: Callable[[Said], None], on_wake: Callable[[], None]) -> bool:
        """Begin to listen, on a thread of its own; whether this system tells. The callables may be called there."""
        ...

    def stop(self) -> None:
        """Listen no longer."""
        ...


class NoNotice:
    """A system that says nothing: a sleep is seen when it is over."""

    def start(self, on_sleep: Callable[[Said], None], on_wake: Callable[[], None]) -> bool:
        """Say that nothing will come."""
        return False

    def stop(self) -> None:
        """Nothing was begun."""


def open_notice() -> Notice:
    """Give this system's notice of a sleep."""
    if sys.platform == "darwin":
        from machine.iokit import PowerNotice

        return PowerNotice()
    return NoNotice()


def system_clocks() -> Clocks:
    """Give this system's two clocks; the same one twice where there is only one, which finds nothing."""
    on = getattr(time, "CLOCK_BOOTTIME", None)
    off = time.CLOCK_MONOTONIC
    if sys.platform == "darwin":
        on, off = time.CLOCK_MONOTONIC, time.CLOCK_UPTIME_RAW
    if on is None:
        return time.monotonic, time.monotonic
    return lambda: time.clock_gettime(on), lambda: time.clock_gettime(off)


class SleepWatch:
    """Calls its owner on the running loop; see the theory above."""

    def __init__(
        self, on_sleep: Callable[[Said], None], on_wake: Callable[[float], None], *,
        on_look: Callable[[], None] = lambda: None, notice: Notice | None = None, clocks: Clocks | None = None,
    ) -> None:  # fmt: skip
        self._on_sleep = on_sleep
        self._on_wake = on_wake
        self._on_look = on_look
        self._notice = notice or open_notice()
        self._on, self._off = clocks or system_clocks()
        self._ahead = 0.0
        self._told = False
        self._handle: asyncio.TimerHandle | asyncio.Handle | None = None

    def start(self) -> None:
        """Begin to look; needs a running loop."""
        loop = asyncio.get_running_loop()

        def later(call: Callable[..., None], *arguments: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(call, *arguments)

        self._ahead = self._on() - self._off()
        tells = self._notice.start(lambda said: later(self._sleeps, said), lambda: later(self._wakes))
        log.info("sleep watched", told_before=tells)
        self._look()

    def stop(self) -> None:
        """Look no longer."""
        self._notice.stop()
        if self._handle is not None:
            self._handle.cancel()

    def _look(self) -> None:
        """See whether the machine slept, and plan the next look."""
        slept = self._slept()
        if slept >= LEAST_SECONDS:
            self._over(slept)
        self._on_look()
        self._handle = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _slept(self) -> float:
        return self._on() - self._off() - self._ahead

    def _sleeps(self, said: Said) -> None:
        self._told = True
        log.info("goes to sleep")
        self._on_sleep(said)

    def _wakes(self) -> None:
        if self._told:
            self._over(self._slept())

    def _over(self, slept: float) -> None:
        self._ahead, self._told = self._on() - self._off(), False
        log.info("woke", slept=round(slept, 1))
        self._on_wake(slept)

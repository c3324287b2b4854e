"""Detect sleep and wake-up of this machine.

Two clocks of the system differ by the time asleep. One advances during sleep (Linux CLOCK_BOOTTIME, macOS
CLOCK_MONOTONIC), the other stops (Linux CLOCK_MONOTONIC, macOS CLOCK_UPTIME_RAW). A change of their difference between
two checks is a sleep that has ended. Changes of the wall clock have no effect. Only the system can announce a sleep in
advance: macOS announces it by IOKit, and waits for registered processes (`host.iokit`). Without an announcement, the
pool cannot distinguish a sleep from a lost network.

Between two sleeps, macOS wakes for some seconds, for example for Power Nap (a dark wake). The system announces neither
that wake-up nor the sleep after it. An announced sleep therefore ends with the announced wake-up. Running clocks alone
do not end it, because the pool would then not be notified of the next sleep.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Protocol

import structlog

log = structlog.get_logger("host.sleep_watch")

POLL_INTERVAL_SECONDS = 2.0
"""Seconds between two checks of the clocks."""
MIN_SLEEP_SECONDS = 3.0
"""Minimum change in the difference between the two clocks that counts as a sleep, in seconds."""

MAX_DARK_WAKE_SECONDS = 60.0
"""Seconds awake in a row after which an announced sleep counts as ended without an announced wake-up.

The system has then cancelled the sleep, or not announced its end. Most dark wakes are shorter.
"""

Acknowledge = Callable[[], None]
"""Function that permits an announced sleep."""
Clocks = tuple[Callable[[], float], Callable[[], float]]
"""Two functions that read a clock in seconds: one that advances during sleep, and one that stops."""


class SleepNotices(Protocol):
    """Source of announcements of the system before a sleep and after a wake-up."""

    def start(self, on_sleep: Callable[[Acknowledge], None], on_wake: Callable[[], None]) -> bool:
        """Start a thread that calls the functions. Return whether the system announces sleeps.

        The thread calls `on_sleep(permit)` before a sleep, and `on_wake()` after the sleep. The call of `permit()`
        allows the sleep.
        """
        ...

    def stop(self) -> None:
        """Stop the announcements."""
        ...


class NoSleepNotices:
    """Source of announcements for a system that does not announce sleeps."""

    def start(self, on_sleep: Callable[[Acknowledge], None], on_wake: Callable[[], None]) -> bool:
        """Return False, because this system does not announce sleeps."""
        return False

    def stop(self) -> None:
        """Do nothing, because no announcement was started."""


def open_sleep_notices() -> SleepNotices:
    """Return the source of sleep announcements of this system: IOKit on macOS, `NoSleepNotices` on other systems."""
    if sys.platform == "darwin":
        from host.iokit import SleepNotificationListener

        return SleepNotificationListener()
    return NoSleepNotices()


def system_clocks() -> Clocks:
    """Return the two clocks of this system. A system with one clock gets that clock twice, and detects no sleep."""
    on = getattr(time, "CLOCK_BOOTTIME", None)
    off = time.CLOCK_MONOTONIC
    if sys.platform == "darwin":
        on, off = time.CLOCK_MONOTONIC, time.CLOCK_UPTIME_RAW
    if on is None:
        return time.monotonic, time.monotonic
    return lambda: time.clock_gettime(on), lambda: time.clock_gettime(off)


class SleepWatch:
    """Detector of sleep and wake-up of this machine. All callbacks run on the event loop of `start`.

    `on_sleep(permit)` is called before an announced sleep; `permit()` allows the sleep. `on_wake(seconds)` is called
    after a sleep with its duration. An announced sleep includes its dark wakes, without their duration. `on_look()` is
    called at every check. In tests, `notices` and `clocks` replace the source and the clocks of the system.
    """

    def __init__(
        self,
        on_sleep: Callable[[Acknowledge], None],
        on_wake: Callable[[float], None],
        *,
        on_look: Callable[[], None] = lambda: None,
        notices: SleepNotices | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self._on_sleep = on_sleep
        self._on_wake = on_wake
        self._on_check = on_look
        self._notices = notices or open_sleep_notices()
        self._on, self._off = clocks or system_clocks()
        self._ahead = 0.0
        self._notified = False
        """Whether an announced sleep has begun and not ended."""
        self._seen = 0.0
        """Seconds of the announced sleep that the last check found."""
        self._awake_since = 0.0
        """Time by the clock that stops during sleep, from which this machine was awake during an announced sleep."""
        self._handle: asyncio.TimerHandle | asyncio.Handle | None = None

    def start(self) -> None:
        """Start listening for announcements and checking the clocks. Call this on a running event loop.

        The first check, with a call of `on_look`, is made before this method returns.
        """
        loop = asyncio.get_running_loop()

        def call_on_loop(call: Callable[..., None], *arguments: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(call, *arguments)

        self._ahead = self._on() - self._off()
        notified = self._notices.start(
            lambda acknowledge: call_on_loop(self._handle_sleep, acknowledge), lambda: call_on_loop(self._handle_wake)
        )
        log.info("sleep watched", notified_before=notified)
        self._check_clocks()

    def stop(self) -> None:
        """Stop listening for announcements and checking the clocks."""
        self._notices.stop()
        if self._handle is not None:
            self._handle.cancel()

    def _check_clocks(self) -> None:
        """Check the clocks and schedule the next check."""
        slept = self._compute_seconds_asleep()
        if self._notified and slept - self._seen >= MIN_SLEEP_SECONDS:
            self._seen, self._awake_since = slept, self._off()
        if self._is_awake_for_long() if self._notified else slept >= MIN_SLEEP_SECONDS:
            self._end_sleep(slept)
        self._on_check()
        self._handle = asyncio.get_running_loop().call_later(POLL_INTERVAL_SECONDS, self._check_clocks)

    def _compute_seconds_asleep(self) -> float:
        return self._on() - self._off() - self._ahead

    def _is_awake_for_long(self) -> bool:
        return self._off() - self._awake_since >= MAX_DARK_WAKE_SECONDS

    def _handle_sleep(self, acknowledge: Acknowledge) -> None:
        self._notified = True
        self._seen, self._awake_since = self._compute_seconds_asleep(), self._off()
        log.info("system sleep")
        self._on_sleep(acknowledge)

    def _handle_wake(self) -> None:
        if self._notified:
            self._end_sleep(self._compute_seconds_asleep())

    def _end_sleep(self, slept: float) -> None:
        self._ahead, self._notified = self._on() - self._off(), False
        log.info("woke", slept=round(slept, 1))
        self._on_wake(slept)

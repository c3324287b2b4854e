"""Event loop of the coordinator and of nodes: uvloop, with `time.monotonic` as its clock.

On macOS, the clock of uvloop advances while the machine sleeps (https://github.com/libuv/libuv/pull/2894), and
`time.monotonic` does not. On Linux, neither advances. The code compares times of the loop with `time.monotonic`, such
as the arrival of a report with the time of a placement. With two clocks, a machine that has slept since its start would
treat old reports as new.
"""

import time
from collections.abc import Coroutine
from typing import TypeVar

import uvloop

T = TypeVar("T")


class MonotonicLoop(uvloop.Loop):
    """Event loop with the clock of `time.monotonic`."""

    def time(self) -> float:
        """Return `time.monotonic()`. `call_at` and asyncio's timeouts use this clock as well."""
        return time.monotonic()


def run_event_loop(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine in a new `MonotonicLoop`, and return its result."""
    return uvloop.run(main, loop_factory=MonotonicLoop)

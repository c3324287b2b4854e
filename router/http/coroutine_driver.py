"""Runs a coroutine by hand: its first step at once, the next ones when the Future it waits for is done.

A Task costs its own step for every wake-up, and the frames of all callers above it are touched each time; for one token
of one stream that is more than the rest of our work. ASGI's `send` almost never waits (only when the transport is
full) and `receive` waits once, so both are run from callbacks on the loop. What is run here must wait for asyncio
Futures only and must not ask for the current task; that holds for the server's own `send` and `receive`, so no
middleware may stand between it and the front door.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Step = Coroutine[Any, Any, Any]


class Stepper:
    """Runs one coroutine at a time. `ended` is called with its value when it ends later than at once; None after an
    exception, which the loop's exception handler is told."""

    __slots__ = ("_coroutine", "_ended", "_future")

    def __init__(self, ended: Callable[[Any], None]) -> None:
        self._ended = ended
        self._coroutine: Step | None = None
        self._future: asyncio.Future[Any] | None = None

    def wait_for(self, coroutine: Step, future: "asyncio.Future[Any] | None") -> None:
        """Go on with a coroutine, whose first step gave this Future, when the Future is done."""
        self._coroutine = coroutine
        if future is None:  # a bare yield: at the next turn of the loop
            asyncio.get_running_loop().call_soon(self._step)
            return
        future._asyncio_future_blocking = False  # as a Task does with what it waits for
        self._future = future
        future.add_done_callback(self._step)

    def run(self, coroutine: Step) -> None:
        """Run a coroutine; `ended` is called in any case, perhaps before this returns."""
        self._coroutine = coroutine
        self._step()

    def close(self) -> None:
        """Give up what is under way; `ended` is not called. Lets go of it too: a ring of references would have to wait
        for the collector, at every request."""
        self._ended = _nobody
        coroutine, self._coroutine = self._coroutine, None
        if self._future is not None:
            self._future.remove_done_callback(self._step)
            self._future = None
        if coroutine is not None:
            coroutine.close()

    def _step(self, _done: object = None) -> None:
        coroutine = self._coroutine
        self._future = None
        if coroutine is None:
            return
        try:
            future = coroutine.send(None)
        except StopIteration as stop:
            self._coroutine = None
            self._ended(stop.value)
        except Exception as error:
            self._coroutine = None
            asyncio.get_running_loop().call_exception_handler({"message": "a hand-run step failed", "exception": error})
            self._ended(None)
        else:
            self.wait_for(coroutine, future)


def _nobody(_value: object) -> None:
    return

"""Driver of a coroutine without a Task: runs the first step at once, later steps when the awaited Future is done.

A Task costs a step of its own for every wake-up, and touches the frames of all callers each time. For one token of one
stream that is more than the rest of the router's work. ASGI's `send` almost never waits (only when the transport is
full) and `receive` waits once. Both are therefore run from callbacks on the event loop. A driven coroutine must wait
for asyncio Futures only and must not ask for the current task. That holds for the server's own `send` and `receive`; no
middleware may therefore stand between the server and the ASGI app.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Step = Coroutine[Any, Any, Any]


class CoroutineDriver:
    """Driver of one coroutine at a time.

    `ended` is called with the value of a coroutine at its end. After an exception the value is None, and the loop's
    exception handler gets the exception.
    """

    __slots__ = ("_coroutine", "_ended", "_future")

    def __init__(self, ended: Callable[[Any], None]) -> None:
        self._ended = ended
        self._coroutine: Step | None = None
        self._future: asyncio.Future[Any] | None = None

    def wait_for(self, coroutine: Step, future: "asyncio.Future[Any] | None") -> None:
        """Continue a coroutine when `future` is done, or at the next iteration of the loop if `future` is None.

        The caller has run the coroutine's first step, which yielded `future`.
        """
        self._coroutine = coroutine
        if future is None:  # a bare yield: continue at the next iteration of the loop
            asyncio.get_running_loop().call_soon(self._step)
            return
        future._asyncio_future_blocking = False  # as a Task does with an awaited Future
        self._future = future
        future.add_done_callback(self._step)

    def run(self, coroutine: Step) -> None:
        """Run a coroutine from its first step. `ended` is called at its end, perhaps before this method returns."""
        self._coroutine = coroutine
        self._step()

    def close(self) -> None:
        """Abort the running coroutine without calling `ended`.

        This also drops the reference to `ended`. Otherwise each request would leave a reference cycle for the garbage
        collector.
        """
        self._ended = _ignore
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


def _ignore(_value: object) -> None:
    return

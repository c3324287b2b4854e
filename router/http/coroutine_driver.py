"""Driver of a coroutine without a Task: runs the first step at once, and later steps when the awaited Future is done.

A Task takes an extra step of the event loop for every wake-up, and each time resumes the frames of all callers. For one
token of a stream, that costs more than the rest of the router's work. ASGI's `send` waits only while the transport is
full, and `receive` waits once. Both are therefore run from callbacks on the event loop.

A driven coroutine must await only asyncio Futures, and must not ask for the current task. The server's own `send` and
`receive` comply. Middleware between the server and the ASGI app might not, and is therefore not allowed.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Step = Coroutine[Any, Any, Any]


class CoroutineDriver:
    """Driver of one coroutine at a time.

    `ended` is called at the end of a coroutine with its result. If the coroutine raises an exception, the result is
    None, and the loop's exception handler gets the exception.
    """

    __slots__ = ("_coroutine", "_ended", "_future")

    def __init__(self, ended: Callable[[Any], None]) -> None:
        self._ended = ended
        self._coroutine: Step | None = None
        self._future: asyncio.Future[Any] | None = None

    def wait_for(self, coroutine: Step, future: "asyncio.Future[Any] | None") -> None:
        """Continue a coroutine when `future` is done, or at the next iteration of the loop if `future` is None.

        The caller must have run the first step of the coroutine, which yielded `future`.
        """
        self._coroutine = coroutine
        if future is None:  # a bare yield: continue at the next iteration of the loop
            asyncio.get_running_loop().call_soon(self._step)
            return
        future._asyncio_future_blocking = False  # as a Task does with an awaited Future
        self._future = future
        future.add_done_callback(self._step)

    def run(self, coroutine: Step) -> None:
        """Run a coroutine from its first step. `ended` is called at its end, possibly before this method returns."""
        self._coroutine = coroutine
        self._step()

    def close(self) -> None:
        """Abort the running coroutine without calling `ended`.

        This also drops the reference to `ended`. The driver then leaves no reference cycle for the garbage collector.
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

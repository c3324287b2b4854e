"""Run calls that may block forever, such as access to a lost network disk, in daemon threads.

A process can end without waiting for its daemon threads.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, ParamSpec, TypeVar

END_TIMEOUT_SECONDS = 2.0
"""Maximum seconds for which the end of an event loop waits for calls of its `DaemonExecutor`."""

P = ParamSpec("P")
T = TypeVar("T")


def start_call(function: Callable[[], T], name: str) -> Future[T]:
    """Call `function` in a new daemon thread called `name`. Return the future of the result.

    The future cannot be cancelled. An exception of the function becomes the exception of the future.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # the thread that waits for the result handles the error
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class DaemonExecutor(ThreadPoolExecutor):
    """Executor for `asyncio.to_thread` with a daemon thread for each call.

    A blocked call delays the end of the process by at most `END_TIMEOUT_SECONDS`.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self._calls: set[Future[Any]] = set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in a new daemon thread. Return the future of its result, which cannot be cancelled.

        An exception of the function becomes the exception of the future.
        """
        future = start_call(partial(fn, *args, **kwargs), "call")
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait at most `END_TIMEOUT_SECONDS` for the running calls; return at once if `wait` is False.

        `cancel_futures` has no effect, because no call is queued.
        """
        del cancel_futures  # every call runs
        if wait:
            _wait_for(self._calls)


def _wait_for(calls: set[Future[Any]]) -> None:
    wait(tuple(calls), END_TIMEOUT_SECONDS)

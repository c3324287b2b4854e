"""Callbacks that wait until changes are on disk, such as the sending of a certificate after its record is stored."""

import asyncio
from collections.abc import Callable, Coroutine

import structlog

log = structlog.get_logger("coordinator.cluster.store_barrier")


class StoreBarrier:
    """Callbacks that wait until changes are on disk.

    `flush` returns after all changes made before the call are on disk, and raises `StoreError` if a write failed.
    """

    def __init__(self, flush: Callable[[], Coroutine[None, None, None]]) -> None:
        self._flush = flush
        self._tasks: set[asyncio.Task[None]] = set()

    def call_when_stored(
        self, callback: Callable[[], None], on_failure: Callable[[BaseException], None] = lambda _: None
    ) -> None:
        """Call `callback` once all earlier changes are on disk.

        If a write failed, log the error and call `on_failure` with it instead.
        """
        task = asyncio.get_running_loop().create_task(self._flush())
        self._tasks.add(task)

        def done(ended: asyncio.Task[None]) -> None:
            self._tasks.discard(ended)
            if ended.cancelled():
                return
            error = ended.exception()
            if error is None:
                callback()
            else:
                log.error("not stored", error=str(error))
                on_failure(error)

        task.add_done_callback(done)

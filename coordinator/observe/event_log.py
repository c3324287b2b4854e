"""Event stream of the pool: events that the coordinator and the router log, as server-sent events.

The newest events are in a ring, and each reader has a bounded queue. A slow reader loses its oldest events and receives
their number. A reader that reconnects sends its last event number and receives the later events that are still stored.
"""

import asyncio
import contextlib
import itertools
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any

MAX_EVENTS = 500
"""Maximum number of stored events. The oldest one is removed first."""
MAX_QUEUED_EVENTS = 200
"""Maximum queued events of one reader, or the number of events that the reader gets first if that is higher."""
MAX_READERS = 64
"""Maximum number of concurrent readers of events."""
KEEPALIVE_SECONDS = 15.0
"""Seconds without events after which a reader receives a comment."""
STREAMED_LOGGERS = ("coordinator.", "router.")
"""Prefixes of loggers whose events are streamed. Events of libraries are only in the log."""
Event = tuple[int, bytes]
"""Number of an event, and its JSON.

The numbers start with the Unix milliseconds of the coordinator's start. They therefore also grow across restarts.
"""


class EventLog:
    """Ring of the newest events, and its readers. Only `add_event` is thread-safe.

    All other calls must be on the event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._readers: dict[int, deque[Event]] = {}
        self._wake: asyncio.Event = asyncio.Event()
        self._numbers = itertools.count(int(time.time() * 1000))
        self._numbers_of_readers = itertools.count(1)

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Add an event of the log, whose secrets are already hidden. Ignore loggers outside `STREAMED_LOGGERS`.

        This method may be called from any thread.
        """
        if str(event.get("logger", "")).startswith(STREAMED_LOGGERS):
            body = json.dumps({str(name): value for name, value in event.items()}, default=str).encode()
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all readers with it
                self._loop.call_soon_threadsafe(self._append, body)

    def _append(self, body: bytes) -> None:
        event = (next(self._numbers), body)
        self._ring.append(event)
        for waiting in self._readers.values():
            waiting.append(event)
        self._wake.set()
        self._wake = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether the maximum number of readers is reached."""
        return self.readers >= MAX_READERS

    @property
    def readers(self) -> int:
        """Number of current readers."""
        return len(self._readers)

    async def stream_events(self, last: int | None, newest: int, *, follow: bool) -> AsyncGenerator[bytes]:
        """Yield the events after number `last`, or the newest `newest` events if `last` is None, as server-sent events.

        With `follow`, continue with new events, and a comment after each `KEEPALIVE_SECONDS` without events. The caller
        must check `full` first, because this method does not limit the readers.
        """
        ring = list(self._ring)
        begin = [event for event in ring if event[0] > last] if last is not None else ring[max(0, len(ring) - newest) :]
        waiting: deque[Event] = deque(begin, maxlen=max(MAX_QUEUED_EVENTS, len(begin)))
        reader = next(self._numbers_of_readers)
        self._readers[reader] = waiting
        expected: int | None = None
        try:
            while True:
                while waiting:
                    number, body = waiting.popleft()
                    lost = number - expected if expected is not None else 0
                    if lost > 0:
                        yield f": {lost} events were lost\n\n".encode()
                    expected = number + 1
                    yield b"id: %d\ndata: %s\n\n" % (number, body)
                if not follow:
                    return
                wake = self._wake
                try:
                    async with asyncio.timeout(KEEPALIVE_SECONDS):
                        await wake.wait()
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            del self._readers[reader]

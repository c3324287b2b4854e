"""What happens in the pool, for those who watch: the events of our own log, as they are written there.

A ring of the newest and a bounded queue for each reader. Who reads too slowly loses the oldest and is told how many;
who comes back says which event it had last, and is given those that it missed, as far as they are kept.
"""

import asyncio
import contextlib
import itertools
import json
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any

KEPT = 500
WAITING = 200
"""Events that may wait for one reader."""
MOST_READERS = 64
KEEPALIVE = 15.0
"""Seconds of silence after which a reader gets a comment."""
OURS = ("coordinator.", "router.")
"""Whose events are told: those of libraries are for the log alone."""
Event = tuple[int, bytes]


class Events:
    """The ring and its readers. `tell` may be called on any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring: deque[Event] = deque(maxlen=KEPT)
        self._readers: dict[int, deque[Event]] = {}
        self._wake: asyncio.Event = asyncio.Event()
        self._numbers = itertools.count(1)
        self._numbers_of_readers = itertools.count(1)

    def tell(self, event: Mapping[str, Any]) -> None:
        """Take an event of the log, secrets hidden already."""
        if str(event.get("logger", "")).startswith(OURS):
            body = json.dumps({str(name): value for name, value in event.items()}, default=str).encode()
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all who read
                self._loop.call_soon_threadsafe(self._add, body)

    def _add(self, body: bytes) -> None:
        event = (next(self._numbers), body)
        self._ring.append(event)
        for waiting in self._readers.values():
            waiting.append(event)
        self._wake.set()
        self._wake = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether as many read as may."""
        return self.readers >= MOST_READERS

    @property
    def readers(self) -> int:
        """Number of readers."""
        return len(self._readers)

    async def read(self, last: int | None, newest: int, *, follow: bool) -> AsyncGenerator[bytes]:
        """Yield events in the form of server-sent events: those after number `last`, else the `newest`; and with
        `follow` what comes, for ever."""
        kept = list(self._ring)
        begin = [event for event in kept if event[0] > last] if last is not None else kept[max(0, len(kept) - newest) :]
        waiting: deque[Event] = deque(begin, maxlen=max(WAITING, len(begin)))
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
                    async with asyncio.timeout(KEEPALIVE):
                        await wake.wait()
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            del self._readers[reader]

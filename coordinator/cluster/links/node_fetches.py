"""Fetches from nodes over their links: logs, metrics and files, in windows that the consumer paces.

An answer has at most the requested bytes, and only the requested node can send it.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from wire.codec import WireError
from wire.frames import FetchChunk, FetchRequest, Frame
from wire.identity import NodeId

FETCH_WINDOW_BYTES = 1024 * 1024
"""Maximum bytes that one `FetchRequest` requests. A longer answer needs several requests."""
MIN_CHUNK_BYTES = 4096
"""Minimum average size of an answer's pieces: n requested bytes permit at most `n // MIN_CHUNK_BYTES + 2` pieces."""
FETCH_TIMEOUT_SECONDS = 10.0
"""Maximum seconds from a request to the first piece of its answer, and between two pieces, before the fetch fails."""


class _FetchWindow:
    """Limits for a node's answer to one `FetchRequest`: the requested bytes, and the pieces that they need."""

    def __init__(self, limit: int) -> None:
        self.queue: asyncio.Queue[FetchChunk] = asyncio.Queue()
        self._limit = limit
        self._bytes = limit
        self._pieces = limit // MIN_CHUNK_BYTES + 2

    def put(self, answer: FetchChunk) -> None:
        """Queue a piece. Raise `WireError`, which ends the link, if the answer has too many bytes or pieces."""
        self._bytes -= len(answer.payload)
        self._pieces -= 1
        if self._bytes < 0 or self._pieces < 0:
            raise WireError(f"longer answer than the {self._limit} bytes that it was asked for")
        self.queue.put_nowait(answer)


class NodeFetches:
    """Fetches in progress. `send` sends a frame to a node and returns False if the node is not linked."""

    def __init__(self, send: Callable[[NodeId, Frame], bool]) -> None:
        self._send = send
        self._windows: dict[tuple[NodeId, int], _FetchWindow] = {}
        self._numbers = itertools.count(1)

    def deliver(self, node: NodeId, answer: FetchChunk) -> None:
        """Pass a piece from `node` to the fetch that waits for it. Ignore a piece that no fetch waits for.

        Raise `WireError` if the answer has more bytes than requested, or too many pieces.
        """
        window = self._windows.get((node, answer.number))
        if window is not None:
            window.put(answer)

    async def fetch_source(self, node: NodeId, source: str, max_bytes: int) -> AsyncGenerator[bytes]:
        """Yield the newest `max_bytes` bytes of a node's `source`, such as `logs`, as fast as the consumer reads.

        Raise `LookupError` if the node is not linked or cannot answer. Raise `TimeoutError` if the node sends nothing
        for `FETCH_TIMEOUT_SECONDS`.
        """
        offset, left = -max_bytes, max_bytes
        while left > 0:
            before = left
            async for answer in self._fetch_window(node, source, offset, min(left, FETCH_WINDOW_BYTES)):
                left -= len(answer.payload)
                offset = answer.next
                if answer.payload:
                    yield answer.payload
            if offset == 0 or left == before:  # an empty window is the end, whichever next offset the node sends
                return

    async def follow_source(
        self, node: NodeId, source: str, max_bytes: int, interval_seconds: float
    ) -> AsyncGenerator[bytes]:
        """Yield the newest `max_bytes` bytes of a node's `source`, then appended bytes, without end.

        The node is polled every `interval_seconds`. Each poll requests at most `FETCH_WINDOW_BYTES`. Raise
        `LookupError` if the node is not linked or cannot answer. Raise `TimeoutError` if the node sends
        nothing for `FETCH_TIMEOUT_SECONDS`.
        """
        offset = -max_bytes
        while True:
            async for answer in self._fetch_window(node, source, offset, FETCH_WINDOW_BYTES):
                if answer.payload:
                    yield answer.payload
                if answer.last:
                    offset = answer.end
            await asyncio.sleep(interval_seconds)

    async def _fetch_window(self, node: NodeId, source: str, offset: int, max_bytes: int) -> AsyncIterator[FetchChunk]:
        number = next(self._numbers)
        window = self._windows[node, number] = _FetchWindow(max_bytes)
        try:
            if not self._send(node, FetchRequest(number, source, offset, max_bytes)):
                raise LookupError("the node is not linked")
            last = False
            while not last:
                async with asyncio.timeout(FETCH_TIMEOUT_SECONDS):
                    answer = await window.queue.get()
                if answer.error:
                    raise LookupError(answer.error)
                last = answer.last
                yield answer
        finally:
            del self._windows[node, number]

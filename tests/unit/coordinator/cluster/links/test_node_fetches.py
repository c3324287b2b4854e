"""Fetches of logs, metrics and files: how long an answer of a node may be."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from coordinator.cluster.links.node_fetches import MIN_CHUNK_BYTES, NodeFetches
from wire.codec import WireError
from wire.frames import FetchChunk, FetchRequest, Frame
from wire.identity import NodeId

NODE = NodeId("node-1")
MAX_BYTES = 2 * MIN_CHUNK_BYTES
MAX_PIECES = 4
"""The two pieces of the minimum size, and two more."""


class Fetch:
    """A fetch of `MAX_BYTES` bytes that has sent its request."""

    def __init__(self) -> None:
        self.requests: list[Frame] = []
        self.has_begun = asyncio.Event()
        self.fetches = NodeFetches(self._send)
        self.task = asyncio.create_task(self._read())

    def _send(self, node: NodeId, frame: Frame) -> bool:
        assert node == NODE
        self.requests.append(frame)
        self.has_begun.set()
        return True

    async def _read(self) -> bytes:
        return b"".join([piece async for piece in self.fetches.fetch_source(NODE, "logs", MAX_BYTES)])

    def deliver(self, size: int, *, last: bool = False) -> None:
        """Deliver a piece of `size` bytes."""
        (request,) = self.requests
        assert isinstance(request, FetchRequest)
        self.fetches.deliver(NODE, FetchChunk(request.number, b"x" * size, last=last))


@pytest.fixture
async def fetch() -> AsyncIterator[Fetch]:
    made = Fetch()
    await asyncio.wait_for(made.has_begun.wait(), 30)
    yield made
    made.task.cancel()


async def test_an_answer_of_the_requested_bytes_in_all_allowed_pieces_is_accepted(fetch: Fetch):
    for size in (MIN_CHUNK_BYTES, MIN_CHUNK_BYTES - 1, 1):
        fetch.deliver(size)
    fetch.deliver(0, last=True)
    assert await asyncio.wait_for(fetch.task, 30) == b"x" * MAX_BYTES


@pytest.mark.parametrize(
    "sizes", [(MAX_BYTES + 1,), (MAX_BYTES, 1), (0,) * (MAX_PIECES + 1)], ids=["one piece", "two pieces", "empty"]
)
async def test_one_byte_or_one_piece_more_is_an_invalid_answer(fetch: Fetch, sizes: tuple[int, ...]):
    for size in sizes[:-1]:
        fetch.deliver(size)
    with pytest.raises(WireError, match=f"longer answer than the {MAX_BYTES} bytes"):
        fetch.deliver(sizes[-1])

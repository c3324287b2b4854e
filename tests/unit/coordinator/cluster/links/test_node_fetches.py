"""Fetches of logs, metrics and files: windows, additions, and how long an answer of a node may be."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from coordinator.cluster.links import node_fetches
from coordinator.cluster.links.node_fetches import FETCH_WINDOW_BYTES, MIN_CHUNK_BYTES, NodeFetches
from wire.codec import WireError
from wire.frames import FetchChunk, FetchRequest, Frame
from wire.identity import NodeId

NODE = NodeId("node-1")
MAX_BYTES = 2 * MIN_CHUNK_BYTES
MAX_PIECES = 4
"""Most pieces of an answer of `MAX_BYTES` bytes: the two pieces of the minimum size, and two more."""


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
    for _ in range(MAX_PIECES + 1):
        fetch.deliver(MAX_BYTES)  # a late piece of a fetch that has ended is ignored


async def test_an_empty_answer_is_the_end_whichever_next_offset_the_node_sends(fetch: Fetch):
    (request,) = fetch.requests
    assert isinstance(request, FetchRequest)
    fetch.fetches.deliver(NODE, FetchChunk(request.number, b"", last=True, next=7, end=7))
    assert await asyncio.wait_for(fetch.task, 5) == b""
    assert fetch.requests == [request]


@pytest.mark.parametrize(
    "sizes", [(MAX_BYTES + 1,), (MAX_BYTES, 1), (0,) * (MAX_PIECES + 1)], ids=["one piece", "two pieces", "empty"]
)
async def test_one_byte_or_one_piece_more_is_an_invalid_answer(fetch: Fetch, sizes: tuple[int, ...]):
    for size in sizes[:-1]:
        fetch.deliver(size)
    with pytest.raises(WireError, match=f"longer answer than the {MAX_BYTES} bytes"):
        fetch.deliver(sizes[-1])


# windows


class Node:
    """A node whose source has `text`, and which answers requests in pieces of `piece` bytes."""

    def __init__(self, text: bytes, piece: int = FETCH_WINDOW_BYTES) -> None:
        self.text = text
        self.piece = piece
        self.requests: list[tuple[int, int]] = []
        self.error = ""
        self.linked = True
        self.fetches = NodeFetches(self._send)

    def _send(self, node: NodeId, frame: Frame) -> bool:
        assert isinstance(frame, FetchRequest)
        assert frame.source == "logs"
        self.requests.append((frame.offset, frame.limit))
        if not self.linked:
            return False
        start = max(0, len(self.text) + frame.offset) if frame.offset < 0 else frame.offset
        part = self.text[start : start + frame.limit]
        end = start + len(part)
        pieces = [part[at : at + self.piece] for at in range(0, len(part), self.piece)] or [b""]
        for number, piece in enumerate(pieces, 1):
            chunk = FetchChunk(
                frame.number,
                piece,
                last=number == len(pieces),
                next=0 if end == len(self.text) else end,
                end=end,
                error=self.error,
            )
            self.fetches.deliver(NodeId("another"), chunk)
            self.fetches.deliver(node, chunk)
        return True

    async def read(self, max_bytes: int) -> bytes:
        return b"".join([piece async for piece in self.fetches.fetch_source(NODE, "logs", max_bytes)])


async def test_a_long_source_is_fetched_in_windows():
    text = bytes(range(256)) * 4096 * 2 + b"the end"
    node = Node(text, MIN_CHUNK_BYTES)
    assert await node.read(len(text) + 5) == text
    assert node.requests == [
        (-(len(text) + 5), FETCH_WINDOW_BYTES),
        (FETCH_WINDOW_BYTES, FETCH_WINDOW_BYTES),
        (2 * FETCH_WINDOW_BYTES, 12),
    ]


async def test_the_newest_bytes_are_fetched():
    node = Node(b"older newest")
    assert await node.read(6) == b"newest"
    assert await node.read(0) == b""
    assert node.requests == [(-6, 6)]


async def test_an_empty_source_ends_the_fetch_whatever_the_node_says():
    node = Node(b"")
    assert await node.read(100) == b""
    assert len(node.requests) == 1


async def test_an_error_of_the_node_and_a_missing_link_are_raised():
    node = Node(b"text")
    node.error = "it has no logs"
    with pytest.raises(LookupError, match="it has no logs"):
        await node.read(100)
    node.linked = False
    with pytest.raises(LookupError, match="not linked"):
        await node.read(100)


async def test_a_silent_node_is_a_timeout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node_fetches, "FETCH_TIMEOUT_SECONDS", 0.001)
    fetches = NodeFetches(lambda node, frame: True)
    with pytest.raises(TimeoutError):
        async for _ in fetches.fetch_source(NODE, "logs", 100):
            pass


async def test_additions_follow_the_newest_bytes():
    node = Node(b"old new")
    pieces = node.fetches.follow_source(NODE, "logs", 3, 0.0)
    assert await anext(pieces) == b"new"
    node.text += b" one"
    assert await anext(pieces) == b" one"
    node.text += b" two"
    assert await anext(pieces) == b" two"
    assert [offset for offset, _ in node.requests] == [-3, 7, 11]
    await pieces.aclose()

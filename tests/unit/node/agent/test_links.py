"""Frames of answers on the links of a node: their order behind long frames, and the limits of the coordinator."""

import asyncio
from typing import Any

import pytest

from node.agent.connection import CoordinatorLink
from node.agent.links import CoordinatorLinks
from wire.codec import MAX_JOINED_FROM_NODE_BYTES, MAX_PLAIN_BYTES, TAG_OF, Splitter, decode, encode
from wire.frames import Admitted, Channel, Delta, Deltas, Failed, Finished, Frame, Refusal
from wire.refusals import FailureCode, RefusalCode, Refused
from wire.units import KIB


class Transport:
    """The coordinator's end of a connection: the frames that arrived, joined within the coordinator's limits."""

    def __init__(self) -> None:
        self.splitter = Splitter(longest_joined=MAX_JOINED_FROM_NODE_BYTES)
        self.frames: list[Frame] = []
        self.changed = asyncio.Event()
        self.closed = asyncio.Event()

    def write(self, data: bytes) -> None:
        assert not self.closed.is_set()
        self.frames += [decode(*pair) for pair in self.splitter.feed(data)]
        self.changed.set()

    async def receive(self, count: int) -> list[tuple[int, int]]:
        """Wait for `count` frames. Return request and length of the text of each; length 0 for the end of a request."""
        async with asyncio.timeout(10):
            while len(self.frames) < count:
                await self.changed.wait()
                self.changed.clear()
        return describe(self.frames)

    def close(self) -> None:
        self.closed.set()

    abort = close

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return default


def open_link(links: CoordinatorLinks, *requests: int) -> tuple[CoordinatorLink, Transport]:
    """Add an accepted link with these open requests."""
    link = CoordinatorLink("host:1", "cluster", lambda *frame: None, lambda *end: None)
    transport = Transport()
    link.connection_made(transport)  # pyright: ignore[reportArgumentType]
    links.add(link)
    links.accept(link)
    link.requests |= set(requests)
    return link, transport


def deltas(request: int, size: int) -> Deltas:
    return Deltas((Delta(request, 0, (), ((Channel.TOOL_CALL, "x" * size),)),))


def forward(links: CoordinatorLinks, frame: Deltas | Finished | Refusal | Failed | Admitted) -> None:
    number = 0 if isinstance(frame, Deltas) else frame.request
    links.forward_from_engine(TAG_OF[type(frame)], encode(frame), number)


def describe(frames: list[Frame]) -> list[tuple[int, int]]:
    found = list[tuple[int, int]]()
    for frame in frames:
        if isinstance(frame, Finished):
            found.append((frame.request, 0))
        elif isinstance(frame, Deltas):
            found += [(delta.request, len(text)) for delta in frame.deltas for _, text in delta.pieces]
    return found


def end(request: int) -> Finished:
    return Finished(request, ("tool_calls",), 1, 1)


LONG = 2 * MAX_PLAIN_BYTES


async def test_no_frame_of_an_answer_overtakes_a_long_tool_call():
    links = CoordinatorLinks()
    _, transport = open_link(links, 1, 2)
    for frame in (
        deltas(1, LONG),
        deltas(2, 5),
        deltas(1, LONG // 2 + KIB),
        deltas(1, 9),
        end(1),
        deltas(2, 7),
        end(2),
    ):
        forward(links, frame)
    assert await transport.receive(7) == [(1, LONG), (2, 5), (1, LONG // 2 + KIB), (1, 9), (1, 0), (2, 7), (2, 0)]


async def test_an_older_link_closes_behind_the_long_tool_call_of_its_last_request():
    links = CoordinatorLinks()
    _, older = open_link(links, 1)
    _, newer = open_link(links, 2)
    for frame in (Deltas((*deltas(1, LONG).deltas, *deltas(2, 5).deltas)), deltas(1, 9), end(1), end(2)):
        forward(links, frame)
    async with asyncio.timeout(10):
        await older.closed.wait()
    assert describe(older.frames) == [(1, LONG), (1, 9), (1, 0)]
    assert await newer.receive(2) == [(2, 5), (2, 0)]
    assert not newer.closed.is_set()


async def test_an_older_link_closes_when_its_last_request_is_cancelled():
    links = CoordinatorLinks()
    _, older = open_link(links, 1, 2)
    _, newer = open_link(links, 3)
    assert links.open_requests == 3
    links.cancel(1)
    assert (links.open_requests, older.closed.is_set()) == (2, False)
    links.cancel(2)
    links.cancel(3)
    assert older.closed.is_set()
    assert not newer.closed.is_set(), "the current link stays open without requests"


async def test_a_link_that_is_accepted_again_stays_open():
    links = CoordinatorLinks()
    link, transport = open_link(links)
    links.accept(link)
    assert links.current is link
    assert not transport.closed.is_set()


async def test_the_requests_of_an_older_link_end_with_the_newer_link():
    links = CoordinatorLinks()
    _, older = open_link(links, 1)
    newer, _ = open_link(links, 2)
    opening = CoordinatorLink("host:1", "cluster", lambda *frame: None, lambda *end: None)
    transport = Transport()
    opening.connection_made(transport)  # pyright: ignore[reportArgumentType]
    links.add(opening)
    links.remove(newer)
    assert older.closed.is_set(), "the coordinator resumes its requests on another node"
    assert not transport.closed.is_set(), "a link that is not accepted yet has no requests"


@pytest.mark.parametrize("size", [MAX_PLAIN_BYTES, 700 * KIB])
async def test_long_frames_at_once_stay_within_what_the_coordinator_joins(size: int):
    links = CoordinatorLinks()
    link, transport = open_link(links, *range(30))
    for request in range(30):
        link.send(deltas(request, size))
    assert sorted(await transport.receive(30)) == [(request, size) for request in range(30)]


async def test_the_requests_of_an_older_link_that_is_lost_fail_on_the_newer_one():
    links = CoordinatorLinks()
    older, _ = open_link(links, 4)
    _, transport = open_link(links)
    links.remove(older)
    await transport.receive(1)
    assert transport.frames == [Failed(4, FailureCode.LINK_LOST, "the older of two links to the node was lost")]


async def test_a_link_without_requests_closes_when_another_one_is_accepted():
    links = CoordinatorLinks()
    _, older = open_link(links)
    _, newer = open_link(links)
    async with asyncio.timeout(10):
        await older.closed.wait()
    assert not newer.closed.is_set()


async def test_the_current_link_is_watched_for_silence_and_then_the_newest_one():
    links = CoordinatorLinks()
    assert links.watched is None
    current, _ = open_link(links)
    opening = CoordinatorLink("host:1", "cluster", lambda *frame: None, lambda *end: None)
    opening.connection_made(Transport())  # pyright: ignore[reportArgumentType]
    links.add(opening)
    assert links.watched is current
    links.remove(current)
    assert (links.current, links.watched) == (None, opening)
    links.remove(opening)
    assert links.watched is None


@pytest.mark.parametrize(
    "last",
    [
        end(1),
        Refusal(1, Refused(RefusalCode.NO_ROOM, "no room")),
        Failed(1, FailureCode.ENGINE_CRASHED, "the engine ended"),
    ],
    ids=lambda frame: type(frame).__name__,
)
async def test_the_last_frame_of_a_request_ends_it_and_no_frame_follows(last: Finished | Refusal | Failed):
    links, ends = CoordinatorLinks(), list[int]()
    _, transport = open_link(links, 1, 2)
    links.request_ended.subscribe(lambda: ends.append(links.open_requests))
    forward(links, Admitted(1, 5, 0))
    assert ends == []
    forward(links, last)
    assert ends == [1]
    forward(links, last)
    forward(links, end(2))
    assert ends == [1, 0]
    async with asyncio.timeout(10):
        while len(transport.frames) < 3:
            await transport.changed.wait()
            transport.changed.clear()
    assert [type(frame) for frame in transport.frames] == [Admitted, type(last), Finished]


async def test_all_requests_of_a_node_that_stops_fail_with_the_reason_and_end():
    links, ends = CoordinatorLinks(), list[int]()
    _, older = open_link(links, 1)
    _, newer = open_link(links, 2)
    links.request_ended.subscribe(lambda: ends.append(links.open_requests))
    assert sorted(links.fail_all("its Mac stopped sharing")) == [1, 2]
    assert (links.open_requests, ends) == (0, [1, 0])
    async with asyncio.timeout(10):
        await older.closed.wait()
        while not newer.frames:
            await newer.changed.wait()
            newer.changed.clear()
    assert [*older.frames, *newer.frames] == [
        Failed(request, FailureCode.NODE_STOPPING, "its Mac stopped sharing") for request in (1, 2)
    ]
    assert not newer.closed.is_set()

"""Connections to the cluster port: bytes before a Hello, rate of enrolments, frames after a refusal.

Also frames of one link that exceed the time of a turn of the loop.
"""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from coordinator.cluster.links import link_connection, link_server
from coordinator.cluster.links.link_connection import MAX_UNLINKED_BYTES, Connection, ConnectionOwner
from coordinator.joining.rate_limit import RateLimit
from node.agent.identity import NodeIdentity
from tests.support.cluster.cluster_port import Line, Port, a_report, hello, opened, the_no
from wire.codec import decode, encode, split_into_fragments
from wire.frames import Denied, FetchChunk, Frame, Goodbye, Welcome

PIECE = 4096


class Recorded(Connection):
    """Connection that records the frames that it processes."""

    def __init__(self, owner: ConnectionOwner) -> None:
        super().__init__(owner)
        self.processed = list[Frame]()

    def on_frame(self, tag: int, body: bytes) -> None:
        super().on_frame(tag, body)
        self.processed.append(decode(tag, body))


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Record the connections that the cluster port accepts."""
    accepted = list[Recorded]()

    monkeypatch.setattr(link_server, "Connection", lambda owner: accepted.append(Recorded(owner)) or accepted[-1])
    return accepted


@pytest.fixture
async def port(connections: list[Recorded], tmp_path: Path) -> AsyncGenerator[Port]:
    async with opened(tmp_path) as made:
        yield made


async def open_connection(port: Port, connections: list[Recorded], who: NodeIdentity) -> tuple[Line, Recorded]:
    """Return both ends of a new connection with the certificate of a node."""
    line = await port.dial(who)
    await port.until(lambda: connections and connections[-1].peer is not None)
    return line, connections[-1]


async def test_bytes_before_a_hello_are_limited_over_all_their_pieces(port: Port, connections: list[Recorded]):
    line, connection = await open_connection(port, connections, port.member("rogue"))
    goodbye = b"".join(split_into_fragments(encode(Goodbye("x" * 40_000)), 1))
    for begin in range(0, MAX_UNLINKED_BYTES, PIECE):
        connection.data_received(goodbye[begin : begin + PIECE])
    assert connection.open
    connection.data_received(b"x")
    assert not connection.open
    await line.ended()
    assert port.said(f"more than {MAX_UNLINKED_BYTES} bytes before a Hello")


async def test_frames_beyond_a_turn_are_processed_later_also_those_that_arrive_meanwhile(
    port: Port, connections: list[Recorded], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(link_connection, "MAX_LINK_TURN_SECONDS", 0.0)
    who = port.member("studio")
    line, connection = await open_connection(port, connections, who)
    line.send(hello(who))
    await line.until(Welcome)
    reports = [a_report(number) for number in range(1, 5)]
    del connection.processed[:]
    connection.data_received(b"".join(map(encode, reports[:3])))
    assert connection.processed == reports[:1]
    connection.data_received(encode(reports[3]))
    await port.until(lambda: len(connection.processed) == 4)
    assert connection.processed == reports


async def test_a_peer_above_the_rate_of_enrolments_gets_the_reason(tmp_path: Path):
    async with opened(tmp_path, RateLimit(1, 1)) as port:
        await port.dial()
        assert the_no(await (await port.dial()).ended()).reason == "too_often"


async def test_frames_after_a_refusal_are_ignored(port: Port):
    who = port.member("studio")
    port.application.nodes.administration.remove_node(who.node)
    line = await port.dial(who)
    line.send(hello(who), a_report())
    assert [type(frame) for frame in await line.ended()] == [Denied]
    assert not port.said("before Hello")


@pytest.mark.parametrize("size", [0, PIECE, PIECE + 1])
async def test_an_answer_to_a_query_is_sent_in_pieces_of_which_the_last_is_marked(
    port: Port, connections: list[Recorded], monkeypatch: pytest.MonkeyPatch, size: int
):
    monkeypatch.setattr(link_connection, "QUERY_CHUNK_BYTES", PIECE)
    line, connection = await open_connection(port, connections, port.member("studio"))
    connection.send_answer(b"x" * size)
    chunks = await line.ended()
    assert [(len(chunk.payload), chunk.last) for chunk in chunks if isinstance(chunk, FetchChunk)] == [
        (min(PIECE, size - begin), begin + PIECE >= size) for begin in range(0, max(1, size), PIECE)
    ]

"""Connections to the cluster port: bytes before a Hello, rate of enrolments, frames after a refusal.

Also frames of one link that exceed the time of a turn of the loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster.links import link_connection, link_server
from coordinator.cluster.links.link_budgets import BUDGET_RETRY_SECONDS, REPORTS_BURST
from coordinator.cluster.links.link_connection import MAX_UNLINKED_BYTES, Connection, ConnectionHandler
from coordinator.joining.rate_limit import RateLimit
from coordinator.state.database import Database
from node.agent.enrollment import enroll
from node.agent.identity import NodeIdentity
from tests.support.cluster.cluster_port import Line, Port, a_report, hello, opened, the_no
from tests.support.cluster.enrolment import HARDWARE
from wire.codec import decode, encode, split_into_fragments
from wire.frames import Denied, FetchChunk, Frame, Goodbye, Welcome
from wire.join_token import JoinToken

PIECE = 4096


class Recorded(Connection):
    """Connection that records the frames that it processes."""

    def __init__(self, handler: ConnectionHandler) -> None:
        super().__init__(handler)
        self.processed = list[Frame]()

    def on_frame(self, tag: int, body: bytes) -> None:
        super().on_frame(tag, body)
        self.processed.append(decode(tag, body))


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Record the connections that the cluster port accepts."""
    accepted = list[Recorded]()

    monkeypatch.setattr(link_server, "Connection", lambda handler: accepted.append(Recorded(handler)) or accepted[-1])
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
    transport: Any = connection.transport
    assert not transport.is_reading(), "its further bytes wait in the kernel"
    connection.data_received(encode(reports[3]))
    await port.until(lambda: len(connection.processed) == 4)
    assert connection.processed == reports
    line.send(a_report(5))
    await port.until(lambda: len(connection.processed) == 5)
    assert connection.processed[-1] == a_report(5), "it is read again"


class Clock:
    """A clock that is `step` seconds later at each reading, and counts its readings."""

    def __init__(self, step: float) -> None:
        self.step, self.readings = step, 0

    def perf_counter(self) -> float:
        self.readings += 1
        return self.readings * self.step


@pytest.mark.parametrize(("step", "sizes"), [(0.0, [9]), (0.3, [4, 4, 1])])
async def test_a_turn_has_its_time_for_frames_and_an_idle_connection_takes_no_turns(
    port: Port, connections: list[Recorded], monkeypatch: pytest.MonkeyPatch, step: float, sizes: list[int]
):
    who, clock = port.member("studio"), Clock(step * link_connection.MAX_LINK_TURN_SECONDS)
    line, connection = await open_connection(port, connections, who)
    line.send(hello(who))
    await line.until(Welcome)
    await asyncio.sleep(0)
    monkeypatch.setattr(link_connection, "time", clock)
    turns, before = list[int](), len(connection.processed)
    connection.data_received(encode(a_report()) * 9)
    for _ in range(12):
        turns.append(len(connection.processed) - before - sum(turns))
        await asyncio.sleep(0)
    assert [size for size in turns if size] == sizes
    readings = clock.readings
    for _ in range(5):
        await asyncio.sleep(0)
    assert clock.readings == readings


@pytest.mark.parametrize("closed_here", [False, True])
async def test_frames_that_wait_for_a_turn_outlast_the_end_of_the_connection_unless_it_was_ended_here(
    port: Port, connections: list[Recorded], monkeypatch: pytest.MonkeyPatch, closed_here: bool
):
    monkeypatch.setattr(link_connection, "MAX_LINK_TURN_SECONDS", 0.0)
    who = port.member("studio")
    line, connection = await open_connection(port, connections, who)
    line.send(hello(who))
    await line.until(Welcome)
    del connection.processed[:]
    reports = [a_report(number) for number in range(1, 4)]
    connection.data_received(b"".join(map(encode, reports)))
    assert connection.transport is not None
    if closed_here:
        connection.abort("the test ends it")
    else:
        connection.transport.abort()
    await port.until(lambda: port.state(who) == "lost")
    assert connection.processed == reports[: 1 if closed_here else 3]


async def test_a_link_has_no_limit_of_all_its_bytes(port: Port, connections: list[Recorded]):
    who = port.member("studio")
    line, connection = await open_connection(port, connections, who)
    line.send(hello(who))
    await line.until(Welcome)
    line.send(FetchChunk(9, bytes(MAX_UNLINKED_BYTES)), FetchChunk(9, bytes(MAX_UNLINKED_BYTES)), a_report(1))
    await port.until(lambda: a_report(1) in connection.processed)
    assert connection.open


@pytest.fixture
async def deadlines(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.TimerHandle]:
    """Record the timers of the first frame, one for each connection."""
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def record(delay: float, *call: Any, **options: Any) -> asyncio.TimerHandle:
        timer = call_later(delay, *call, **options)
        if delay == link_connection.UNLINKED_TIMEOUT_SECONDS and "_abort_too_slow" in repr(call):
            timers.append(timer)
        return timer

    monkeypatch.setattr(loop, "call_later", record)
    return timers


async def test_a_peer_that_says_nothing_is_disconnected(port: Port, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link_connection, "UNLINKED_TIMEOUT_SECONDS", 0.05)
    silent = await port.dial(port.member("mute"))
    assert await silent.ended() == []
    assert port.said("no Hello within 0 s")


@pytest.mark.parametrize("becomes", ["link", "relay", "enrolment"])
async def test_a_first_frame_ends_the_time_for_it(
    deadlines: list[asyncio.TimerHandle], port: Port, connections: list[Recorded], becomes: str
):
    if becomes == "enrolment":
        await port.dial()
        await port.until(lambda: deadlines)
        assert deadlines[0].cancelled(), "a person may take longer to approve it"
        return
    who = port.member("studio")
    line, connection = await open_connection(port, connections, who)
    (deadline,) = deadlines
    assert not deadline.cancelled()
    if becomes == "link":
        line.send(hello(who))
        await line.until(Welcome)
    else:
        assert connection.release() is connection.transport
        connection.data_received(encode(Goodbye("later")))
        assert connection.open, "its frames are for another protocol"
    assert deadline.cancelled()


async def test_a_flood_of_reports_ends_the_link_with_the_reason(
    port: Port, connections: list[Recorded], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(link_connection, "CLOSE_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(link_connection, "MAX_LINK_TURN_SECONDS", 60.0)
    who = port.member("studio")
    line, connection = await open_connection(port, connections, who)
    line.send(hello(who))
    await line.until(Welcome)
    connection.data_received(encode(FetchChunk(9, b"")) * int(REPORTS_BURST))
    assert connection.open, "only reports have this limit"
    connection.data_received(encode(a_report()) * (2 * int(REPORTS_BURST)))
    denied = the_no(await line.ended())
    assert (denied.reason, denied.retry_after, denied.final) == ("too_many", BUDGET_RETRY_SECONDS, False)
    assert denied.message.startswith("too many reports: ")


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
    connection.data_received(encode(Goodbye("later")))
    chunks = await line.ended()
    await port.until(lambda: port.said("the query was answered"))
    assert not port.said("before Hello"), "one query has one answer"
    assert [(len(chunk.payload), chunk.last) for chunk in chunks if isinstance(chunk, FetchChunk)] == [
        (min(PIECE, size - begin), begin + PIECE >= size) for begin in range(0, max(1, size), PIECE)
    ]


# enrolment


async def join(port: Port, folder: Path, token: JoinToken | None, on_code: Callable[[str], None]) -> NodeIdentity:
    """Join as a machine does, with a token or with a code for `on_code`."""
    return await enroll(
        f"127.0.0.1:{port.number}",
        token,
        name="studio",
        machine="m1",
        hardware=HARDWARE,
        folder=folder,
        on_code=lambda code, _: on_code(code),
    )


@pytest.mark.parametrize("has_token", [True, False], ids=["token", "code"])
async def test_a_machine_gets_its_certificate_once_its_record_is_on_disk_and_may_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: list[Recorded], has_token: bool
):
    flush, reached, stored = Database.flush, asyncio.Event(), asyncio.Event()

    async def flush_later(store: Database) -> None:
        reached.set()
        await stored.wait()
        await flush(store)

    monkeypatch.setattr(Database, "flush", flush_later)
    async with opened(tmp_path / "cluster") as port:
        application, loop = port.application, asyncio.get_running_loop()

        def approve(code: str) -> None:
            loop.call_later(0.01, lambda: application.approvals.approve(code, loop.time()))

        token = application.admin.tokens.create() if has_token else None
        joining = asyncio.create_task(join(port, tmp_path / "node", token, approve))
        await asyncio.wait_for(reached.wait(), 30)
        for _ in range(5):
            await asyncio.sleep(0)
        assert (joining.done(), len(application.registry.pool.members)) == (False, 1)
        connections[-1].data_received(b"more")
        assert connections[-1].open, "neither more bytes nor the deadline end it before its certificate is sent"
        stored.set()
        identity = await asyncio.wait_for(joining, 30)
        assert list(application.registry.pool.members) == [identity.node]
        await port.until(lambda: application.nodes.server.count_unlinked() == 0)
        assert port.said("the enrolment ended")
        await port.link(identity)
        await port.until(lambda: port.state(identity) == "ready")


async def test_a_machine_that_goes_away_while_it_waits_for_approval_is_forgotten(port: Port, tmp_path: Path):
    codes, loop = asyncio.Queue[str](), asyncio.get_running_loop()
    joining = asyncio.create_task(join(port, tmp_path / "node", None, codes.put_nowait))
    await asyncio.wait_for(codes.get(), 30)
    assert len(port.application.approvals.list_waiting(loop.time())) == 1
    joining.cancel()
    await port.until(lambda: not port.application.approvals.list_waiting(loop.time()))
    assert port.application.registry.pool.members == {}

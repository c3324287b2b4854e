"""The agent: its search for a coordinator, sleep and wake-up, and its reports, answers and goodbyes on a link."""

import asyncio
import os
import signal
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from coordinator.tls.cluster_ca import ClusterCa
from host.node_marks import PauseFile, PauseRecord
from node.agent import reporter
from node.agent.agent import Agent
from node.agent.identity import load_identity, new_request, store_address, store_identity
from node.agent.link_keeper import ExpelledError, LinkTimeouts
from node.agent.reporter import shorten_report
from node.assembly import Node, assemble
from node.engine_process.timeouts import SupervisorTimeouts
from node.memory.limits import LeaseHolder, Limiter
from node.memory.sensor import measure_footprint, open_machine
from node.settings import resolve_settings
from tests.support.cluster.cluster_port import Line, Port, opened
from tests.support.cluster.enrolment import HARDWARE
from tests.support.cluster.node import unstarted_node
from wire.bounds import MAX_MODELS
from wire.codec import encode
from wire.frames import (
    TAGS,
    Admitted,
    Cancel,
    CertificateRenewed,
    Deltas,
    Denied,
    Failed,
    FetchChunk,
    FetchRequest,
    Finished,
    Generate,
    GenerationParams,
    Goodbye,
    GoodbyeReason,
    Hello,
    LeaseRefused,
    LeaseRequest,
    Message,
    Ping,
    Refusal,
    RenewCertificate,
    Report,
    UnloadModel,
    Welcome,
)
from wire.histogram import GateMeasures, NodeMeasures
from wire.identity import PROTOCOL, NodeId
from wire.report import EngineState, Memory, Model
from wire.units import GIB, MIB

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

DIALS = 3
"""Maximum connections in one round: to the last address, to verify a discovered address, to use it."""
LEAST_PAUSE = 0.25


def node_of(
    folder: Path, authority: ClusterCa, addresses: list[str], link_timeouts: LinkTimeouts | None = None
) -> Node:
    """Make a node that found its coordinator at these addresses, at the last one most recently."""
    request = new_request("studio")
    certificate = authority.sign_request(request.csr, NodeId("n1"), "studio")
    identity = store_identity(folder / "identity", request, certificate, authority.cluster, authority.ca, "m1")
    for address in addresses:
        identity = store_address(identity, address)
    return unstarted_node(identity, folder / "state", link_timeouts)


@asynccontextmanager
async def running(
    folder: Path, serve: Serve, *, tls: bool, link_timeouts: LinkTimeouts | None = None, latest: str = ""
) -> AsyncGenerator[tuple[Agent, asyncio.Task[None]]]:
    """Run an agent whose coordinator's address is served by `serve`. `latest`: a stored address that is dialed
    first."""
    authority = ClusterCa(folder / "authority", time.time)
    context: ssl.SSLContext | None = authority.get_server_context() if tls else None
    writers = list[asyncio.StreamWriter]()

    async def kept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await serve(reader, writer)

    server = await asyncio.start_server(kept, "127.0.0.1", 0, ssl=context)
    addresses = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}", *filter(None, [latest])]
    agent = node_of(folder, authority, addresses, link_timeouts).agent
    task = asyncio.create_task(agent.run())
    try:
        yield agent, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()
        for writer in writers:
            writer.transport.abort()


async def test_a_silent_address_does_not_hold_up_the_end(tmp_path: Path) -> None:
    dialled = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.set()
        while await reader.read(4096):
            pass
        writer.close()

    async with running(tmp_path, silent, tls=False) as (agent, task):
        await asyncio.wait_for(dialled.wait(), 30)
        began = time.monotonic()
        await agent.stop(0.0)
        await asyncio.wait_for(task, 30)
        assert time.monotonic() - began < 4


@pytest.mark.parametrize("address", ["127.0.0.1:http", "127.0.0.1:99999", "studio..local:8081"])
async def test_an_address_that_cannot_be_dialled_ends_no_node(tmp_path: Path, address: str) -> None:
    dialled = asyncio.Event()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.set()
        writer.close()

    async with running(tmp_path, hang_up, tls=True, latest=address) as (_, task):
        await asyncio.wait({asyncio.ensure_future(dialled.wait()), task}, return_when=asyncio.FIRST_COMPLETED)
        assert not task.done()


async def test_a_coordinator_that_hangs_up_is_dialled_with_pauses(tmp_path: Path) -> None:
    dialled = list[float]()
    enough = asyncio.Event()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.append(time.monotonic())
        if len(dialled) == DIALS + 1:  # in the second round or later
            enough.set()
        writer.close()

    async with running(tmp_path, hang_up, tls=True):
        await asyncio.wait_for(enough.wait(), 20)
    assert dialled[-1] - dialled[0] > LEAST_PAUSE


async def test_a_link_without_frames_is_aborted_and_opened_again(tmp_path: Path) -> None:
    ends: asyncio.Queue[float] = asyncio.Queue()

    async def fall_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(Ping(1)))
        began = time.monotonic()
        with suppress(ConnectionError):
            while await reader.read(4096):
                pass
        ends.put_nowait(time.monotonic() - began)

    async with running(tmp_path, fall_silent, tls=True, link_timeouts=LinkTimeouts(silence=1.0)):
        for _ in range(2):
            assert 0.9 < await asyncio.wait_for(ends.get(), 20) < 10


# sleep and measures


@asynccontextmanager
async def linked(folder: Path, link_timeouts: LinkTimeouts | None = None) -> AsyncIterator[tuple[Port, Agent, str]]:
    """Run an agent that is linked to a real coordinator; yield both and the node's id."""
    async with opened(folder) as port:
        who = store_address(port.member("studio"), f"127.0.0.1:{port.number}")
        agent = unstarted_node(who, folder / "state", link_timeouts=link_timeouts).agent
        running = asyncio.create_task(agent.run())
        try:
            await asyncio.wait_for(agent.welcomed.wait(), 30)
            yield port, agent, who.node
        finally:
            await agent.stop(0.0)
            await asyncio.wait_for(running, 30)


def state(port: Port) -> str:
    (member,) = port.application.registry.pool.members.values()
    return member.state.value


async def test_a_machine_that_sleeps_sends_goodbye_dials_no_address_and_is_back_when_it_wakes(tmp_path: Path) -> None:
    async with linked(tmp_path) as (port, agent, _):
        links, server = port.application.nodes.links.table, port.application.nodes.server
        said = asyncio.Event()
        agent.fall_asleep(said.set)
        await asyncio.wait_for(said.wait(), 30)
        await port.until(lambda: state(port) == "asleep")
        assert (len(links), server.established) == (0, 1)
        agent.wake_up(3600.0)
        await port.until(lambda: len(links) == 1)
        assert server.established == 2
        assert state(port) != "asleep"


async def test_links_from_before_a_sleep_that_was_not_announced_end_at_wake(tmp_path: Path) -> None:
    async with linked(tmp_path) as (port, agent, _):
        links, server = port.application.nodes.links.table, port.application.nodes.server
        agent.wake_up(120.0)
        await port.until(lambda: server.established == 2)
        await port.until(lambda: len(links) == 1)


async def test_an_agent_that_sleeps_can_be_stopped(tmp_path: Path) -> None:
    async with linked(tmp_path) as (_, agent, _):
        agent.fall_asleep(lambda: None)


async def test_a_paused_mac_decides_again_at_once_when_a_request_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.sharing.controller.POLL_INTERVAL_SECONDS", 3600.0)
    lines: asyncio.Queue[Line] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.put_nowait(Line(reader, writer))

    authority = ClusterCa(tmp_path / "authority", time.time)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=authority.get_server_context())
    node = node_of(tmp_path, authority, [f"127.0.0.1:{server.sockets[0].getsockname()[1]}"])
    pause, sharing = PauseFile(tmp_path / "state" / "node"), node.sharing
    pause.write(PauseRecord(None, "ann"))
    await sharing.start()
    running = asyncio.create_task(node.agent.run())
    line = await asyncio.wait_for(lines.get(), 30)
    await line.until(Hello)
    line.send(Welcome(1, authority.cluster, "home", time.time(), "0", (), 0, b""))
    report = await line.until(Report)
    assert (report.sharing.paused, report.draining) == (True, True), "an older coordinator knows only `draining`"
    pause.remove()  # as `cluster resume` does
    line.send(UnloadModel(1, "scripted-1"))
    assert (await line.until(Refusal)).request == 1
    async with asyncio.timeout(10):
        while (await line.until(Report)).sharing.paused:
            pass
    await sharing.stop()
    await node.agent.stop(0.0)
    await running
    server.close()


async def test_an_agent_reports_its_own_cpu_and_footprint_and_refuses_unknown_sources(tmp_path: Path) -> None:
    async with linked(tmp_path) as (port, _, node):
        fetches = port.application.nodes.links.fetches
        before = time.process_time()
        told = b"".join([piece async for piece in fetches.fetch_source(NodeId(node), "metrics", 16384)])
        measures = msgspec.msgpack.decode(told, type=NodeMeasures)
        assert before <= measures.agent_cpu <= time.process_time()
        own = measure_footprint((os.getpid(),))
        assert own is not None
        assert 0.8 < measures.agent_phys / own < 1.25, "of this process alone, whatever its group"
        assert measures.gate == GateMeasures(), "no engine has reported yet"
        with pytest.raises(LookupError, match="cannot provide 'weather'"):
            await anext(fetches.fetch_source(NodeId(node), "weather", 100))


# Linked to a scripted coordinator, with a real engine process


class Mac:
    """An agent with its engine, and its connections. Its certificate was signed `age_days` ago."""

    def __init__(
        self, folder: Path, *, age_days: int = 0, link_timeouts: LinkTimeouts | None = None, **settings: object
    ) -> None:
        named = {
            "engine.kind": "scripted",
            "memory.cap": "90GiB",
            "memory.margin": "1GiB",
            "node.report_busy_seconds": 0.1,
            "node.report_idle_seconds": 5.0,
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        resolved = resolve_settings([("test", named)])
        self.folder = folder
        self.link_timeouts = link_timeouts
        self.more_addresses: tuple[str, ...] = ()
        """Addresses of the coordinator in the next Welcome, besides its own."""
        self.authority = ClusterCa(folder / "authority", lambda: time.time() - age_days * 86400)
        self.settings = resolved.value
        machine = open_machine(self.settings)
        self.limiter = Limiter(self.settings, machine, resolved.origins)
        self.lines: asyncio.Queue[Line] = asyncio.Queue()
        self.log = folder / "logs" / "node.log"
        self.log.parent.mkdir(exist_ok=True)
        self.log.write_bytes(b"one\ntwo\nthree\n")

    async def start(self) -> Line:
        """Start engine and agent; return the link after its Welcome."""
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.authority.get_server_context())
        self.address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        request = new_request("studio")
        certificate = self.authority.sign_request(request.csr, NodeId("n1"), "studio")
        identity = store_identity(
            self.folder / "identity", request, certificate, self.authority.cluster, self.authority.ca, "m1"
        )
        self.node = assemble(
            store_address(identity, self.address),
            self.settings,
            self.folder,
            open_machine(self.settings),
            self.limiter,
            HARDWARE,
            version="1.2.3",
            engine_timeouts=SupervisorTimeouts(first=0.01, longest=0.01),
            link_timeouts=self.link_timeouts,
        )
        self.agent, self.supervisor, self.poll = self.node.agent, self.node.supervisor, self.node.poll
        self.poll.start()
        await self.supervisor.start()
        self.running = asyncio.create_task(self.agent.run())
        return await self.linked()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.lines.put_nowait(Line(reader, writer))

    async def linked(self, *, generation: int = 0) -> Line:
        """Wait for the next connection, and send a Welcome."""
        line = await asyncio.wait_for(self.lines.get(), 30)
        self.hello = await line.until(Hello)
        line.send(
            Welcome(
                1,
                self.authority.cluster,
                "home",
                time.time(),
                "1.2.3",
                (self.address, *self.more_addresses),
                generation,
                self.authority.seal_generation(generation),
            )
        )
        return line

    async def ready(self, line: Line) -> Report:
        """Wait for a report of an engine that can answer."""
        while True:
            report = await line.until(Report)
            if report.engine.state == "ready" and report.memory.armed:
                return report

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self.poll.stop()
        await self.supervisor.stop()
        self.server.close()


@pytest.fixture
async def mac(tmp_path: Path) -> AsyncIterator[Callable[..., Mac]]:
    made: list[Mac] = []

    def make(*, age_days: int = 0, link_timeouts: LinkTimeouts | None = None, **settings: object) -> Mac:
        made.append(Mac(tmp_path, age_days=age_days, link_timeouts=link_timeouts, **settings))
        return made[-1]

    yield make
    for one in made:
        await one.stop()


def asks(number: int, tokens: int = 4) -> Generate:
    return Generate(
        number, number, f"r{number}", "scripted-1", (Message("user", "hi"),), GenerationParams(max_tokens=tokens), 0
    )


async def send_pings(line: Line) -> None:
    """Send a ping every 0.1 s, until the task is cancelled."""
    while True:
        line.send(Ping(1))
        await asyncio.sleep(0.1)


async def test_a_hello_identifies_the_node_and_a_report_has_the_inputs_of_the_gate(mac: Callable[..., Mac]):
    one = mac()
    one.more_addresses = ("127.0.0.1:9", "127.0.0.1:10")
    line = await one.start()
    hello = one.hello
    assert (hello.protocol, hello.node, hello.name, hello.machine, hello.version) == (
        PROTOCOL,
        "n1",
        "studio",
        "m1",
        "1.2.3",
    )
    assert (hello.hardware, hello.takeover, hello.generation) == (HARDWARE, False, 0)
    assert set(hello.frames) == TAGS.keys()
    report = await one.ready(line)
    identity = load_identity(one.folder / "identity", "m1")
    assert identity is not None
    assert identity.addresses == (one.address, *one.more_addresses), "the dialed address is the first to dial again"
    snapshot = one.supervisor.reports.latest
    assert snapshot is not None
    assert [model.name for model in report.models] == [model.name for model in snapshot.models]
    assert (report.memory.cap, report.memory.margin, report.memory.ceiling) == (90 * GIB, GIB, snapshot.memory.ceiling)
    assert report.memory.phys is not None
    assert 0 <= report.memory.age < 5
    assert (report.draining, report.acked_seq, report.engine.kind, report.engine.restarts) == (False, 0, "scripted", 0)
    assert (report.enforcement.polls > 0, report.enforcement.cap_bound_by) == (True, "setting")
    assert report.system.source == "pretended"
    one.supervisor.reports.store(snapshot, time.monotonic() - 100.0)
    one.node.reporter.send()
    while (await line.until(Report)).memory.age < 100.0:
        pass
    assert not one.node.reporter.is_busy()
    one.limiter.begin_lease(GIB, LeaseHolder.VIDEO)
    assert one.node.reporter.is_busy(), "memory that is leased is in use"


async def test_reports_count_up_and_repeat_the_newest_ping_and_acknowledge_what_the_engine_judged(
    mac: Callable[..., Mac],
):
    one = mac()
    line = await one.start()
    first = await one.ready(line)
    line.send(asks(41), asks(42))
    line.send(Ping(77))
    finished = {(await line.until(Finished)).request for _ in range(2)}
    assert finished == {41, 42}
    while (report := await line.until(Report)).acked_seq < 42 or report.engine.running:
        pass
    assert report.acked_seq == 42
    assert report.sequence > first.sequence
    assert report.ping == 77
    assert report.engine.waiting == 0


async def test_models_that_reports_leave_out_are_logged_once(mac: Callable[..., Mac], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reporter, "MAX_MODELS", 0)
    one = mac(node__report_idle_seconds=0.1)
    with capture_logs() as logs:
        line = await one.start()
        while not (found := [entry for entry in logs if entry["event"] == "models not reported"]):
            assert (await line.until(Report)).models == ()
        for _ in range(5):
            await line.until(Report)
    again = [entry for entry in logs if entry["event"] == "models not reported"]
    assert again == found[:1]
    assert (again[0]["count"], again[0]["reported"]) == (1, 0)


async def test_a_request_is_answered_on_its_link_and_cancelled_in_the_engine_when_the_link_is_lost(
    mac: Callable[..., Mac],
):
    one = mac(engine__scripted__step_ms=5)
    line = await one.start()
    await one.ready(line)
    line.send(asks(1, 20_000), asks(2, 20_000))
    assert (await line.until(Admitted)).request == 1
    await line.until(Deltas)
    assert one.supervisor.live == {1, 2}
    line.send(Cancel(1))
    while one.supervisor.live != {2}:  # noqa: ASYNC110  what the agent forwards is heard nowhere else
        await asyncio.sleep(0.01)
    line.close()
    again = await one.linked()
    assert one.supervisor.live == frozenset()
    report = await one.ready(again)
    assert one.hello.takeover is False
    assert any(model.loaded for model in report.models), "models stay, whatever becomes of a link"
    again.send(asks(3))
    assert (await again.until(Finished)).request == 3


async def test_an_engine_that_dies_is_reported_and_its_requests_fail_on_their_link(mac: Callable[..., Mac]):
    one = mac(engine__scripted__step_ms=5)
    line = await one.start()
    await one.ready(line)
    line.send(asks(1, 20_000))
    await line.until(Deltas)
    engine = one.supervisor.pid
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    failed = await line.until(Failed)
    assert (failed.request, "SIGKILL" in failed.message) == (1, True)
    while (report := await line.until(Report)).engine.restarts == 0:
        pass
    assert "SIGKILL" in report.engine.cause
    while report.engine.state != "ready" or not report.memory.armed:
        if not report.memory.armed:
            assert (report.memory.cap, report.memory.phys, report.memory.headroom) == (90 * GIB, None, None)
        report = await line.until(Report)
    line.send(asks(2))
    assert (await line.until(Finished)).request == 2


async def test_a_stop_waits_for_a_request_sends_goodbye_and_ends_longer_ones(mac: Callable[..., Mac]):
    one = mac(engine__scripted__step_ms=5)
    line = await one.start()
    await one.ready(line)
    line.send(asks(1, 30), asks(2, 20_000))
    await line.until(Deltas)
    stopping = asyncio.create_task(one.agent.stop(20.0, GoodbyeReason.LEAVE))
    assert (await line.until(Report)).draining
    assert (await line.until(Finished)).request == 1
    line.send(Cancel(2))
    async with asyncio.timeout(10):
        assert (await line.until(Goodbye)).reason == GoodbyeReason.LEAVE
    await asyncio.wait_for(stopping, 30)
    await asyncio.wait_for(one.running, 30)


async def test_a_stop_waits_no_longer_than_its_limit(mac: Callable[..., Mac]):
    one = mac(engine__scripted__step_ms=5)
    line = await one.start()
    await one.ready(line)
    line.send(asks(1, 20_000))
    await line.until(Deltas)
    began = time.monotonic()
    one.node.video.lease_manager.handle_request(LeaseRequest("l1", 1, "job", "wan", GIB, b"{}"))
    await one.agent.stop(0.2)
    assert 0.2 <= time.monotonic() - began < 3
    frames = await line.ended()
    draining = next(at for at, frame in enumerate(frames) if isinstance(frame, Report) and frame.draining)
    after = [frame for frame in frames[draining:] if isinstance(frame, LeaseRefused | Goodbye)]
    assert [type(frame) for frame in after] == [LeaseRefused, Goodbye], "no request arrives while a lease ends"
    assert isinstance(after[-1], Goodbye)
    assert after[-1].reason == "stopping"
    while one.supervisor.live:  # noqa: ASYNC110  what the agent forwards is heard nowhere else
        await asyncio.sleep(0.01)


async def test_a_sleeping_mac_sends_goodbye_and_connects_again_when_it_wakes(mac: Callable[..., Mac]):
    one = mac()
    line = await one.start()
    await one.ready(line)
    said = asyncio.Event()
    one.agent.fall_asleep(said.set)
    assert (await line.until(Goodbye)).reason == "asleep"
    await line.ended()
    await asyncio.wait_for(said.wait(), 30)
    assert one.lines.empty()
    one.agent.wake_up(30.0)
    await one.ready(await one.linked())


async def test_questions_are_answered_by_name(mac: Callable[..., Mac]):
    one = mac()
    line = await one.start()
    await one.ready(line)

    async def answers(ask: FetchRequest) -> tuple[bytes, FetchChunk]:
        line.send(ask)
        data, last = b"", await line.until(FetchChunk)
        while not last.last:
            data, last = data + last.payload, await line.until(FetchChunk)
        assert last.number == ask.number
        return data + last.payload, last

    whole, end = await answers(FetchRequest(1, "logs", 0, 1000))
    assert (whole, end.next, end.end) == (b"one\ntwo\nthree\n", 0, 14)
    some, end = await answers(FetchRequest(2, "logs", 4, 4))
    assert (some, end.next, end.end) == (b"two\n", 8, 8)
    newest, end = await answers(FetchRequest(3, "logs", -8, 1000))
    assert newest == b"three\n", "whole lines only"
    found, end = await answers(FetchRequest(4, "metrics", 0, 1000))
    measures = msgspec.msgpack.decode(found, type=NodeMeasures)
    assert measures.agent_cpu > 0
    assert measures.agent_phys > 10 * MIB, "of this process alone, whichever group it is in"
    for number, what in ((5, "secrets"), (6, "artifact:l-1/video.mp4")):
        found, end = await answers(FetchRequest(number, what, 0, 1000))
        assert (found, end.error) == (b"", f"this node cannot provide {what!r}")


async def test_a_final_denial_ends_the_agent_and_another_makes_it_wait(mac: Callable[..., Mac]):
    one = mac()
    line = await one.start()
    line.send(Denied("linked_elsewhere", "another process is linked", retry_after=0.2))
    line.writer.close()
    again = await one.linked()
    again.send(Denied("removed", "join again with a new token", final=True))
    again.writer.close()
    with pytest.raises(ExpelledError, match="join again") as caught:
        await asyncio.wait_for(one.running, 30)
    assert caught.value.reason == "removed"


async def test_a_superseded_link_is_closed_although_the_identity_cannot_be_written(
    mac: Callable[..., Mac], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("node.agent.link_keeper.FIND_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr("node.agent.link_keeper.SUPERSEDED_ADDRESS_SECONDS", 0.3)
    one = mac()
    line = await one.start()
    await one.ready(line)
    (one.folder / "identity" / f"identity.json.{os.getpid()}.new").mkdir()
    with capture_logs() as logs:
        line.send(Denied("superseded", "a restored coordinator is newer"))
        await line.ended()
    assert "address not removed" in [entry["event"] for entry in logs]
    assert not one.running.done()
    await one.ready(await asyncio.wait_for(one.linked(), 10))  # the address is dialed again after a time


async def test_a_link_works_although_its_address_cannot_be_stored(mac: Callable[..., Mac]):
    one = mac()
    line = await one.start()
    await one.ready(line)
    (one.folder / "identity" / f"identity.json.{os.getpid()}.new").mkdir()
    one.more_addresses = ("127.0.0.1:9",)
    with capture_logs() as logs:
        line.writer.close()
        await one.ready(await one.linked())
    assert "address not stored" in [entry["event"] for entry in logs]
    assert not one.running.done()


async def test_a_generation_that_cannot_be_stored_ends_no_link_and_is_stored_later(mac: Callable[..., Mac]):
    one = mac()
    line = await one.start()
    blocking = one.folder / "identity" / f"identity.json.{os.getpid()}.new"
    blocking.mkdir()
    with capture_logs() as logs:
        line.writer.close()
        line = await one.linked(generation=7)
        await one.ready(line)
    assert [entry["generation"] for entry in logs if entry["event"] == "generation not stored"] == [7]
    blocking.rmdir()
    line.writer.close()
    await one.ready(await one.linked(generation=7))
    assert one.hello.generation == 7
    assert one.authority.is_sealed(7, one.hello.seal), "an older coordinator believes no number alone"
    stored = load_identity(one.folder / "identity", "m1")
    assert stored is not None
    assert stored.generation == 7
    assert one.authority.is_sealed(7, stored.seal)


async def test_a_renewal_whose_key_cannot_be_stored_ends_no_link_and_is_tried_again(mac: Callable[..., Mac]):
    one = mac(age_days=61)
    line = await one.start()
    await line.until(RenewCertificate)
    blocking = one.folder / "identity" / f"next.key.{os.getpid()}.new"
    blocking.mkdir()
    with capture_logs() as logs:
        line.writer.close()
        line = await one.linked()
        await one.ready(line)
    assert "no renewal of the certificate requested" in [entry["event"] for entry in logs]
    blocking.rmdir()
    line.writer.close()
    await (await one.linked()).until(RenewCertificate)


@pytest.mark.parametrize("answer", ["another request's", "not writable", "none"])
async def test_a_renewal_without_a_certificate_to_install_ends_no_link_and_is_tried_again(
    mac: Callable[..., Mac], answer: str
):
    one = mac(age_days=61, link_timeouts=LinkTimeouts(silence=3.0, renewal=0.1))
    line = await one.start()
    asked = await line.until(RenewCertificate)
    if answer == "not writable":
        (one.folder / "identity" / f"node.pem.{os.getpid()}.new").mkdir()
    csr = asked.csr if answer == "not writable" else new_request("studio").csr
    with capture_logs() as logs:
        if answer != "none":
            line.send(CertificateRenewed(one.authority.sign_request(csr, NodeId("n1"), "studio")))
        pings = asyncio.create_task(send_pings(line))  # the coordinator is never silent
        again = await line.until(RenewCertificate)
        pings.cancel()
    assert again.csr != asked.csr
    assert [entry["event"] for entry in logs].count("renewed certificate not installed") == (answer != "none")


async def test_a_renewed_certificate_opens_a_second_link_that_takes_over(mac: Callable[..., Mac]):
    one = mac(age_days=61)
    line = await one.start()
    assert not one.hello.takeover
    asked = await line.until(RenewCertificate)
    renewed = one.authority.sign_request(asked.csr, NodeId("n1"), "studio")
    line.send(CertificateRenewed(renewed))
    again = await one.linked()
    assert one.hello.takeover
    shown: ssl.SSLObject = again.writer.get_extra_info("ssl_object")
    assert shown.getpeercert(binary_form=True) == renewed
    await one.ready(again)


async def test_a_renewal_is_requested_once_until_its_time_is_over(mac: Callable[..., Mac]):
    one = mac(age_days=61, link_timeouts=LinkTimeouts(silence=1.0))
    line = await one.start()
    await line.until(RenewCertificate)
    pings = asyncio.create_task(send_pings(line))  # the link is checked once a second
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await line.until(RenewCertificate)
    pings.cancel()


async def test_a_frame_that_only_nodes_send_ends_the_link(mac: Callable[..., Mac]):
    one = mac()
    line = await one.start()
    await one.ready(line)
    line.send(Finished(1, ("stop",), 1, 1))
    await line.ended()
    await one.linked()


def test_a_report_too_long_for_the_coordinator_keeps_what_is_loaded():
    models = tuple(Model(f"m{number}", loaded=number == MAX_MODELS + 5) for number in range(MAX_MODELS + 10))
    report = shorten_report(Report(1, Memory(), EngineState(), models))
    assert len(report.models) == MAX_MODELS
    assert report.models[0].name == f"m{MAX_MODELS + 5}"
    short = Report(1, Memory(), EngineState(), models[:3])
    assert shorten_report(short) is short

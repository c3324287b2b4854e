"""The keeper of the links alone, between two addresses of a cluster: which one is dialed, and which link is closed."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from coordinator.tls.cluster_ca import ClusterCa
from node.agent.connection import CoordinatorLink
from node.agent.identity import load_identity, new_csr, new_request, store_address, store_identity
from node.agent.link_keeper import LinkKeeper, LinkTimeouts
from node.agent.links import CoordinatorLinks
from node.illegal_events import IllegalEvents
from tests.support.cluster.cluster_port import Ended, Line
from tests.support.cluster.enrolment import HARDWARE
from wire.codec import decode
from wire.frames import CertificateRenewed, Denied, GoodbyeReason, Hello
from wire.identity import NodeId


class Coordinators:
    """Two addresses of one cluster, and the keeper of a node that has dialed the second one last."""

    async def start(self, folder: Path) -> None:
        self.folder = folder / "identity"
        self.authority = ClusterCa(folder / "authority", time.time)
        self.lines: asyncio.Queue[tuple[str, Line]] = asyncio.Queue()
        """Connections in the order of their arrival, with the address at which each arrived."""
        self.writers = list[asyncio.StreamWriter]()
        self.servers = [await self._listen(), await self._listen()]
        self.older, self.latest = (f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in self.servers)
        request = new_request("studio")
        certificate = self.authority.sign_request(request.csr, NodeId("n1"), "studio")
        identity = store_identity(self.folder, request, certificate, self.authority.cluster, self.authority.ca, "m1")
        self.identity = store_address(store_address(identity, self.older), self.latest)
        self.keeper = LinkKeeper(
            self.identity,
            "1.2.3",
            HARDWARE,
            CoordinatorLinks(),
            receive=self._receive,
            cancel=lambda request: None,
            illegal_events=IllegalEvents(),
            timeouts=LinkTimeouts(),
        )

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.authority.get_server_context())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = writer.get_extra_info("sockname")
        self.lines.put_nowait((f"{host}:{port}", Line(reader, writer)))
        self.writers.append(writer)

    def _receive(self, link: CoordinatorLink, tag: int, body: bytes) -> None:
        frame = decode(tag, body)
        assert isinstance(frame, Denied)
        self.keeper.receive_denial(link, frame)

    async def take_line(self) -> tuple[str, Line]:
        """Return the next connection and its address."""
        return await asyncio.wait_for(self.lines.get(), 30)

    def stop(self) -> None:
        for each in (*self.servers, *self.writers):
            each.close()


@pytest.fixture
async def coordinators(tmp_path: Path) -> AsyncIterator[Coordinators]:
    both = Coordinators()
    await both.start(tmp_path)
    yield both
    both.stop()


async def test_a_superseded_address_that_cannot_be_removed_is_not_dialed_next(coordinators: Coordinators) -> None:
    keeper = coordinators.keeper
    running = asyncio.create_task(keeper.run())
    address, line = await coordinators.take_line()
    await line.until(Hello)
    assert address == coordinators.latest
    (coordinators.folder / f"identity.json.{os.getpid()}.new").mkdir()  # the address stays in the identity
    line.send(Denied("superseded", "a restored coordinator is newer", True))
    await line.ended()
    keeper.fall_asleep(lambda: None)
    keeper.wake_up(1.0)  # dials at once
    address, line = await coordinators.take_line()
    assert address == coordinators.older
    await keeper.stop(0.0, GoodbyeReason.STOPPING)
    await running
    await line.ended()


async def test_a_node_that_is_denied_for_now_waits_as_long_as_the_coordinator_wants(coordinators: Coordinators) -> None:
    running = asyncio.create_task(coordinators.keeper.run())
    _, line = await coordinators.take_line()
    await line.until(Hello)
    denied_at = time.monotonic()
    line.send(Denied("full", "the cluster has too many nodes", False, 1.0))
    coordinators.writers[-1].close()
    await coordinators.take_line()
    assert time.monotonic() - denied_at >= 1.0, "the first delay is at most 0.75 s"
    await coordinators.keeper.stop(0.0, GoodbyeReason.STOPPING)
    await running


async def test_an_address_that_answered_is_dialed_first_the_next_time(coordinators: Coordinators) -> None:
    coordinators.servers[1].close()
    running, hello = asyncio.create_task(coordinators.keeper.run()), None
    while hello is None:
        address, line = await coordinators.take_line()
        assert address == coordinators.older
        with suppress(Ended):  # a connection that only proves the coordinator
            hello = await line.until(Hello)
    stored = load_identity(coordinators.folder, "m1")
    assert stored is not None
    assert stored.addresses[0] == coordinators.older
    await coordinators.keeper.stop(0.0, GoodbyeReason.STOPPING)
    await running


async def test_a_link_that_opens_after_the_machine_fell_asleep_is_closed_without_a_frame(
    coordinators: Coordinators,
) -> None:
    csr = new_csr(coordinators.identity)
    renewed = CertificateRenewed(coordinators.authority.sign_request(csr, NodeId("n1"), "studio"))
    coordinators.keeper.take_over(renewed)  # dials in a task of its own
    coordinators.keeper.fall_asleep(lambda: None)
    _, line = await coordinators.take_line()
    with pytest.raises(Ended):
        await line.next()


async def test_a_coordinator_that_is_not_reached_is_one_warning_with_the_cause(
    coordinators: Coordinators, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.agent.link_keeper.FIND_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr("node.agent.connection.UNREACHED_ROUNDS", 1)
    coordinators.stop()
    with capture_logs() as logs:
        running = asyncio.create_task(coordinators.keeper.run())
        async with asyncio.timeout(30):
            while [entry["event"] for entry in logs].count("dial failed") < 2:  # noqa: ASYNC110  a log has no event
                await asyncio.sleep(0.01)
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [(one["event"], one["address"]) for one in warnings] == [
        ("coordinator not reached, dialing continues", coordinators.latest)
    ]
    assert "Connect call failed" in warnings[0]["error"]
    await coordinators.keeper.stop(0.0, GoodbyeReason.STOPPING)
    await running

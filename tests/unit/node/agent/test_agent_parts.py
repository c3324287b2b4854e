"""The agent passes changes of the engine, a Welcome, orders and a stop on to the other parts of its node."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.tls.cluster_ca import ClusterCa
from host.node_marks import PauseFile, PauseRecord
from node.agent.identity import new_request, store_address, store_identity
from node.assembly import Node
from node.illegal_events import IllegalEvents
from tests.support.cluster.cluster_port import Line
from tests.support.cluster.node import unstarted_node
from wire.frames import ClearCache, Hello, LoadModel, PauseNode, Refusal, Report, Welcome
from wire.identity import NodeId
from wire.refusals import RefusalCode


class Mac:
    """A node whose agent alone runs, and the coordinator's end of its link."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = ClusterCa(folder / "authority", time.time)
        self.lines: asyncio.Queue[Line] = asyncio.Queue()

    async def start(self) -> None:
        """Start the coordinator's end, and make the node."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.lines.put_nowait(Line(reader, writer))

        self.server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=self.authority.get_server_context())
        request = new_request("studio")
        certificate = self.authority.sign_request(request.csr, NodeId("n1"), "studio")
        identity = store_identity(
            self.folder / "identity", request, certificate, self.authority.cluster, self.authority.ca, "m1"
        )
        address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        self.ready: list[str] = []
        """Addresses with which the node has announced that it is ready."""
        self.node: Node = unstarted_node(
            store_address(identity, address), self.folder / "state", on_ready=self.ready.append
        )

    async def link(self) -> Line:
        """Run the agent, and return its link after the Welcome."""
        self.running = asyncio.create_task(self.node.agent.run())
        line = await asyncio.wait_for(self.lines.get(), 30)
        await line.until(Hello)
        line.send(Welcome(1, self.authority.cluster, "home", time.time(), "0", (), 0, b""))
        return line


@pytest.fixture
async def mac(tmp_path: Path) -> AsyncIterator[Mac]:
    made = Mac(tmp_path)
    await made.start()
    yield made
    await made.node.agent.stop(0.0)
    made.server.close()


@pytest.fixture
def told(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls of the parts that follow the engine, the link and the stop, in their order."""
    seen: list[str] = []
    node = mac.node

    def record(part: object, method: str, name: str) -> None:
        original = getattr(part, method)

        def noted(*arguments: object) -> object:
            seen.append(name)
            return original(*arguments)

        monkeypatch.setattr(part, method, noted)

    record(node.poll, "poll_sooner", "poll")
    record(node.video.lease_manager, "on_engine_change", "lease")
    record(node.reporter, "send_soon", "report")
    record(node.reporter, "send", "report now")
    record(node.reporter, "report_draining", "draining")
    record(node.video.lease_manager, "stop", "end of the lease")
    record(node.model_orders, "stop", "end of the orders")
    record(node.video.lease_manager, "resend_ends", "ends of leases")
    record(node.model_orders, "resend_ends", "ends of orders")
    return seen


async def test_a_change_of_the_engine_reaches_poll_lease_and_report(mac: Mac, told: list[str]) -> None:
    mac.node.agent.on_engine_change()
    assert {"poll", "lease", "report"} <= set(told)


async def test_a_stop_is_reported_before_leases_and_orders_end(mac: Mac, told: list[str]) -> None:
    await mac.node.agent.stop(0.0)
    assert [name for name in told if name in ("draining", "end of the lease", "end of the orders")] == [
        "draining",
        "end of the lease",
        "end of the orders",
    ]


async def test_a_new_link_gets_the_ends_that_an_older_one_may_have_lost(mac: Mac, told: list[str]) -> None:
    line = await mac.link()
    await line.until(Report)
    assert {"ends of leases", "ends of orders"} <= set(told)


async def test_a_linked_node_is_not_ready_without_its_engine(mac: Mac) -> None:
    line = await mac.link()
    await line.until(Report)
    mac.node.agent.on_engine_change()
    assert mac.ready == []


async def test_a_report_has_the_number_of_events_that_were_refused(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    line = await mac.link()
    assert (await line.until(Report)).illegal_events == 0
    monkeypatch.setattr(IllegalEvents, "count", property(lambda _: 3), raising=False)
    mac.node.reporter.send()
    async with asyncio.timeout(20):
        while (await line.until(Report)).illegal_events != 3:
            pass


async def test_a_paused_mac_refuses_requests_with_its_name_and_the_time_and_still_frees_memory(mac: Mac) -> None:
    PauseFile(mac.folder / "state" / "node").write(PauseRecord(time.time() + 600.0, "ann"))
    await mac.node.sharing.start()
    line = await mac.link()
    line.send(LoadModel(1, "scripted-1"), ClearCache(2, "scripted-1"))
    refused, cleared = [(await line.until(Refusal)) for _ in range(2)]
    assert (refused.request, refused.refused.code, refused.refused.node) == (1, RefusalCode.DRAINING, "studio")
    assert refused.refused.retry_after == pytest.approx(600.0, abs=60.0)
    assert (cleared.request, cleared.refused.code) == (2, RefusalCode.NOT_READY), "only the engine is missing"
    await mac.node.sharing.stop()


async def test_an_order_to_pause_is_answered_by_a_report_although_nothing_changes(mac: Mac, told: list[str]) -> None:
    line = await mac.link()
    await line.until(Report)
    told.clear()
    line.send(PauseNode(0.0))
    async with asyncio.timeout(30):
        while "report now" not in told:  # noqa: ASYNC110  what the agent calls is heard nowhere else
            await asyncio.sleep(0.01)

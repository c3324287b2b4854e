"""Video over a real link: reports to the coordinator, the download of a clip, and reports after a gap in the link."""

import asyncio
import hashlib
import itertools
import json
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from coordinator.tls.cluster_ca import ClusterCa
from node.agent.agent import Agent, AgentParts
from node.agent.fetch import FetchAnswers
from node.agent.identity import new_request, store_address, store_identity
from node.agent.link_keeper import LinkTimeouts
from node.agent.links import CoordinatorLinks
from node.agent.reporter import Reporter
from node.agent.sharing_effects import SharingEffects
from node.hub.file_orders import ModelFileOrders
from node.hub.quantization.quantizer import Quantizer
from node.sharing.controller import SharingController
from tests.support.cluster.cluster_port import Line
from tests.support.cluster.enrolment import HARDWARE
from tests.support.video.standin import standin
from tests.support.video.studio import JOB, LEASE, LONG, Node, flat
from wire.frames import (
    FetchChunk,
    FetchRequest,
    Frame,
    Goodbye,
    Hello,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRelease,
    LeaseRequest,
    Ping,
    Report,
    Welcome,
)
from wire.identity import NodeId
from wire.state_machine import IllegalEventError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
WINDOW = 5_000
PACED = {**JOB, "prompt": f"pace=0.4 take={64 * 2**20}"}
"""A job that is visible in each phase, and uses memory."""


class Linked(Node):
    """A node whose agent dials a coordinator's address."""

    agent: Agent
    reporter: Reporter

    def link(self, authority: ClusterCa, address: str) -> Agent:
        request = new_request("studio")
        certificate = authority.sign_request(request.csr, NodeId("n1"), "studio")
        identity = store_identity(self.folder / "identity", request, certificate, authority.cluster, authority.ca, "m1")
        self.links = CoordinatorLinks()
        quantizer = Quantizer(self.settings, self.folder, self.limiter, self.poll, self.supervisor)
        effects = SharingEffects(self.links, self.supervisor, self.lender, quantizer, self.studio.pause)
        sharing = SharingController(self.settings.sharing, self.folder, effects)
        self.reporter = Reporter(
            self.settings,
            HARDWARE,
            self.links,
            supervisor=self.supervisor,
            limiter=self.limiter,
            poll=self.poll,
            lease_manager=self.lender,
            ray=self.studio.ray,
            sharing=sharing,
            illegal_events=self.illegal_events,
        )
        parts = AgentParts(
            links=self.links,
            supervisor=self.supervisor,
            poll=self.poll,
            lease_manager=self.lender,
            ray=self.studio.ray,
            sharing=sharing,
            reporter=self.reporter,
            illegal_events=self.illegal_events,
            quantizer=quantizer,
            answers=FetchAnswers(self.folder / "log", self.supervisor, self.lender),
            model_orders=ModelFileOrders(
                self.settings.models,
                identity,
                self.folder,
                self.links,
                quantizer,
                is_loaded=self.supervisor.reports.has_model_in_memory,
                on_change=lambda: None,
            ),
        )
        self.agent = Agent(
            store_address(identity, address),
            "0",
            HARDWARE,
            parts,
            on_ready=lambda address: None,
            link_timeouts=LinkTimeouts(),
        )
        return self.agent

    def _said(self, frame: Frame) -> None:
        super()._said(frame)
        self.links.send(frame)

    def _video_changed(self) -> None:
        self.reporter.send_soon()

    def _change(self) -> None:
        self.agent.on_engine_change()
        self._changed.set()


@asynccontextmanager
async def linked(folder: Path) -> AsyncGenerator[tuple[Linked, "asyncio.Queue[Line]"]]:
    """Run a node, and yield each link that it opens, welcomed."""
    authority = ClusterCa(folder / "authority", time.time)
    lines: asyncio.Queue[Line] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        await line.until(Hello)
        line.send(Welcome(1, authority.cluster, "home", time.time(), "0"))
        lines.put_nowait(line)
        for nonce in itertools.count(1):
            if writer.is_closing():
                return
            line.send(Ping(nonce))
            await asyncio.sleep(1.0)

    context: ssl.SSLContext = authority.get_server_context()
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    quick = flat(
        node__report_busy_seconds=0.1,
        node__report_idle_seconds=0.2,
        worker__environments=str(standin(folder).environments),
    )
    node = Linked(folder / "node", quick)
    agent = node.link(authority, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await node.start()
    task = asyncio.create_task(agent.run())
    try:
        yield node, lines
    finally:
        await node.lender.stop()
        await agent.stop(0.0)
        await asyncio.gather(task, return_exceptions=True)
        await node.stop()
        server.close()


async def fetched(line: Line, name: str) -> bytes:
    """Fetch a file in windows, as a coordinator does."""
    data, offset = b"", 0
    for number in range(1, 100):
        line.send(FetchRequest(number, f"artifact:l-1/{name}", offset, WINDOW))
        while not (answer := await line.until(FetchChunk, 30)).last:
            data += answer.payload
        assert answer.error == ""
        offset = answer.next
        if not offset:
            break
    return data


async def test_a_coordinator_lends_watches_fetches_and_acknowledges_over_the_link(tmp_path: Path):
    async with linked(tmp_path) as (node, lines):
        line = await asyncio.wait_for(lines.get(), 20)
        report = await line.until(Report, 20)
        assert (report.video.ready, report.video.cause, report.video.leases) == (True, "", ())
        (package,) = report.video.packages
        assert (package.name, package.engine, package.experts, package.cause) == ("tiny-wan", "0.18.14", 2, "")
        before = report.memory.ceiling

        line.send(LeaseRequest("l-1", 1, "video_1", "tiny-wan", LEASE, msgspec.json.encode(PACED)))
        granted = await line.until(LeaseGranted, 20)
        assert (granted.lease, granted.generation) == ("l-1", 1)
        phases, footprints, ceilings = set[str](), list[int](), set[int]()
        while True:
            frame = await line.next(60)
            if isinstance(frame, LeaseEnded):
                ended = frame
                break
            if isinstance(frame, Report) and frame.video.leases:
                (state,) = frame.video.leases
                phases.add(state.phase)
                footprints.append(frame.system.worker)
                if state.phase in ("loading", "denoising"):
                    ceilings.add(frame.memory.ceiling)
        assert {"loading", "denoising"} <= phases
        assert max(footprints) > 50 * 2**20, "the worker's footprint is reported"
        assert ceilings == {before - LEASE}
        assert ended.code == "completed"

        line.writer.close()
        line = await asyncio.wait_for(lines.get(), 30)
        assert await line.until(LeaseEnded, 20) == ended, "the end is sent again, because it was not acknowledged"
        for one in ended.artifacts:
            data = await fetched(line, one.name)
            assert (len(data), hashlib.sha256(data).digest()) == (one.size, one.sha256)
        line.send(FetchRequest(500, "artifact:l-1/../../leases.json", 0, WINDOW))
        refused = await line.until(FetchChunk, 20)
        assert (refused.last, refused.payload, bool(refused.error)) == (True, b"", True)
        assert json.loads(ended.made)["frames"] == 9

        line.send(LeaseRelease("l-1", 1, "acknowledged"))
        while (report := await line.until(Report, 20)).video.leases:
            pass
        assert report.memory.ceiling == before
        line.send(LeaseRelease("l-9", 1, "cancelled"))
        assert (await line.until(LeaseEnded, 20)).code == "worker_lost", "the node reports an unknown lease as lost"
        line.send(LeaseRequest("l-1", 1, "video_1", "tiny-wan", LEASE, b"{}"))
        assert (await line.until(LeaseRefused, 20)).code == "lease_superseded"

        node.illegal_events.record("lease", IllegalEventError("the lease is idle: GrantCompleted() cannot happen"))
        while (await line.until(Report, 20)).illegal_events != 1:
            pass


async def test_a_stopping_node_drains_then_ends_its_job_then_signs_off(tmp_path: Path):
    async with linked(tmp_path) as (node, lines):
        line = await asyncio.wait_for(lines.get(), 20)
        line.send(LeaseRequest("l-1", 1, "video_1", "tiny-wan", LEASE, msgspec.json.encode(LONG)))
        await line.until(LeaseGranted, 20)
        await node.agent.stop(0.0)
        frames = await line.ended(20)
        (draining,) = [at for at, frame in enumerate(frames) if isinstance(frame, Report) and frame.draining][:1]
        (ended,) = [at for at, frame in enumerate(frames) if isinstance(frame, LeaseEnded)]
        (goodbye,) = [at for at, frame in enumerate(frames) if isinstance(frame, Goodbye)]
        assert draining < ended < goodbye, "nothing new is sent to the node while its worker ends"
        assert [frame.code for frame in frames if isinstance(frame, LeaseEnded)] == ["node_stopping"]

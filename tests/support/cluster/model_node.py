"""A node whose model files are ordered by a scripted coordinator, over a real link. Its engine is the scripted one."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from coordinator.tls.cluster_ca import ClusterCa
from node.agent.identity import NodeIdentity, new_request, store_address, store_identity
from node.assembly import assemble
from node.engine_process.timeouts import SupervisorTimeouts
from node.hub.child_messages import ClusterFiles
from node.memory.limits import Limiter
from node.memory.sensor import open_machine
from node.settings import resolve_settings
from tests.support.cluster.cluster_port import Line
from tests.support.cluster.enrolment import HARDWARE
from wire.frames import Frame, Hello, ModelOrderEnded, ModelOrderProgress, Report, Welcome
from wire.identity import NodeId

F = TypeVar("F", bound=Frame)


def make_identity(folder: Path, authority: ClusterCa, node: str) -> NodeIdentity:
    """Store the identity of a member in a folder, and return the identity."""
    request = new_request(node)
    certificate = authority.sign_request(request.csr, NodeId(node), node)
    return store_identity(folder / node, request, certificate, authority.cluster, authority.ca, "m1")


def get_files(identity: NodeIdentity) -> ClusterFiles:
    """Return the files of an identity, for TLS between nodes."""
    return ClusterFiles(cluster=identity.cluster, ca=identity.ca, certificate=str(identity.folder / "node.pem"))


class ModelNode:
    """An agent with its engine, linked to this test. `links` has each further link after its Welcome."""

    def __init__(self, folder: Path, model_folders: Sequence[Path] = ()) -> None:
        resolved = resolve_settings(
            [
                (
                    "test",
                    {
                        "engine.kind": "scripted",
                        "memory.cap": "90GiB",
                        "memory.margin": "1GiB",
                        "models.folders": [str(one) for one in model_folders],
                    },
                )
            ]
        )
        self.folder = folder
        self.authority = ClusterCa(folder / "authority", time.time)
        self.links: asyncio.Queue[Line] = asyncio.Queue()
        self.welcoming = asyncio.Event()
        """Set while new links get their Welcome."""
        self.welcoming.set()
        self._settings, self._origins = resolved.value, resolved.origins

    async def start(self) -> Line:
        """Start the node; return its link."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self.authority.get_server_context())
        address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        identity = store_address(make_identity(self.folder, self.authority, "n1"), address)
        machine = open_machine(self._settings)
        self._node = assemble(
            identity,
            self._settings,
            self.folder / "state",
            machine,
            Limiter(self._settings, machine, self._origins),
            HARDWARE,
            version="1.2.3",
            engine_timeouts=SupervisorTimeouts(first=0.01, longest=0.01),
        )
        self._node.poll.start()
        await self._node.supervisor.start()
        self._running = asyncio.create_task(self._node.agent.run())
        return await self.next_link()

    async def next_link(self) -> Line:
        """Return the next link after its Welcome."""
        return await asyncio.wait_for(self.links.get(), 30)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        await line.until(Hello)
        await self.welcoming.wait()
        line.send(Welcome(1, self.authority.cluster, "home", time.time(), "1.2.3", (), 0, b""))
        self.links.put_nowait(line)

    def is_working(self) -> bool:
        """Return whether the node has work, which prevents the sleep of its Mac."""
        return self._node.is_working()

    async def stop(self) -> None:
        """End the node and its processes."""
        await self._node.agent.stop(0.0)
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._node.poll.stop()
        await self._node.supervisor.stop()
        self._server.close()


async def wait_end(line: Line, order: int) -> tuple[ModelOrderEnded, list[ModelOrderProgress]]:
    """Return the end of an order, with its progress before."""
    progress = list[ModelOrderProgress]()
    while True:
        frame = await line.next()
        if isinstance(frame, ModelOrderProgress) and frame.order == order:
            progress.append(frame)
        if isinstance(frame, ModelOrderEnded) and frame.order == order:
            return frame, progress


async def wait_ready(line: Line) -> Report:
    """Return the first report of an engine that is ready."""
    while True:
        report = await line.until(Report)
        if report.engine.state == "ready" and report.models:
            return report

"""A coordinator in this process as `coordinator.run` starts it, which listens on its endpoint and its cluster port."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from coordinator.backup.generation_fence import GenerationFence, SupersededMark
from coordinator.http.listen import open_listener
from coordinator.observe.event_log import EventLog
from coordinator.startup.cluster import ClusterSide, start_cluster
from coordinator.startup.endpoint import Endpoint, create_endpoint, create_local_key, serve_http
from coordinator.startup.options import RunOptions
from coordinator.startup.state import CoordinatorState, Credentials, load_credentials
from coordinator.state.database import Database
from coordinator.state.rows import MemberRow
from coordinator.state.settings import CoordinatorSettings
from coordinator.tls.cluster_ca import ClusterCa
from node.agent.identity import NodeIdentity, create_client_context
from tests.support.cluster.cluster_port import Line, a_report, hello
from tests.support.cluster.enrolment import HARDWARE
from tests.support.cluster.model_node import make_identity
from wire.certificate import read_certificate
from wire.frames import Report, Welcome

EPOCH = 7
VERSION = "1.0"


@dataclass(frozen=True)
class Started:
    """Parts of a coordinator that serves its endpoint and its cluster port."""

    folder: Path
    state: CoordinatorState
    access: Credentials
    cluster: ClusterSide
    endpoint: Endpoint
    superseded: list[SupersededMark]
    """Proofs of newer coordinators that nodes have sent."""

    @property
    def url(self) -> str:
        return self.endpoint.address.build_local_url()

    def client(self, *scopes: str) -> httpx.AsyncClient:
        """Return a client with a key of these scopes, or without a key."""
        key = self.access.admin.create_key("test", list(scopes), None)["key"] if scopes else ""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, trust_env=False, timeout=30)

    def add_member(self, name: str) -> NodeIdentity:
        """Add a node to the cluster as if it had joined, and return its identity."""
        identity = make_identity(self.folder, self.state.authority, name)
        serial = read_certificate(identity.certificate).serial
        row = MemberRow(identity.node, name, identity.machine, HARDWARE, serial, time.time())
        self.state.store.members.put(row)
        self.cluster.nodes.registry.add_member(row)
        return identity

    async def dial(self, identity: NodeIdentity) -> Line:
        """Open a connection of a node to the cluster port."""
        context = create_client_context(identity)
        return Line(*await asyncio.open_connection("127.0.0.1", self.cluster.port, ssl=context))

    @asynccontextmanager
    async def linked(self, identity: NodeIdentity, report: Report | None = None) -> AsyncIterator[tuple[Line, Welcome]]:
        """Link a node and wait until it may get requests. Yield its link and the welcome of the coordinator."""
        line = await self.dial(identity)
        try:
            line.send(hello(identity))
            welcome = await line.until(Welcome)
            line.send(report or a_report())
            async with asyncio.timeout(30):
                await self.cluster.nodes.registry.wait_until_node_answers(lambda: identity.node)
            yield line, welcome
        finally:
            line.close()


@asynccontextmanager
async def started(
    folder: Path, settings: CoordinatorSettings | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Started]:
    """Start a coordinator with a new cluster in `folder`, whose endpoint listens on `host`."""
    settings = settings or CoordinatorSettings()
    options = RunOptions(folder, (host, 0), ("127.0.0.1", 0), local_node=False, node_arguments=(), settings=settings)
    async with AsyncExitStack() as stack:
        listener = open_listener(host, 0)
        stack.callback(listener.close)
        store, authority = Database(folder), ClusterCa(folder / "authority", time.time)
        stack.callback(store.close)
        store.create_cluster(authority.cluster, "lab")
        fence = GenerationFence(authority, 0)
        state = CoordinatorState(folder, folder / "x.log", EventLog(), store, authority, fence, True, EPOCH, VERSION)
        access = load_credentials(state, settings.http, host)
        superseded = list[SupersededMark]()
        cluster = await start_cluster(options, state, access, superseded.append, stack)
        endpoint = create_endpoint(options, folder, cluster.port, listener)
        await serve_http(options, state, access, cluster, endpoint, stack)
        create_local_key(state, access, endpoint, stack)
        yield Started(folder, state, access, cluster, endpoint, superseded)

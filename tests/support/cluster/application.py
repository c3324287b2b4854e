"""The coordinator's HTTP application on real collaborators, built like `coordinator.run` but without ports."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.alerts.evaluator import ConditionEvaluator
from coordinator.api.control import ControlApi, Observability
from coordinator.api.server_info import ServerInfo
from coordinator.backup.generation_fence import GenerationFence, SupersededMark
from coordinator.cluster.assembly import NodePool, assemble_pool, create_links
from coordinator.cluster.links.link_admission import CoordinatorIdentity
from coordinator.cluster.model_operations import ModelOperations
from coordinator.cluster.registry import Registry
from coordinator.http.listen import ListenerAddress
from coordinator.http.origin_check import OriginCheck, PrivateResponses
from coordinator.joining.join_approvals import ApprovalQueue
from coordinator.joining.join_tokens import JoinTokens
from coordinator.joining.rate_limit import RateLimit
from coordinator.metrics.metrics_source import MetricsSource
from coordinator.model_tools.benchmark_records import BenchmarkRecords
from coordinator.models.hub_client import HubClient
from coordinator.models.pull_controller import PullController
from coordinator.models.wish_runner import WishRunner
from coordinator.observe.event_log import EventLog
from coordinator.observe.load_history import LoadHistory
from coordinator.state.access_admin import AccessAdmin, load_pepper
from coordinator.state.database import Database
from coordinator.state.settings import CoordinatorSettings
from coordinator.tls.cluster_ca import ClusterCa
from coordinator.tls.https_config import read_https_validity
from coordinator.ui.browser_sessions import BrowserSessions
from coordinator.ui.static_files import PageApp
from coordinator.video.api import VideoApp
from coordinator.video.controller import VideoController
from coordinator.video.fanout import ListenerFanout
from coordinator.video.settings import VideoSettings
from router.admission.api_keys import KeyRing
from router.admission.rate_limits import RateLimits
from router.dispatch.dispatcher import Dispatcher
from router.http.app import RouterApp, build_openapi_paths
from tests.support.cluster.loopback_cluster import PEPPER, LoopbackCluster


@dataclass(frozen=True, slots=True)
class Application:
    """The complete ASGI application, its control API, and the administration that makes its keys."""

    app: RouterApp
    api: ControlApi
    admin: AccessAdmin
    authority: ClusterCa
    store: Database
    nodes: NodePool
    dispatcher: Dispatcher
    conductor: VideoController
    load: LoadHistory
    wishes: WishRunner
    pulls: PullController
    approvals: ApprovalQueue
    benchmarks: BenchmarkRecords
    superseded: list[SupersededMark]
    """Proofs of newer coordinators that nodes have sent."""

    @property
    def registry(self) -> Registry:
        return self.nodes.registry

    def document(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        return self.api.app.openapi()


@asynccontextmanager
async def application(
    folder: Path,
    limit: RateLimit | None = None,
    over: LoopbackCluster | None = None,
    video: VideoSettings | None = None,
    host: str = "127.0.0.1",
) -> AsyncGenerator[Application]:
    """Yield the application over a new cluster in `folder`.

    With `over` the application serves loopback nodes through the complete HTTP stack of `coordinator.run`. `host` is
    the listening host that its addresses have; nothing listens there.
    """
    with ExitStack() as stack:
        store = Database(folder)
        stack.callback(store.close)
        authority = ClusterCa(folder / "authority", time.time)
        store.create_cluster(authority.cluster, "home")
        tokens, approvals, pepper = JoinTokens(store, authority.ca, time.time), ApprovalQueue(), load_pepper(folder, 0)
        ring = KeyRing(pepper)
        if over is not None:
            ring, pepper = over.keys, PEPPER
        admin = AccessAdmin(store, tokens, ring, pepper, time.time)
        links, superseded = create_links(), list[SupersededMark]()
        settings = CoordinatorSettings()
        count = itertools.count(1)
        dispatcher = Dispatcher(
            links.table.send,
            settings.router,
            clock=time.monotonic,
            numbers=lambda: (number := next(count), number),
            quotas=RateLimits(ring.get_limits),
        )
        if over is not None:
            dispatcher = over.dispatcher
            over.limits = ring.get_limits
        illegal_events = dispatcher.counters.illegal_events
        conductor = VideoController(
            folder, video or VideoSettings(), links.table.send, links.fetches.fetch_source, illegal_events
        )
        pulls = PullController(folder, HubClient(settings.hub), links.table.send, links.transfers, 1, illegal_events)
        stack.callback(pulls.close)
        loads = ModelOperations(dispatcher, time.monotonic)
        wishes = WishRunner(store.wishes, dispatcher, loads, time.monotonic)
        nodes = assemble_pool(
            store,
            GenerationFence(authority, store.meta.generation),
            CoordinatorIdentity("home", "0", 1),
            tokens,
            approvals,
            links,
            ListenerFanout(dispatcher, conductor, pulls, wishes.wake),
            illegal_events,
            wall=time.time,
            on_superseded=superseded.append,
            enrollment_limit=limit,
        )
        stack.callback(nodes.registry.close)
        facts = ServerInfo(
            "home",
            "0",
            1,
            ListenerAddress("http", host, 8080),
            ListenerAddress("macpool", host, 8081),
            authority.cluster,
            0.0,
        )
        conditions = ConditionEvaluator()
        metrics = MetricsSource(
            nodes,
            dispatcher,
            ring,
            "0",
            partial(read_https_validity, authority, None),
            conditions.get_flags,
            conductor.take_snapshot,
            wishes.take_snapshot,
            store.count_unwritten,
        )
        benchmarks = BenchmarkRecords(folder)
        visitors, load = BrowserSessions(ring, pepper, time.time), LoadHistory()
        api = ControlApi(
            nodes,
            admin,
            approvals,
            ring,
            dispatcher,
            loads,
            wishes,
            conductor,
            pulls,
            benchmarks,
            facts,
            build_openapi_paths(),
            visitors,
            Observability(metrics, conditions, load, EventLog(), folder / "coordinator.log"),
        )
        used = over.settings if over else settings.router
        videos = VideoApp(
            conductor, ring, dispatcher.quotas, used, dispatcher.counters, PageApp(PrivateResponses(api.app))
        )
        door = RouterApp(dispatcher, ring, used, control=videos, forwarder=over.forwarder if over else None)
        if over is not None:
            over.app = OriginCheck(door)
        reconciling = asyncio.create_task(wishes.run())
        try:
            yield Application(
                door,
                api,
                admin,
                authority,
                store,
                nodes,
                dispatcher,
                conductor,
                load,
                wishes,
                pulls,
                approvals,
                benchmarks,
                superseded,
            )
        finally:
            reconciling.cancel()
            await asyncio.gather(reconciling, return_exceptions=True)
            await conductor.close()

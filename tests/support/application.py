"""The coordinator's HTTP application on real collaborators, built like `coordinator.run` but without ports."""

import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.alerts.evaluator import Conditions
from coordinator.api.control import Api, Seen
from coordinator.api.server_info import Facts
from coordinator.cluster.model_operations import Loads
from coordinator.cluster.registry import Registry
from coordinator.http.origin_check import Guard, Private
from coordinator.joining.enrollment import Cluster, Enrolment
from coordinator.joining.join_approvals import Approvals
from coordinator.joining.join_tokens import Tokens
from coordinator.joining.rate_limit import RateLimit
from coordinator.metrics.service import Metrics
from coordinator.observe.event_log import Events
from coordinator.observe.load_history import LoadHistory
from coordinator.state.access_admin import Admin, load_pepper
from coordinator.state.database import Store
from coordinator.state.settings import CoordinatorSettings
from coordinator.tls.cluster_ca import Authority
from coordinator.ui.browser_sessions import Visitors
from coordinator.ui.static_files import Page
from coordinator.video.api import Videos
from coordinator.video.controller import Conductor
from coordinator.video.fanout import Both
from coordinator.video.settings import VideoSettings
from router.admission.api_keys import KeyRing
from router.admission.rate_limits import Quotas
from router.dispatch.dispatcher import Dispatcher
from router.http.app import FrontDoor, openapi_paths
from tests.support.loopback_cluster import PEPPER, LoopbackCluster


@dataclass(frozen=True, slots=True)
class Application:
    """The complete ASGI application, its control API, and the administration that makes its keys."""

    app: FrontDoor
    api: Api
    admin: Admin
    authority: Authority
    store: Store
    registry: Registry
    dispatcher: Dispatcher
    conductor: Conductor
    load: LoadHistory

    def document(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        return self.api.app.openapi()


@asynccontextmanager
async def application(
    folder: Path,
    limit: RateLimit | None = None,
    over: LoopbackCluster | None = None,
    video: VideoSettings | None = None,
) -> AsyncGenerator[Application]:
    """Yield the application over a new cluster in `folder`.

    With `over` the application serves loopback nodes through the complete HTTP stack of `coordinator.run`.
    """
    with ExitStack() as stack:
        store = Store(folder)
        stack.callback(store.close)
        authority = Authority(folder / "authority", time.time)
        store.found(authority.cluster, "home")
        tokens, approvals, pepper = Tokens(store, authority.ca, time.time), Approvals(), load_pepper(folder)
        ring = KeyRing(pepper)
        if over is not None:
            ring, pepper = over.keys, PEPPER
        admin = Admin(store, tokens, ring, pepper, time.time)
        cluster = Cluster("home", authority, tokens, store, approvals, time.time, lambda _: None)
        enrolment = Enrolment(cluster, limit)
        registry = Registry(store, authority, enrolment, name="home", version="0", epoch=1)
        stack.callback(registry.close)
        settings = CoordinatorSettings()
        count = itertools.count(1)
        dispatcher = Dispatcher(
            registry.links.send,
            settings.router,
            clock=time.monotonic,
            numbers=lambda: (number := next(count), number),
            quotas=Quotas(ring.limits),
        )
        if over is not None:
            dispatcher = over.dispatcher
            dispatcher.quotas = Quotas(ring.limits)
        conductor = Conductor(folder, video or VideoSettings(), registry.links)
        registry.placing = Both(dispatcher, conductor)
        facts = Facts("home", "0", 1, "http://127.0.0.1:8080/v1", "macpool://127.0.0.1:8081", authority.cluster, 0.0)
        loads = Loads(dispatcher, time.monotonic)
        metrics, conditions = Metrics(registry, dispatcher, ring, "0", authority.lives), Conditions()
        metrics.conditions = conditions.flags
        visitors, load = Visitors(ring, pepper, time.time), LoadHistory()
        api = Api(
            registry,
            admin,
            approvals,
            ring,
            dispatcher,
            loads,
            conductor,
            facts,
            openapi_paths(),
            visitors,
            Seen(metrics, conditions, load, Events(), folder / "coordinator.log"),
        )
        used = over.settings if over else settings.router
        videos = Videos(conductor, ring, dispatcher.quotas, used, dispatcher.counters, Page(Private(api.app)))
        door = FrontDoor(dispatcher, ring, used, control=videos)
        if over is not None:
            over.app = Guard(door)
        try:
            yield Application(door, api, admin, authority, store, registry, dispatcher, conductor, load)
        finally:
            await conductor.close()

"""Control application: all control routes with their key checks, and the OpenAPI document of all routes.

Only this package uses FastAPI; the inference routes are plain ASGI in `router/http/app.py`. Each `RouteGroup` lists its
routes with their scopes. Only `_add_route` adds a route to the application.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from coordinator.alerts.evaluator import ConditionEvaluator
from coordinator.api.auth import require_scope, wrap_audited
from coordinator.api.body import StrictRoute
from coordinator.api.deferred_commands import DeferredCommands
from coordinator.api.dispatcher_api import DispatcherApi
from coordinator.api.errors import install_error_handlers
from coordinator.api.live_snapshot import SnapshotSources
from coordinator.api.route import PUBLIC_SCOPE, Route
from coordinator.api.routes.benchmarks import BenchmarkRoutes
from coordinator.api.routes.cache import CacheRoutes
from coordinator.api.routes.joining import JoinRoutes
from coordinator.api.routes.keys import KeyRoutes
from coordinator.api.routes.logs_and_events import LogRoutes
from coordinator.api.routes.models import ModelRoutes
from coordinator.api.routes.nodes import NodeRoutes
from coordinator.api.routes.page import PageRoutes
from coordinator.api.routes.pool import PoolRoutes
from coordinator.api.routes.prometheus import PrometheusRoutes
from coordinator.api.routes.pulls import PullRoutes
from coordinator.api.routes.quantizations import QuantizationRoutes
from coordinator.api.routes.requests import RequestRoutes, WallClock
from coordinator.api.routes.videos import VideoRoutes
from coordinator.api.routes.wishes import WishRoutes
from coordinator.api.server_info import ServerInfo
from coordinator.cluster.assembly import NodePool
from coordinator.cluster.model_operations import ModelOperations
from coordinator.joining.join_approvals import ApprovalQueue
from coordinator.metrics.metrics_source import MetricsSource
from coordinator.model_tools.benchmark_records import BenchmarkRecords
from coordinator.models.pull_controller import PullController
from coordinator.models.wish_runner import WishRunner
from coordinator.observe.event_log import EventLog
from coordinator.observe.load_history import LoadHistory
from coordinator.state.access_admin import AccessAdmin
from coordinator.ui.browser_sessions import BrowserSessions
from coordinator.video.controller import VideoController
from router.admission.api_keys import KeyRing
from router.dialects.openapi import build_openapi_schemas


class RouteGroup(Protocol):
    """Group of control routes for one subject, such as `NodeRoutes`."""

    def list_routes(self) -> tuple[Route, ...]:
        """Return the routes of this group."""
        ...


@dataclass(frozen=True, slots=True)
class Observability:
    """Observed state of the pool: metrics, conditions, load of the last hour, events, and the coordinator's log."""

    metrics: MetricsSource
    conditions: ConditionEvaluator
    load: LoadHistory
    events: EventLog
    log_file: Path
    """Log of the coordinator, as JSON lines."""


class ControlApi:
    """Builder of the control application, the ASGI application `app`, from all groups of routes.

    `paths` maps the paths of the inference routes to their OpenAPI path items. The constructor also offers the rows of
    status, nodes and models to members, through `nodes.queries`.
    """

    def __init__(
        self,
        nodes: NodePool,
        admin: AccessAdmin,
        approvals: ApprovalQueue,
        ring: KeyRing,
        traffic: DispatcherApi,
        loads: ModelOperations,
        wishes: WishRunner,
        controller: VideoController,
        pulls: PullController,
        benchmarks: BenchmarkRecords,
        facts: ServerInfo,
        paths: Mapping[str, Any],
        sessions: BrowserSessions,
        observability: Observability,
    ) -> None:
        self._ring = ring
        self._store = admin.store
        self._commands = DeferredCommands()
        pool = PoolRoutes(facts, nodes, traffic, observability.conditions, observability.load)
        members = NodeRoutes(nodes, traffic, admin.store)
        models = ModelRoutes(nodes, loads, ring, traffic.names, benchmarks)
        joins = JoinRoutes(admin, approvals, facts.cluster_address)
        nodes.queries.offer(
            {
                "/api/v1/status": pool.build_status_row,
                "/api/v1/nodes": lambda: {"schema": 1, "nodes": members.build_rows()},
                "/api/v1/models": lambda: models.build_answer(),
            }
        )
        wanted, files = WishRoutes(nodes, wishes, admin.store), PullRoutes(nodes, pulls)
        sections = SnapshotSources(
            pool=pool,
            nodes=members,
            models=models,
            pulls=files,
            wishes=wanted,
            joins=joins,
            commands=self._commands,
            traffic=traffic,
            ring=ring,
            clock=WallClock(traffic.get_time),
        )
        subjects: tuple[RouteGroup, ...] = (
            pool,
            members,
            models,
            CacheRoutes(nodes, loads),
            wanted,
            joins,
            VideoRoutes(nodes.registry, controller, ring),
            files,
            QuantizationRoutes(nodes, pulls.quantizations),
            BenchmarkRoutes(nodes, traffic, benchmarks),
            RequestRoutes(traffic, ring),
            KeyRoutes(admin, ring, traffic),
            PageRoutes(facts.address, sessions, ring, admin.store, sections),
            LogRoutes(observability.log_file, observability.events, admin),
            PrometheusRoutes(observability.metrics, nodes.directory),
        )
        routes = [route for subject in subjects for route in subject.list_routes()]
        self.app = ControlApplication(facts.version, routes, paths)
        for route in routes:
            self._add_route(route)

    def _add_route(self, route: Route) -> None:
        is_open = route.scope == PUBLIC_SCOPE
        handler = wrap_audited(self._store, route.handler) if route.audited else route.handler
        self.app.router.add_api_route(
            route.pattern,
            _wrap_encoded(self._commands.wrap(handler) if route.deferrable else handler),
            methods=[route.method],
            route_class_override=_create_route_class(
                route, None if is_open else require_scope(self._ring, route.scope)
            ),
            openapi_extra={"security": []} if is_open else {"x-scope": route.scope, "security": [{"key": []}]},
            summary=route.summary,
            response_model=None,
        )


def _wrap_encoded(act: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a route handler so that it returns a response instead of a JSON object.

    FastAPI encodes a JSON object on the event loop, in up to a hundred times the time of msgspec.
    """

    @wraps(act)
    async def encode(**arguments: Any) -> Response:
        answer = await act(**arguments)
        if isinstance(answer, Response):
            return answer
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return encode


def _create_route_class(route: Route, check: Callable[[Request], Awaitable[None]] | None) -> type[StrictRoute]:
    """Return a route class with this check and the limits of `route`, because FastAPI builds the instances itself."""
    limits = {"max_body_bytes": route.max_body_bytes, "ends_with_client": route.ends_with_client}
    return type("OpenedRoute", (StrictRoute,), {"check": None if check is None else staticmethod(check), **limits})


class ControlApplication(FastAPI):
    """FastAPI application whose OpenAPI document also describes all answers of `routes`.

    `paths` maps the paths of routes outside the application to their OpenAPI path items. `version` is the version of
    Macpool.
    """

    def __init__(self, version: str, routes: Sequence[Route], paths: Mapping[str, Any]) -> None:
        super().__init__(
            title="Macpool",
            version=version,
            description="The pool's endpoint and its administration.",
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            openapi_url="/api/v1/openapi.json",
        )
        self._described_routes = routes
        self._other_paths = paths
        install_error_handlers(self)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document of the control routes, with all of their answers, and of the routes in `paths`.

        The document is built at the first call.
        """
        if self.openapi_schema is not None:
            return self.openapi_schema
        for route in self.router.routes:
            if isinstance(route, StrictRoute):
                route.build()
        document = super().openapi()
        for route in self._described_routes:
            document["paths"][route.path][route.method.lower()]["responses"] = route.describe_responses()
        for unused in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(unused, None)
        document["paths"].update(self._other_paths)
        document["components"]["schemas"].update(build_openapi_schemas())
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return document

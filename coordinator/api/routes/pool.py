"""Routes of the pool as a whole: status, version, conditions, load history, settings, and the HTTPS CA."""

import time
from typing import Annotated, Any

import msgspec
from fastapi import Query
from fastapi.responses import Response

from coordinator.alerts.evaluator import ConditionEvaluator
from coordinator.alerts.rules import WATCHED
from coordinator.api.dispatcher_api import DispatcherApi
from coordinator.api.errors import ProblemError
from coordinator.api.route import PUBLIC_SCOPE, Content, Route
from coordinator.api.server_info import ServerInfo
from coordinator.cluster.assembly import NodePool
from coordinator.observe.load_history import MAX_POINTS, LoadHistory
from router.errors import Problem
from wire.identity import PROTOCOL

CERTIFICATE = "application/x-pem-file"
"""Media type of a certificate in PEM."""


class PoolRoutes:
    """Routes of the pool as a whole, such as the route of `cluster status`."""

    def __init__(
        self,
        facts: ServerInfo,
        nodes: NodePool,
        traffic: DispatcherApi,
        conditions: ConditionEvaluator,
        load: LoadHistory,
    ) -> None:
        self._facts = facts
        self._nodes = nodes
        self._traffic = traffic
        self._conditions = conditions
        self._load = load

    def list_routes(self) -> tuple[Route, ...]:
        """Return the routes of the pool."""
        return (
            Route("GET", "/api/v1/status", "metrics", self.status),
            Route("GET", "/api/v1/version", "infer", self.version),
            Route("GET", "/api/v1/conditions", "metrics", self.conditions),
            Route("GET", "/api/v1/history", "metrics", self.history),
            Route("GET", "/api/v1/settings", "admin", self.settings),
            Route("GET", "/api/v1/ca.pem", PUBLIC_SCOPE, self.ca, (404,), Content.of_text(CERTIFICATE)),
        )

    async def status(self) -> dict[str, Any]:
        """Return the status of the pool: nodes by state, models, open requests, addresses, warnings and conditions.

        `in_flight` counts requests on nodes, `queued` those that wait for a node. `warnings` includes all `dangers`.
        Conditions are sorted as in `/api/v1/conditions`.
        """
        return self.build_status_row()

    def build_status_row(self) -> dict[str, Any]:
        """Return the current status of the pool, as the body of `/api/v1/status`."""
        facts = self._facts
        return {
            "schema": 1,
            "cluster": {"id": facts.cluster, "name": facts.name},
            "version": facts.version,
            "protocol": PROTOCOL,
            "epoch": facts.epoch,
            "uptime_seconds": round(time.monotonic() - facts.started, 3),
            "base_url": facts.address.build_url() + "/v1",
            "cluster_url": facts.cluster_address.build_url(),
            "nodes": self._nodes.directory.count_states(),
            "models": sorted(self._nodes.registry.build_view().get_served_models()),
            "in_flight": sum(self._traffic.count_in_flight(node) for node in self._nodes.registry.pool.members),
            "queued": self._traffic.count_queued(),
            "self_suspect": self._nodes.registry.pool.self_suspect,
            "warnings": self._nodes.directory.list_warnings(),
            "dangers": self._nodes.directory.list_dangers(),
            "conditions": self.list_active_conditions(),
        }

    def list_active_conditions(self) -> list[dict[str, Any]]:
        """Return the active conditions as rows of the API: critical ones first, then by their start, oldest first."""
        return [condition.to_row() for condition in self._conditions.list_active()]

    async def version(self) -> dict[str, Any]:
        """Return the coordinator's version of Macpool, protocol version and current time (Unix seconds)."""
        return {"schema": 1, "version": self._facts.version, "protocol": PROTOCOL, "time": time.time()}

    async def conditions(self) -> dict[str, Any]:
        """List the active conditions with their start (Unix seconds), meaning and next step.

        Critical conditions come first, then the oldest. The alerts of Prometheus use the same rules. `watched` lists
        the names of all rules.
        """
        return {"schema": 1, "conditions": self.list_active_conditions(), "watched": [rule.name for rule in WATCHED]}

    async def history(self, points: Annotated[int, Query(ge=1, le=MAX_POINTS)] = MAX_POINTS) -> Response:
        """Return the newest `points` points of the load of the whole pool and of each node; null for a gap.

        Points are 10 seconds apart, oldest first, and those of the last hour are kept. Without `points`, all are
        returned. `number` is the sequence number of the newest point; -1 before the first one.
        """
        return Response(
            msgspec.json.encode({"schema": 1, **self.read_load_history(points)}), media_type="application/json"
        )

    def read_load_history(self, points: int) -> dict[str, Any]:
        """Return the newest `points` points of the load of the whole pool and of each node, oldest first.

        Points are 10 s apart; None is a gap (`LoadHistory.to_row`).
        """
        return self._load.to_row(points)

    async def settings(self) -> dict[str, Any]:
        """List the coordinator's settings: key, value, origin and description."""
        return {"schema": 1, "settings": list(self._facts.settings)}

    async def ca(self) -> Response:
        """Return the CA certificate of this endpoint (PEM), which is not secret.

        Raise `ProblemError` 404 if the endpoint has no CA of its own.
        """
        if not self._facts.ca_pem:
            raise ProblemError(Problem(404, "no_authority", "this endpoint has no CA of its own"))
        return Response(self._facts.ca_pem, media_type=CERTIFICATE)

"""Routes for Prometheus, which scrapes nodes through the coordinator, because nodes have no open port for scrapes."""

import msgspec
from fastapi import Request
from fastapi.responses import Response

from coordinator.api.errors import ProblemError
from coordinator.api.route import LIST, TEXT, Route
from coordinator.api.routes.nodes import find_node
from coordinator.cluster.node_directory import NodeDirectory
from coordinator.metrics.metrics_source import MetricsSource, NodeUnreachable
from router.errors import Problem


class PrometheusRoutes:
    """Routes for Prometheus, the only control routes outside /api/v1."""

    def __init__(self, metrics: MetricsSource, directory: NodeDirectory) -> None:
        self._metrics = metrics
        self._directory = directory

    def list_routes(self) -> tuple[Route, ...]:
        """Return the routes of metrics and of service discovery."""
        return (
            Route("GET", "/metrics", "metrics", self.metrics, content=TEXT),
            Route("GET", "/prometheus/sd", "metrics", self.targets, content=LIST),
            Route("GET", "/prometheus/nodes/{node}", "metrics", self.node_metrics, (503,), TEXT),
        )

    async def metrics(self, request: Request) -> Response:
        """Return the coordinator's metrics in Prometheus format."""
        text, kind = await self._metrics.render_pool(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind})

    async def node_metrics(self, node: str, request: Request) -> Response:
        """Return a node's metrics in Prometheus format. `/prometheus/sd` lists the address of this route for each node.

        Raise `ProblemError`: 404 for an unknown node, 503 if the node is absent or does not answer within 3 s.
        """
        node_id, accepted = find_node(self._directory, node), request.headers.get("accept", "")
        try:
            text, kind = await self._metrics.render_node(node_id, accepted)
        except NodeUnreachable as error:
            raise ProblemError(Problem(503, "node_unreachable", str(error))) from None
        return Response(text, headers={"content-type": kind})

    async def targets(self, request: Request) -> Response:
        """List the nodes for Prometheus HTTP service discovery. Prometheus scrapes each node through the coordinator.

        Each target has the host and scheme of this request. Absent nodes are listed, nodes that have left are not.
        """
        targets = self._metrics.list_targets(request.headers["host"], request.url.scheme)
        return Response(msgspec.json.encode(targets), media_type="application/json")

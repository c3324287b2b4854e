"""Routes of benchmarks: measure a model on a node, and list the stored speeds."""

from typing import Annotated, Any

from pydantic import Field

from coordinator.api.body import Body
from coordinator.api.dispatcher_api import DispatcherApi
from coordinator.api.errors import ProblemError
from coordinator.api.route import Route
from coordinator.api.routes.nodes import find_node
from coordinator.cluster.assembly import NodePool
from coordinator.model_tools.benchmark import Benchmark
from coordinator.model_tools.benchmark_records import BenchmarkRecord, BenchmarkRecords
from router.errors import Problem, build_invalid, from_failure, from_refused
from wire.frames import ModelOrderCode
from wire.identity import NodeId, is_valid_model
from wire.refusals import RefusalCode, Refused
from wire.units import show_count


class BenchmarkBody(Body):
    """Body of a benchmark: the model, and the node by name or id."""

    model: Annotated[str, Field(min_length=1, max_length=200)]
    node: Annotated[str, Field(min_length=1, max_length=100)]
    force: bool = False
    """Whether to measure a busy node, whose other requests lower the measured speeds. By default, it is refused."""


class BenchmarkRoutes:
    """Routes of `cluster model bench`."""

    def __init__(self, nodes: NodePool, traffic: DispatcherApi, records: BenchmarkRecords) -> None:
        self._nodes = nodes
        self._traffic = traffic
        self._records = records
        self._measured_nodes: set[NodeId] = set()

    def list_routes(self) -> tuple[Route, ...]:
        """Return the routes to measure a model and to list benchmarks."""
        return (
            Route("POST", "/api/v1/benchmarks", "admin", self.benchmark, (404, 409, 429, 500, 502, 503, 507)),
            Route("GET", "/api/v1/benchmarks", "admin", self.benchmarks),
        )

    async def benchmark(self, body: BenchmarkBody) -> dict[str, Any]:
        """Measure the speeds of a model on a node, with requests of low priority. Return the stored benchmark.

        The node loads the model if necessary. The benchmark replaces the earlier one of the same node, model version,
        operating system and version of Macpool. The measurement continues if the client disconnects.

        Raise `ProblemError`: 400 for an invalid model name, 404 for an unknown node or a model that the node lacks.
        Also: 409 for a busy node without `force`, or during another benchmark of the node; 507 if the result cannot be
        stored. If a request of the measurement fails, its status is used.
        """
        if not is_valid_model(body.model):
            raise ProblemError(build_invalid("model: this cannot be the name of a model", "model"))
        node = find_node(self._nodes.directory, body.node)
        view = self._nodes.registry.get_node_view(node)
        if body.model not in view.models:
            text = f"{view.name} has no model {body.model}"
            raise ProblemError(Problem(404, RefusalCode.NO_MODEL, text, "model"))
        others = max(self._traffic.count_in_flight(node), view.engine.running + view.engine.waiting)
        if others and not body.force:
            text = f"{view.name} is busy with {show_count(others, 'request')}: try later, or use --force"
            raise ProblemError(Problem(409, "node_busy", text))
        if node in self._measured_nodes:
            text = f"another benchmark runs on {view.name}: try again after its end"
            raise ProblemError(Problem(409, "node_busy", text))
        benchmark = Benchmark(self._traffic, lambda: self._nodes.registry.get_node_view(node), body.model)
        self._measured_nodes.add(node)
        try:
            measured = await benchmark.measure(self._nodes.directory.describe_host(node))
        finally:
            self._measured_nodes.discard(node)
        if not isinstance(measured, BenchmarkRecord):
            raise ProblemError(
                from_refused(measured)
                if isinstance(measured, Refused)
                else from_failure(measured.code, measured.message)
            )
        try:
            self._records.store(measured)
        except OSError as error:
            text = f"the speeds cannot be stored on the coordinator's disk: {error.strerror}"
            raise ProblemError(Problem(507, ModelOrderCode.DISK_FULL, text)) from None
        return {"schema": 1, "benchmark": self._build_row(measured)}

    async def benchmarks(self, model: str | None = None) -> dict[str, Any]:
        """List the stored benchmarks, newest first, with speeds in tokens per second.

        With `model`, list only those of this model; the list is empty if there are none. At most the newest 1000 are
        stored.
        """
        records = [record for record in self._records.list_all() if model in (None, record.model)]
        return {"schema": 1, "benchmarks": [self._build_row(record) for record in records]}

    def _build_row(self, record: BenchmarkRecord) -> dict[str, object]:
        name = self._nodes.directory.get_name(record.node)
        return {"node": {"id": record.node, "name": name}, **record.to_row()}

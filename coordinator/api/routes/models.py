"""Routes of models: their state on each node, and commands to load, unload and measure a model."""

from typing import Annotated, Any

from pydantic import Field

from coordinator.api.auth import KEY
from coordinator.api.body import Body
from coordinator.api.errors import ProblemError
from coordinator.api.route import Route
from coordinator.api.routes.nodes import find_node
from coordinator.cluster.assembly import NodePool
from coordinator.cluster.model_operations import CommandResult, ModelOperations
from coordinator.model_tools.benchmark_records import BenchmarkRecords
from coordinator.observe.node_rows import get_measured_memory, get_model_state, get_speeds
from router.admission.api_keys import KeyRing
from router.admission.key_scope import filter_view
from router.admission.model_names import ModelNames, VisibleModels
from router.admission.rate_limits import KeyLimits
from router.dispatch.request import RequestFailure
from router.errors import Problem, build_invalid, from_failure
from router.errors import from_refused as problem_of
from router.placement.cluster_view import NodeView
from wire.identity import is_valid_model
from wire.models.kind import get_kind
from wire.refusals import Refused

COMMAND_ERRORS = (404, 409, 429, 500, 502, 503, 504)
"""Possible error statuses of a command to a node."""


class ModelBody(Body):
    """Body of a command for a model: the model, and the node (name or id). Without a node, the route selects nodes."""

    model: Annotated[str, Field(min_length=1, max_length=200)]
    node: Annotated[str | None, Field(min_length=1, max_length=100)] = None


class ModelRoutes:
    """Routes of `cluster models`, and of `cluster model load`, `unload` and `profile`."""

    def __init__(
        self, nodes: NodePool, loads: ModelOperations, ring: KeyRing, names: ModelNames, benchmarks: BenchmarkRecords
    ) -> None:
        self._nodes = nodes
        self._operations = loads
        self._ring = ring
        self._names = names
        self._benchmarks = benchmarks

    def list_routes(self) -> tuple[Route, ...]:
        """Return the routes for lists of models and for commands to load, unload and measure them."""
        return (
            Route("GET", "/api/v1/models", "infer", self.models),
            Route("POST", "/api/v1/models/load", "admin", self.load, COMMAND_ERRORS, deferrable=True),
            Route("POST", "/api/v1/models/unload", "admin", self.unload, COMMAND_ERRORS, deferrable=True),
            Route("POST", "/api/v1/models/profile", "admin", self.profile, COMMAND_ERRORS, ends_with_client=True),
        )

    def build_rows(self, limits: KeyLimits | None = None) -> list[dict[str, Any]]:
        """Return a row for each model that a key with these limits (None: no limits) may use, sorted by name.

        `weights` are bytes, `context` tokens. `fingerprint` and `content` identify the version that new requests use. A
        node's `identity` is how its files compare with that version: content, sampled or differs (`VersionGrade`).
        `kind` is the kind of requests: chat, embed or rerank. `conflict` is true if nodes have different models of this
        name.
        """
        rows: dict[str, dict[str, Any]] = {}
        view = filter_view(self._nodes.registry.build_view(), limits)
        served = view.get_models()
        for node in view.nodes:
            for model in node.models.values():
                shown, identity = served[model.name], view.identify(model.name)
                row = rows.setdefault(
                    model.name,
                    {
                        "name": model.name,
                        "kind": get_kind(shown.features),
                        "nodes": [],
                        "weights": shown.weights,
                        "context": shown.context,
                        "fingerprint": identity.version.fingerprint,
                        "content": identity.version.content,
                        "conflict": identity.has_conflict,
                    },
                )
                place = {"id": node.id, "name": node.name, "state": str(node.state), **get_model_state(model)}
                place |= {
                    "fingerprint": model.fingerprint,
                    "content": model.content,
                    "identity": str(model.version.compare(identity.version)),
                    "quantization": model.quantization,
                    "stored": model.stored,
                    "used": model.used,
                    "written": model.written,
                    "removable": model.removable,
                }
                benchmark = self._benchmarks.find(node.id, model.name, model.fingerprint)
                place["benchmark"] = None if benchmark is None else benchmark.to_row()
                row["nodes"].append({**place, **get_speeds(model), "measured": get_measured_memory(model)})
        return [rows[name] for name in sorted(rows)]

    def build_answer(self, limits: KeyLimits | None = None) -> dict[str, Any]:
        """Return the body of `/api/v1/models`: the models and aliases that a key with these limits may use.

        None means no limits. `build_rows` and `build_alias_rows` describe the fields.
        """
        return {"schema": 1, "models": self.build_rows(limits), "aliases": self.build_alias_rows(limits)}

    def build_alias_rows(self, limits: KeyLimits | None = None) -> list[dict[str, Any]]:
        """Return the aliases that a key with these limits (None: no limits) may use, with their candidates in order."""
        visible = self._names.list_visible(self._nodes.registry.build_view(), limits)
        return [_build_alias_row(visible, alias) for alias in visible.list_aliases()]

    async def models(self) -> dict[str, Any]:
        """List the models and aliases that the key may use, and the state of each model on each node; sizes in bytes.

        Models are sorted by name. Speeds are in tokens per second. A model that no node can load is listed with the
        cause.
        """
        return self.build_answer(self._ring.get_limits(KEY.get()))

    async def load(self, body: ModelBody) -> dict[str, Any]:
        """Load a model on a node, or on the best node that does not refuse. Return that node once the model is loaded.

        The load continues if the client disconnects. `already` in the response is true if the model was loaded before.
        Raise `ProblemError`: 400 for an invalid model name, 404 for an unknown node. Otherwise the status is that of
        the refusal or failure (504 after 1 h).
        """
        answer = await self._operations.load_model(check_model_name(body.model), self._find_node_view(body))
        if not isinstance(answer, CommandResult):
            raise ProblemError(_to_problem(answer))
        return {"schema": 1, "model": body.model, "node": answer.to_row()}

    async def unload(self, body: ModelBody) -> dict[str, Any]:
        """Unload a model from a node, or from every node that has it loaded. Return these nodes.

        A node refuses to unload a model that is in use. If one node fails, the other nodes unload the model
        nevertheless, and the message names them. Raise `ProblemError`: 400 for an invalid model name, 404 for an
        unknown node, 404 if the model is loaded on no node. Otherwise the status is that of the refusal or failure.
        """
        return build_command_answer(
            body.model, *await self._operations.unload_model(check_model_name(body.model), self._find_node_view(body))
        )

    async def profile(self, body: ModelBody) -> dict[str, Any]:
        """Measure the memory of a model: on `node` if the body names one, else on every node that has the model loaded.

        If no node has it loaded, load it on the best node and measure it there. The response has the measured values.
        If one node fails, the message of the error names the nodes that succeeded. If the client disconnects, the
        measurement ends; a load continues. Raise `ProblemError`: 400 for an invalid model name, 404 for an unknown
        node. Otherwise the status is that of the refusal or failure.
        """
        return build_command_answer(
            body.model, *await self._operations.profile_model(check_model_name(body.model), self._find_node_view(body))
        )

    def _find_node_view(self, body: ModelBody) -> NodeView | None:
        return (
            None
            if body.node is None
            else self._nodes.registry.build_view().find_node(find_node(self._nodes.directory, body.node))
        )


def _build_alias_row(visible: VisibleModels, alias: str) -> dict[str, Any]:
    """Return an alias with its models in order, its upstream or None, and the first model that a node can serve."""
    model = visible.find_alias_model(alias)
    return {
        "name": alias,
        "candidates": list(visible.aliases[alias]),
        "upstream": visible.upstreams[alias] or None,
        "served": None if model is None else model.name,
    }


def check_model_name(model: str) -> str:
    """Return `model`. Raise `ProblemError` (400) if it cannot be the name of a model."""
    if not is_valid_model(model):
        raise ProblemError(build_invalid("model: this cannot be the name of a model", "model"))
    return model


def build_command_answer(
    model: str | None, done: list[CommandResult], wrong: Refused | RequestFailure | None
) -> dict[str, Any]:
    """Return the response to a command for `model`, with the nodes in `done`, which carried it out.

    `wrong` is the refusal or failure of at least one node. Unless it is None, raise it as `ProblemError`.
    """
    if wrong is not None:
        raise ProblemError(_to_problem(wrong))
    return {"schema": 1, "model": model, "nodes": [result.to_row() for result in done]}


def _to_problem(answer: Refused | RequestFailure) -> Problem:
    return problem_of(answer) if isinstance(answer, Refused) else from_failure(answer.code, answer.message)

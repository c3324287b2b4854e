"""Routes of model files: pulls from the hub, verification and removal of models on nodes."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from coordinator.api.auth import ACTOR
from coordinator.api.body import Body
from coordinator.api.errors import ProblemError
from coordinator.api.route import Route
from coordinator.api.routes.nodes import find_node
from coordinator.cluster.assembly import NodePool
from coordinator.models.pull_controller import PullController, TooManyPullsError
from coordinator.models.pull_plan import NodeSelection, PullPlan, plan_pull
from coordinator.models.pull_records import MAX_ENDED_RECORDS
from coordinator.models.pull_rows import build_pull_row
from router.errors import Problem, build_invalid
from wire.frames import ModelOrderCode, ModelOrderEnded, RemoveModel, VerifyModel
from wire.identity import NodeId, is_valid_model
from wire.models.hub_query import HubAnswer, HubRefusal
from wire.node_state import LINKED
from wire.refusals import RefusalCode

STATUS: Mapping[str, int] = {
    ModelOrderCode.NOT_FOUND: 404,
    ModelOrderCode.GATED: 403,
    ModelOrderCode.RATE_LIMITED: 429,
    ModelOrderCode.SOURCE_LOST: 502,
    ModelOrderCode.INVALID: 400,
    ModelOrderCode.IN_USE: 409,
    ModelOrderCode.DISK_FULL: 507,
    ModelOrderCode.CONTENT_MISMATCH: 409,
}
"""HTTP status of a failed order or query, by its code; 500 for any other code."""
_ERRORS = (403, 404, 409, 429, 500, 502, 507)


NodeText = Annotated[str, Field(min_length=1, max_length=100)]
"""Name or id of a node."""


class PullBody(Body):
    """Body of a pull: the repository, and the nodes that get it."""

    repo: Annotated[str, Field(min_length=3, max_length=200)]
    revision: Annotated[str, Field(max_length=200)] = ""
    """Branch, tag or commit; empty for `main`."""
    nodes: Annotated[list[NodeText], Field(max_length=1000, default_factory=list)]
    """Nodes by name or id; empty if the coordinator selects the nodes with enough space (see `all`)."""
    all: bool = False
    """Whether every member with enough space gets the model, including absent members.

    By default, only linked members get it. True is refused together with `nodes`.
    """
    dry_run: bool = False
    """Whether to return the plan without starting a pull."""


class ModelFilesBody(Body):
    """Body of an order about the files of a model on a node (name or id)."""

    model: Annotated[str, Field(min_length=1, max_length=200)]
    node: Annotated[str, Field(min_length=1, max_length=100)]


class PullRoutes:
    """Routes of `cluster pull`, `cluster pulls`, `cluster model verify` and `cluster model rm`."""

    def __init__(self, nodes: NodePool, pulls: PullController) -> None:
        self._nodes = nodes
        self._pulls = pulls

    def list_routes(self) -> tuple[Route, ...]:
        """Return the routes of pulls, and of the verification and removal of model files."""
        return (
            Route("POST", "/api/v1/pulls", "admin", self.pull, _ERRORS),
            Route("GET", "/api/v1/pulls", "admin", self.pulls),
            Route("GET", "/api/v1/pulls/{pull}", "admin", self.pull_state),
            Route("DELETE", "/api/v1/pulls/{pull}", "admin", self.pull_cancel, (409,)),
            Route("POST", "/api/v1/models/verify", "admin", self.verify, _ERRORS, deferrable=True),
            Route("POST", "/api/v1/models/remove", "admin", self.remove, _ERRORS, deferrable=True),
        )

    async def pull(self, body: PullBody) -> dict[str, Any]:
        """Plan a pull of a repository of the hub, and start it unless `dry_run` is set.

        Return the model, the plan for each node (sizes in bytes), and the started pull without waiting for its end.
        `nodes` and `all` exclude each other. If a pull of the same files to these nodes is open, return that pull
        instead.

        Raise `ProblemError`: 400 for an invalid body or an unsupported model, 404 for an unknown node. Also: 429 if 16
        pulls are open, 507 if no node can get the model or the pull cannot be stored. A failed query of the hub has the
        status of its code in `STATUS`.
        """
        if body.nodes and body.all:
            raise ProblemError(build_invalid("nodes and all exclude each other", "nodes"))
        named = [find_node(self._nodes.directory, node) for node in body.nodes]
        hub_answer = await self._pulls.hub.query(body.repo, body.revision)
        if isinstance(hub_answer, HubRefusal):
            raise ProblemError(_build_problem(hub_answer.code, hub_answer.message, hub_answer.retry_after))
        if hub_answer.model.cause:
            text = f"{body.repo} cannot be served: {hub_answer.model.cause}"
            raise ProblemError(Problem(400, "unsupported_model", text, "repo"))
        selection = NodeSelection.NAMED if named else NodeSelection.ALL if body.all else NodeSelection.AUTO
        plan = plan_pull(
            self._nodes.registry.build_view(),
            hub_answer.model.to_model(body.repo),
            hub_answer.manifest.size,
            selection,
            named,
        )
        answer = _describe(hub_answer, plan)
        if not body.dry_run:
            answer["pull"] = self._start(hub_answer, plan)
        return answer

    def _start(self, hub_answer: HubAnswer, plan: PullPlan) -> dict[str, object]:
        if not plan.chosen:
            raise ProblemError(Problem(507, "no_node", plan.explain()))
        try:
            record = self._pulls.start_pull(hub_answer.manifest, plan.chosen, ACTOR.get())
        except TooManyPullsError as error:
            raise ProblemError(Problem(429, "too_many_pulls", str(error))) from None
        except OSError as error:
            text = f"the pull cannot be stored on the coordinator's disk: {error.strerror}"
            raise ProblemError(Problem(507, ModelOrderCode.DISK_FULL, text)) from None
        return build_pull_row(record, self._get_name)

    async def pulls(self) -> dict[str, Any]:
        """List all open and the newest 50 ended pulls, newest first, with progress (bytes) and faults on each node."""
        return {"schema": 1, "pulls": self.build_rows()}

    def build_rows(self, max_ended: int = MAX_ENDED_RECORDS) -> list[dict[str, object]]:
        """Return the rows of all open pulls and of the newest `max_ended` ended pulls, newest first."""
        records = list(reversed(self._pulls.pulls.values()))
        older = {record.id for record in [entry for entry in records if entry.ended is not None][max_ended:]}
        return [build_pull_row(record, self._get_name) for record in records if record.id not in older]

    async def pull_state(self, pull: str) -> dict[str, Any]:
        """Return one pull with its progress on each node, in bytes.

        Raise `ProblemError` 404 for an unknown pull.
        """
        record = self._pulls.pulls.get(pull)
        if record is None:
            raise ProblemError(_build_unknown_pull(pull))
        return {"schema": 1, "pull": build_pull_row(record, self._get_name)}

    async def pull_cancel(self, pull: str) -> dict[str, Any]:
        """Cancel a pull, and return it. Received pieces stay on the disks, and a later pull reuses them.

        Raise `ProblemError`: 404 for an unknown pull, 409 for one that has ended.
        """
        record = self._pulls.pulls.get(pull)
        if record is None:
            raise ProblemError(_build_unknown_pull(pull))
        if not self._pulls.cancel_pull(pull):
            raise ProblemError(Problem(409, "pull_ended", f"{pull} has ended already"))
        return {"schema": 1, "pull": build_pull_row(self._pulls.pulls[pull], self._get_name)}

    async def verify(self, body: ModelFilesBody) -> dict[str, Any]:
        """Read all files of a model on a node and compute their digests again. Return the content hash of the model.

        Raise `ProblemError`: 400 for an invalid name, 404 for an unknown node or model, 409 for an absent node or files
        that changed since their download. A failure has the status of its code in `STATUS`: 429 if 64 orders are open,
        500 if the link is lost or after 6 h. The node continues if the client disconnects.
        """
        return await self._run_order(VerifyModel, body)

    async def remove(self, body: ModelFilesBody) -> dict[str, Any]:
        """Delete the files of a model from the disk of a node, and return the freed bytes. A loaded model is refused.

        The files of an incomplete download are deleted as well, even if the node does not list the model yet. Raise
        `ProblemError`: 400 for an invalid name, 404 for an unknown node or model, 409 for an absent node or a loaded
        model. A failure has the status of its code in `STATUS`.
        """
        return await self._run_order(RemoveModel, body)

    async def _run_order(self, kind: type[VerifyModel] | type[RemoveModel], body: ModelFilesBody) -> dict[str, Any]:
        if not is_valid_model(body.model):
            raise ProblemError(build_invalid("model: this cannot be the name of a model", "model"))
        node = find_node(self._nodes.directory, body.node)
        view = self._nodes.registry.get_node_view(node)
        if view.state not in LINKED:
            raise ProblemError(Problem(409, "node_away", f"{view.name} is {view.state}: try again when it is back"))
        may_have_parts = kind is RemoveModel and view.disk.total  # of an incomplete download, if the node can pull
        if body.model not in view.models and not may_have_parts:
            raise ProblemError(Problem(404, RefusalCode.NO_MODEL, f"{view.name} has no model {body.model}", "model"))
        ended = await self._pulls.orders.run(kind, node, body.model)
        if ended.code != ModelOrderCode.COMPLETED:
            raise ProblemError(_build_problem(ended.code, f"{view.name}: {ended.message}", ended.retry_after))
        return _describe_order(body.model, node, view.name, ended)

    def _get_name(self, node: NodeId) -> str:
        return self._nodes.directory.get_name(node)


def _describe(hub_answer: HubAnswer, plan: PullPlan) -> dict[str, Any]:
    manifest, model = hub_answer.manifest, hub_answer.model
    return {
        "schema": 1,
        "repo": manifest.repo,
        "revision": manifest.revision or "main",
        "commit": manifest.commit,
        "size": manifest.size,
        "files": len(manifest.files),
        "skipped": {"files": len(hub_answer.skipped), "size": sum(file.size for file in hub_answer.skipped)},
        "model": {
            "architecture": model.architecture,
            "quantization": model.quantization,
            "weights": model.weights,
            "kv_per_token": model.kv.per_token,
            "context": model.context,
        },
        "nodes": [node.to_row() for node in plan.nodes],
    }


def _describe_order(model: str, node: NodeId, name: str, ended: ModelOrderEnded) -> dict[str, Any]:
    return {
        "schema": 1,
        "model": model,
        "node": {"id": node, "name": name},
        "content": ended.content,
        "freed": ended.freed,
        "message": ended.message,
    }


def _build_problem(code: str, message: str, retry_after: float) -> Problem:
    return Problem(STATUS.get(code, 500), str(code), message, retry_after=retry_after or None)


def _build_unknown_pull(pull: str) -> Problem:
    return Problem(404, "pull_not_found", f"there is no pull {pull[:100]!r}: look at `cluster pulls`")

"""Routes of quantizations: start one on a node, follow and cancel it."""

from typing import Annotated, Any

from pydantic import Field

from coordinator.api.auth import ACTOR
from coordinator.api.body import Body
from coordinator.api.errors import ProblemError
from coordinator.api.route import Route
from coordinator.api.routes.nodes import find_node
from coordinator.cluster.assembly import NodePool
from coordinator.model_tools.quantizations import QuantizationRecord, Quantizations, TooManyQuantizationsError
from router.errors import Problem, build_invalid
from router.placement.cluster_view import NodeView
from wire.identity import is_valid_model
from wire.node_state import LINKED
from wire.refusals import RefusalCode

BITS = (2, 3, 4, 5, 6, 8)
"""Accepted numbers of bits of a quantized weight, which a refusal lists. The node checks the number again."""


class QuantizationBody(Body):
    """Body of a quantization: the model, the bits of a weight, and where and under which name the result is stored."""

    model: Annotated[str, Field(min_length=1, max_length=200)]
    bits: Annotated[int, Field(ge=1, le=64)] = 4
    """Bits of a weight, one of `BITS`."""
    node: Annotated[str | None, Field(min_length=1, max_length=100)] = None
    """Name or id of the node; None for the linked node that has the model and the most free memory.

    Nodes that cannot serve the model are chosen last.
    """
    name: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    """Name of the result; None for the name of the model with the bits appended, such as `MODEL-4bit`."""


class QuantizationRoutes:
    """Routes of `cluster model quantize` and `cluster model quantizations`."""

    def __init__(self, nodes: NodePool, quantizations: Quantizations) -> None:
        self._nodes = nodes
        self._quantizations = quantizations

    def list_routes(self) -> tuple[Route, ...]:
        """Return the routes of quantizations."""
        return (
            Route("POST", "/api/v1/quantizations", "admin", self.quantize, (404, 409, 429)),
            Route("GET", "/api/v1/quantizations", "admin", self.quantizations),
            Route("GET", "/api/v1/quantizations/{quantization}", "admin", self.quantization_state),
            Route("DELETE", "/api/v1/quantizations/{quantization}", "admin", self.quantization_cancel, (409,)),
        )

    async def quantize(self, body: QuantizationBody) -> dict[str, Any]:
        """Quantize a model on a node, under a lease of memory. The result is another model on the disk of the node.

        Return the started quantization without waiting for its end. If the same quantization is running there, return
        it. Raise `ProblemError`: 400 for an invalid name or number of bits, 404 for an unknown node or model. Also: 409
        for a node that is absent or too old, 429 if 16 quantizations are open.
        """
        name = body.name or f"{body.model}-{body.bits}bit"
        for text, field in ((body.model, "model"), (name, "name")):
            if not is_valid_model(text):
                raise ProblemError(build_invalid(f"{field}: this cannot be the name of a model", field))
        if body.bits not in BITS:
            known = ", ".join(map(str, BITS))
            raise ProblemError(build_invalid(f"weights cannot have {body.bits} bits: use one of {known}", "bits"))
        node = self._choose_node(body)
        try:
            started = self._quantizations.start(node.id, body.model, body.bits, name, ACTOR.get())
        except TooManyQuantizationsError as error:
            raise ProblemError(Problem(429, "too_many_quantizations", str(error))) from None
        return self._build_answer(started)

    async def quantizations(self) -> dict[str, Any]:
        """List all open and the newest 50 ended quantizations, newest first, with their progress in bytes."""
        rows = [record.to_row(self._nodes.directory.get_name) for record in reversed(self._quantizations.list_all())]
        return {"schema": 1, "quantizations": rows}

    async def quantization_state(self, quantization: str) -> dict[str, Any]:
        """Return one quantization with its progress in bytes.

        Raise `ProblemError` 404 for an unknown quantization.
        """
        return self._build_answer(self._find(quantization))

    async def quantization_cancel(self, quantization: str) -> dict[str, Any]:
        """Order the node to cancel a quantization, and return the quantization, which may still run.

        The node deletes the incomplete result.
        Raise `ProblemError`: 404 for an unknown quantization, 409 if it has ended or its node is not linked.
        """
        self._find(quantization)
        if not self._quantizations.cancel(quantization):
            text = f"{quantization} has ended already, or its node is not linked"
            raise ProblemError(Problem(409, "quantization_ended", text))
        return self._build_answer(self._find(quantization))

    def _choose_node(self, body: QuantizationBody) -> NodeView:
        """Return the node as `QuantizationBody.node` selects it. Raise `ProblemError` (404 or 409) if there is none."""
        if body.node is not None:
            view = self._nodes.registry.get_node_view(find_node(self._nodes.directory, body.node))
            if view.state not in LINKED:
                raise ProblemError(Problem(409, "node_away", f"{view.name} is {view.state}: try again when it is back"))
            if body.model not in view.models:
                text = f"{view.name} has no model {body.model}"
                raise ProblemError(Problem(404, RefusalCode.NO_MODEL, text, "model"))
            if not view.disk.total:
                text = f"the version of Macpool on {view.name} cannot quantize models: update it"
                raise ProblemError(Problem(409, "node_outdated", text))
            return view
        nodes = [
            node
            for node in self._nodes.registry.build_view().nodes
            if node.state in LINKED and node.disk.total and body.model in node.models
        ]
        if not nodes:
            text = f"no linked node has the model {body.model}: look at `cluster model files`"
            raise ProblemError(Problem(404, RefusalCode.NO_MODEL, text, "model"))
        return max(nodes, key=lambda node: (not node.models[body.model].cause, node.headroom or 0))

    def _find(self, quantization: str) -> QuantizationRecord:
        record = self._quantizations.find(quantization)
        if record is None:
            text = f"there is no quantization {quantization[:100]!r}: look at `cluster model quantizations`"
            raise ProblemError(Problem(404, "quantization_not_found", text))
        return record

    def _build_answer(self, record: QuantizationRecord) -> dict[str, Any]:
        return {"schema": 1, "quantization": record.to_row(self._nodes.directory.get_name)}

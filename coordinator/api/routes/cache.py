"""Route of cached prompts: delete them on the nodes, in memory and on the disk."""

from typing import Annotated, Any

from pydantic import Field

from coordinator.api.body import Body
from coordinator.api.route import Route
from coordinator.api.routes.models import COMMAND_ERRORS, build_command_answer, check_model_name
from coordinator.api.routes.nodes import find_node
from coordinator.cluster.assembly import NodePool
from coordinator.cluster.model_operations import ModelOperations


class CacheBody(Body):
    """Body of the deletion of cached prompts: the model, and the node (name or id). An absent field means all."""

    model: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    node: Annotated[str, Field(min_length=1, max_length=100)] | None = None


class CacheRoutes:
    """Route of `cluster cache clear`."""

    def __init__(self, nodes: NodePool, operations: ModelOperations) -> None:
        self._nodes = nodes
        self._operations = operations

    def list_routes(self) -> tuple[Route, ...]:
        """Return the route that deletes cached prompts."""
        return (Route("POST", "/api/v1/cache/clear", "admin", self.clear, COMMAND_ERRORS),)

    async def clear(self, body: CacheBody) -> dict[str, Any]:
        """Delete the cached prompts of a model, or of all models, on a node or on all nodes, in memory and on the disk.

        `model` may be the fingerprint of a model that a node no longer has. Return the nodes that deleted their
        prompts. An absent node may have prompts on its disk, and counts as failed. If any node fails, the response has
        the status of that failure, and its message names the nodes that succeeded.

        Raise `ProblemError`: 400 for an invalid model name, 404 for an unknown node, 404 if no node may have such
        prompts.
        """
        model = "" if body.model is None else check_model_name(body.model)
        node = None
        if body.node is not None:
            node = self._nodes.registry.get_node_view(find_node(self._nodes.directory, body.node))
        return build_command_answer(body.model, *await self._operations.clear_cache(model, node))

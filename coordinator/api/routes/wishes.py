"""Routes of wishes: wanted replicas of models, and the plan that loads them on nodes."""

from typing import Annotated, Any

import msgspec
from pydantic import Field

from coordinator.api.body import PLAIN_TEXT_PATTERN, Body
from coordinator.api.errors import ProblemError
from coordinator.api.route import Route
from coordinator.api.routes.nodes import find_node
from coordinator.cluster.assembly import NodePool
from coordinator.models.wish_runner import WishRunner
from coordinator.models.wishes import (
    DEFAULT_EVICTION_COST,
    MAX_EVICTION_COST,
    MAX_REPLICAS,
    LoadWish,
    Plan,
    UnloadReason,
    Wish,
    WishAction,
    WishState,
)
from coordinator.state.database import Database
from router.errors import Problem, build_invalid
from wire.identity import NodeId, is_valid_model

MAX_WISHES = 100
"""Maximum wishes of a pool. A further wish is refused with 409."""
MAX_IDLE_SECONDS = 30 * 86400.0
"""Maximum of `WishBody.idle_unload_seconds`: 30 days."""
_Text = Annotated[str, Field(min_length=1, max_length=100, pattern=PLAIN_TEXT_PATTERN)]
_Texts = Annotated[list[_Text], Field(max_length=100)]


class WishBody(Body):
    """Body with all properties of a wish. Nodes are given by name or id."""

    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    """Number of nodes that should have the model loaded."""
    labels: _Texts = []  # noqa: RUF012
    """Labels of which a node must have all to get a replica."""
    allow: _Texts = []  # noqa: RUF012
    """Nodes that may get replicas; empty allows all nodes."""
    deny: _Texts = []  # noqa: RUF012
    """Nodes that get no replica."""
    idle_unload_seconds: Annotated[float, Field(gt=0, le=MAX_IDLE_SECONDS)] | None = None
    """Seconds without a request after which all replicas are unloaded; null: never."""
    eviction_cost: Annotated[int, Field(ge=1, le=MAX_EVICTION_COST)] = DEFAULT_EVICTION_COST
    """Cost of unloading a replica. Another wish gets the memory of a replica only if its cost is higher."""
    load_at_boot: bool = True
    """Whether replicas are loaded at the start of the coordinator; if false, after the first request for the model."""


class WishRoutes:
    """Routes of `cluster model want`, `unwant` and `plan`."""

    def __init__(self, nodes: NodePool, runner: WishRunner, store: Database) -> None:
        self._nodes = nodes
        self._runner = runner
        self._store = store

    def list_routes(self) -> tuple[Route, ...]:
        """Return the routes of wishes and of the plan."""
        return (
            Route("GET", "/api/v1/models/plan", "metrics", self.plan_models),
            Route("GET", "/api/v1/models/wishes", "metrics", self.list_wishes),
            Route("GET", "/api/v1/models/wishes/{model}", "metrics", self.get_wish, ends_with_name=True),
            Route("PUT", "/api/v1/models/wishes/{model}", "admin", self.want_model, (409,), ends_with_name=True),
            Route("DELETE", "/api/v1/models/wishes/{model}", "admin", self.unwant_model, ends_with_name=True),
        )

    async def list_wishes(self) -> dict[str, Any]:
        """List the wishes, sorted by model."""
        return {"schema": 1, "wishes": [self._build_wish_row(wish) for _, wish in sorted(self._store.wishes.items())]}

    async def get_wish(self, model: str) -> dict[str, Any]:
        """Return the wish for a model, with the names of nodes. The case of `model` is ignored.

        Raise `ProblemError` 404 if there is none.
        """
        return {"schema": 1, "wish": self._build_wish_row(self._store.wishes[self._find_wish(model)])}

    async def want_model(self, model: str, body: WishBody) -> dict[str, Any]:
        """Create or replace the wish for replicas of a model, and return it. The loads are not awaited.

        The plan loads the replicas where they fit. No node needs to have the model yet. The case of the name is
        ignored. The body replaces all properties of an earlier wish for the model. Raise `ProblemError`: 400 for an
        invalid model name, 404 for an unknown node, 409 above 100 wishes. Raise `StoreError` (503) if the wish cannot
        be stored.
        """
        if not is_valid_model(model) or {"", ".", ".."} & set(model.split("/")):
            raise ProblemError(build_invalid("model: this cannot be the name of a model", "model"))
        wishes = self._store.wishes
        name = next((known for known in wishes if known.casefold() == model.casefold()), None)
        name = name or self._nodes.registry.build_view().resolve_name(model)
        if name not in wishes and len(wishes) >= MAX_WISHES:
            text = f"there are {MAX_WISHES} wishes, which is the limit: end one with `cluster model unwant MODEL`"
            raise ProblemError(Problem(409, "too_many_wishes", text))
        wish = Wish(
            name,
            body.replicas,
            labels=tuple(sorted(set(body.labels))),
            allow=self._find_nodes(body.allow),
            deny=self._find_nodes(body.deny),
            idle_unload_seconds=body.idle_unload_seconds,
            eviction_cost=body.eviction_cost,
            load_at_boot=body.load_at_boot,
        )
        wishes.put(wish)
        await self._store.flush()
        self._runner.wake()
        return {"schema": 1, "wish": self._build_wish_row(wish)}

    async def unwant_model(self, model: str) -> dict[str, Any]:
        """Delete the wish for a model, and return the model's name. Loaded replicas stay loaded.

        Raise `ProblemError` 404 if there is no such wish. Raise `StoreError` (503) if the change cannot be stored.
        """
        name = self._find_wish(model)
        self._store.wishes.delete(name)
        await self._store.flush()
        self._runner.wake()
        return {"schema": 1, "model": name}

    async def plan_models(self) -> dict[str, Any]:
        """Return the nodes and the shortfall of each wish, then the running and the next actions.

        `missing` is the reason why a wish is not met; empty for a wish that is met.
        """
        plan = self._runner.build_plan()
        return {
            "schema": 1,
            "wishes": self._build_state_rows(plan),
            "running": [_build_action_row(action) for action in self._runner.running],
            "next": [_build_action_row(action) for action in plan.actions],
        }

    def build_state_rows(self) -> list[dict[str, Any]]:
        """Return a row for each wish, with its nodes and its shortfall, as in the field `wishes` of `plan_models`."""
        return self._build_state_rows(self._runner.build_plan()) if self._store.wishes else []

    def _find_wish(self, model: str) -> str:
        """Return the name of the wish for a model. Raise `ProblemError` (404) if there is none."""
        for name in self._store.wishes:
            if name.casefold() == model.casefold():
                return name
        raise ProblemError(Problem(404, "wish_not_found", f"there is no wish for {model[:100]!r}"))

    def _find_nodes(self, texts: list[str]) -> tuple[NodeId, ...]:
        return tuple(sorted({find_node(self._nodes.directory, text) for text in texts}))

    def _build_wish_row(self, wish: Wish) -> dict[str, Any]:
        row = msgspec.to_builtins(wish)
        return {**row, "allow": self._get_names(wish.allow), "deny": self._get_names(wish.deny)}

    def _build_state_rows(self, plan: Plan) -> list[dict[str, Any]]:
        missing = {short.model: short.text for short in plan.shortfalls}
        return [self._build_state_row(state, missing.get(state.wish.model, "")) for state in plan.states]

    def _build_state_row(self, state: WishState, missing: str) -> dict[str, Any]:
        return {
            "model": state.wish.model,
            "replicas": state.wish.replicas,
            "wanted": state.wanted,
            "met": state.met,
            "ready": self._get_names(state.ready),
            "loading": self._get_names(state.coming),
            "away": self._get_names(state.away),
            "missing": missing,
        }

    def _get_names(self, nodes: tuple[NodeId, ...]) -> list[str]:
        rows = {node: self._store.members.get(node) for node in nodes}
        return [
            node if row is None else row.name if row.removed is None else f"{row.name} (removed)"
            for node, row in rows.items()
        ]


def _build_action_row(action: WishAction) -> dict[str, Any]:
    if isinstance(action, LoadWish):
        return {"action": "load", "model": action.model, "node": action.node, "name": action.name, "why": "wish"}
    why = f"memory for {action.wanted}" if action.why is UnloadReason.MEMORY else "idle"
    return {"action": "unload", "model": action.model, "node": action.node, "name": action.name, "why": why}

"""Content of the live page, in sections that are sent separately."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.api.deferred_commands import DeferredCommands
from coordinator.api.dispatcher_api import DispatcherApi
from coordinator.api.routes.joining import JoinRoutes
from coordinator.api.routes.models import ModelRoutes
from coordinator.api.routes.nodes import NodeRoutes
from coordinator.api.routes.pool import PoolRoutes
from coordinator.api.routes.pulls import PullRoutes
from coordinator.api.routes.requests import WallClock, get_phase, summarize_request
from coordinator.api.routes.wishes import WishRoutes
from router.admission.api_keys import KeyRing
from router.dispatch.active_request import ActiveRequest
from router.dispatch.decision_log import RequestRecord

MAX_REQUESTS_SHOWN = 50
"""Maximum open requests (the oldest) and maximum ended requests (the newest) on the page, each."""
MAX_ENDED_PULLS_SHOWN = 10
"""Maximum ended pulls on the page."""
SILENCE_SHOWN_SECONDS = 3.0
"""Age of a node's newest report, in seconds, from which the page receives the age. A lower age is sent as 0."""


@dataclass(frozen=True, slots=True)
class SnapshotSources:
    """Sources of the page's sections. A call of an instance returns the current content of all sections."""

    pool: PoolRoutes
    nodes: NodeRoutes
    models: ModelRoutes
    pulls: PullRoutes
    wishes: WishRoutes
    joins: JoinRoutes
    commands: DeferredCommands
    traffic: DispatcherApi
    ring: KeyRing
    clock: WallClock

    def __call__(self) -> dict[str, object]:
        """Return the current content of each section, by the name of the section.

        Values that change constantly, such as the uptime, are omitted, because each change of a section sends it again.
        """
        names = self.ring.get_names()
        records = self.traffic.history.list_newest(MAX_REQUESTS_SHOWN)
        return {
            "status": {name: value for name, value in self.pool.build_status_row().items() if name != "uptime_seconds"},
            "nodes": [_shorten_node_row(row) for row in self.nodes.build_rows()],
            "models": self.models.build_rows(),
            "aliases": self.models.build_alias_rows(),
            "pulls": [_remove_actor(row) for row in self.pulls.build_rows(MAX_ENDED_PULLS_SHOWN)],
            "wishes": self.wishes.build_state_rows(),
            "requests": [
                _build_open_row(request, self.clock, names)
                for request in self.traffic.list_open_requests()[:MAX_REQUESTS_SHOWN]
            ],
            "ended": [_build_ended_row(record, self.clock, names) for record in records],
            "joins": self.joins.build_rows(),
            "commands": self.commands.build_rows(),
            "conditions": self.pool.list_active_conditions(),
            "load": self.pool.read_load_history(1),
        }


def _remove_actor(row: dict[str, object]) -> dict[str, object]:
    """Remove the name of the administrator from the row of a pull, because keys with the scope `metrics` read it."""
    return {name: value for name, value in row.items() if name != "actor"}


def _shorten_node_row(row: dict[str, Any]) -> dict[str, Any]:
    """Replace constantly changing values in a node's row, and keep only the names of its loaded models.

    The age of the memory reading becomes 0. The age of the newest report becomes complete seconds, and 0 below
    `SILENCE_SHOWN_SECONDS`. The rows of nodes are sent with each change of their memory, and the rows of models have
    their own section.
    """
    reported_seconds = row["heard_seconds"]
    return {
        **row,
        "age": 0,
        "models": [{"name": model["name"], "loaded": True} for model in row["models"] if model["loaded"]],
        "heard_seconds": None
        if reported_seconds is None
        else int(reported_seconds)
        if reported_seconds >= SILENCE_SHOWN_SECONDS
        else 0,
    }


def _build_ended_row(record: RequestRecord, clock: WallClock, names: Mapping[str, str]) -> dict[str, Any]:
    """Return an ended request as a row, without its steps, which the page requests separately."""
    return {
        "request_id": record.request_id,
        "key": names.get(record.key, f"{record.key} (ended)"),
        "model": record.model,
        "outcome": record.outcome,
        "message": record.message,
        "seconds": round(record.seconds, 3),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        **summarize_request(record, clock),
    }


def _build_open_row(request: ActiveRequest, clock: WallClock, names: Mapping[str, str]) -> dict[str, Any]:
    """Return an open request as a row, without any part of its prompt."""
    return {
        "id": request.spec.request_id,
        "key": names.get(request.spec.key, request.spec.key),
        "model": request.spec.demand.model,
        "node": request.node_name,
        "phase": get_phase(request),
        "prompt_tokens": request.prompt_counts[0],
        "cached_tokens": request.prompt_counts[1],
        "completion_tokens": request.tokens.total,
        "attempts": request.attempts,
        "stream": request.spec.stream,
        "at": clock.to_unix(request.arrived),
    }

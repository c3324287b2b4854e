"""Content of the live page, in sections that are updated separately."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.api.dispatcher_api import DispatcherApi
from coordinator.api.routes.joining import JoinRoutes
from coordinator.api.routes.models import ModelRoutes
from coordinator.api.routes.nodes import NodeRoutes
from coordinator.api.routes.pool import PoolRoutes
from coordinator.api.routes.requests import WallClock, phase_of, summary
from router.admission.api_keys import KeyRing
from router.dispatch.decision_log import RequestRecord
from router.dispatch.request import ActiveRequest

MAX_REQUESTS_SHOWN = 50
"""Maximum open requests, and maximum ended requests, on the page."""
SILENCE_SHOWN_SECONDS = 3.0
"""Seconds without a report from which the page shows the age of a node's last report."""


@dataclass(frozen=True, slots=True)
class SnapshotSources:
    """Sources of the page's sections. A call returns the current content."""

    pool: PoolRoutes
    nodes: NodeRoutes
    models: ModelRoutes
    joins: JoinRoutes
    traffic: DispatcherApi
    ring: KeyRing
    clock: WallClock

    def __call__(self) -> dict[str, object]:
        """Return the current content of each section by name."""
        names = self.ring.names()
        stories = self.traffic.history.newest(MAX_REQUESTS_SHOWN)
        return {
            "status": {name: value for name, value in self.pool.row().items() if name != "uptime_seconds"},
            "nodes": [_steady(row) for row in self.nodes.rows()],
            "models": self.models.rows(),
            "requests": [
                _under_way(ticket, self.clock, names) for ticket in self.traffic.open_requests()[:MAX_REQUESTS_SHOWN]
            ],
            "ended": [_ended(story, self.clock, names) for story in stories],
            "joins": self.joins.rows(),
            "conditions": self.pool.active(),
            "load": self.pool.load(1),
        }


def _steady(row: dict[str, Any]) -> dict[str, Any]:
    """Remove values that change without meaning from a node's row: ages of a report below `SILENCE_SHOWN_SECONDS`."""
    heard = row["heard_seconds"]
    return {
        **row,
        "age": 0,
        "heard_seconds": None if heard is None else int(heard) if heard >= SILENCE_SHOWN_SECONDS else 0,
    }


def _ended(story: RequestRecord, clock: WallClock, names: Mapping[str, str]) -> dict[str, Any]:
    """Return an ended request as a row, without its steps, which the page requests separately."""
    return {
        "request_id": story.request_id,
        "key": names.get(story.key, f"{story.key} (ended)"),
        "model": story.model,
        "outcome": story.outcome,
        "message": story.message,
        "seconds": round(story.seconds, 3),
        "prompt_tokens": story.prompt_tokens,
        "cached_tokens": story.cached_tokens,
        "completion_tokens": story.completion_tokens,
        **summary(story, clock),
    }


def _under_way(ticket: ActiveRequest, clock: WallClock, names: Mapping[str, str]) -> dict[str, Any]:
    """Return an open request as a row, without any part of its prompt."""
    return {
        "id": ticket.job.request_id,
        "key": names.get(ticket.job.key, ticket.job.key),
        "model": ticket.job.demand.model,
        "node": ticket.node_name,
        "phase": phase_of(ticket),
        "prompt_tokens": ticket.read[0],
        "cached_tokens": ticket.read[1],
        "completion_tokens": ticket.wrote,
        "attempts": ticket.attempts,
        "stream": ticket.job.stream,
        "at": clock.unix(ticket.arrived),
    }

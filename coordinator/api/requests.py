"""Routes of requests: where one would go, and what became of those that were."""

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from fastapi import Query
from fastapi.responses import Response, StreamingResponse
from pydantic import Field

from coordinator.api.body import Body
from coordinator.api.problems import ProblemError
from coordinator.api.route import Content, Route
from coordinator.api.traffic import Traffic
from router.history import STORIES_KEPT, Story
from router.placement import Demand, Placement, explain
from router.problems import Problem
from router.problems import from_refused as problem_of
from router.ticket import Ticket

LINES = "application/jsonl"


class DryRun(Body):
    """A request to place without sending it."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    prompt_tokens: Annotated[int, Field(ge=1, le=10**9)] = 1000
    max_tokens: Annotated[int | None, Field(ge=1, le=10**9)] = None


class RequestRoutes:
    """What `cluster place`, `explain` and `replay` ask for."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def routes(self) -> tuple[Route, ...]:
        """Give the routes."""
        return (
            Route("POST", "/api/v1/place", "metrics", self.place),
            Route("GET", "/api/v1/requests", "metrics", self.requests),
            Route("GET", "/api/v1/requests/{request_id}", "metrics", self.request),
            Route("GET", "/api/v1/decisions", "admin", self.decisions, content=Content.text(LINES)),
        )

    async def place(self, body: DryRun) -> dict[str, Any]:
        """Show where a request would go now: every node's arithmetic and why not. Nothing is sent or reserved."""
        demand = Demand(body.model, prompt_tokens=body.prompt_tokens, max_tokens=body.max_tokens)
        result = self._traffic.preview(demand)
        answer: dict[str, Any] = {
            "schema": 1,
            "node": None,
            "name": None,
            "refused": None,
            "candidates": explain(result.candidates, result.chosen.node if isinstance(result, Placement) else None),
        }
        if isinstance(result, Placement):
            return {**answer, "node": result.chosen.node, "name": result.chosen.name}
        problem = problem_of(result.refused)
        return {**answer, "refused": {"code": problem.code, "status": problem.status, "message": problem.message}}

    async def requests(self, last: Annotated[int, Query(ge=1, le=STORIES_KEPT)] = 50) -> dict[str, Any]:
        """List the newest requests that have ended, oldest first, with the times of each step."""
        return {"schema": 1, "requests": [story_row(story) for story in list(self._traffic.history.stories)[-last:]]}

    async def request(self, request_id: str) -> dict[str, Any]:
        """Return everything that is kept of a request: the phase while it is under way, steps, end, and each decision
        with every node's arithmetic."""
        history = self._traffic.history
        stories, decisions = history.told(request_id), history.decided_on(request_id)
        tickets = [ticket for ticket in self._traffic.under_way() if ticket.job.request_id == request_id]
        if not stories and not decisions and not tickets:
            raise ProblemError(Problem(404, "request_not_found", f"nothing is kept of a request {request_id[:100]!r}: "
                               f"the newest {STORIES_KEPT} are"))  # fmt: skip
        return {
            "schema": 1,
            "under_way": [_under_way(ticket, self._traffic.now()) for ticket in tickets],
            "requests": [story_row(story) for story in stories],
            "decisions": [
                {
                    "seconds_ago": round(self._traffic.now() - one.at, 3),
                    "demand": msgspec.to_builtins(one.demand),
                    "chosen": one.chosen,
                    "refused": None if one.refused is None else one.refused.message,
                    "nodes": one.nodes,
                    "candidates": one.rows(),
                }
                for one in decisions
            ],
        }

    async def decisions(self) -> Response:
        """Give every kept decision as a line of JSON, to be taken again by another policy (`cluster replay`)."""
        return StreamingResponse(self._traffic.history.lines(), media_type=LINES)


def story_row(story: Story) -> dict[str, Any]:
    """Describe a request that has ended, with its steps by name."""
    told: dict[str, Any] = msgspec.to_builtins(story)
    return {
        **told,
        "steps": _steps(story.steps),
        "timings": None if story.timings is None else msgspec.structs.asdict(story.timings),
    }


def phase_of(ticket: Ticket) -> str:
    """Return what a request that has not ended waits for: the queue, a model swap, its prompt, its answer."""
    if ticket.node is None:
        return ticket.swap or "queued"
    return "prefill" if ticket.first_at is None else "decode"


def _under_way(ticket: Ticket, now: float) -> dict[str, Any]:
    """Describe a request that has not ended, `now` in monotonic seconds."""
    return {
        "request_id": ticket.job.request_id,
        "key": ticket.job.key,
        "model": ticket.job.demand.model,
        "phase": phase_of(ticket),
        "seconds": now - ticket.arrived,
        "steps": _steps(ticket.steps),
    }


def _steps(steps: Iterable[tuple[float, str, str]]) -> list[dict[str, Any]]:
    return [{"at": at, "what": what, "node": node} for at, what, node in steps]

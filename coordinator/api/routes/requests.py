"""Routes of requests: placement of a hypothetical request, open and ended requests, and placement decisions."""

import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec
from fastapi import Query
from fastapi.responses import Response, StreamingResponse
from msgspec.structs import replace
from pydantic import Field

from coordinator.api.body import Body
from coordinator.api.dispatcher_api import DispatcherApi
from coordinator.api.errors import ProblemError
from coordinator.api.route import Content, Route
from router.admission.api_keys import KeyRing
from router.admission.model_names import ModelTarget
from router.admission.rate_limits import NO_LIMITS
from router.dispatch.active_request import ActiveRequest
from router.dispatch.aliases.candidates import PassedOver, get_reason
from router.dispatch.decision_log import MAX_REQUESTS_KEPT, RequestRecord
from router.dispatch.request_state import RequestState
from router.errors import Problem
from router.errors import from_refused as problem_of
from router.placement.candidate import NoPlacement, Placement, ResourceDemand, explain
from wire.refusals import Refused

JSON_LINES_TYPE = "application/jsonl"
"""Media type of JSON lines."""
MIN_DECODE_SECONDS = 0.05
"""Minimum decode time, in seconds, from which tokens per second are computed."""
MAX_DRIFT_SECONDS = 1.0
"""Change of the offset between monotonic and Unix time, in seconds, above which `WallClock` updates its offset."""


class PlacementBody(Body):
    """Body of a dry run of placement: a hypothetical request with its model or alias, and its token counts.

    `max_tokens` is the maximum of output tokens; None if the request sets no limit.
    """

    model: Annotated[str, Field(min_length=1, max_length=512)]
    prompt_tokens: Annotated[int, Field(ge=1, le=10**9)] = 1000
    max_tokens: Annotated[int | None, Field(ge=1, le=10**9)] = None


class RequestRoutes:
    """Routes of `cluster place`, `cluster explain` and `cluster replay`."""

    def __init__(self, traffic: DispatcherApi, ring: KeyRing) -> None:
        self._traffic = traffic
        self._ring = ring
        self._clock = WallClock(traffic.get_time)

    def list_routes(self) -> tuple[Route, ...]:
        """Return the routes of placement, of requests and of decisions."""
        return (
            Route("POST", "/api/v1/place", "metrics", self.place, (404,)),
            Route("GET", "/api/v1/requests", "metrics", self.requests),
            Route("GET", "/api/v1/requests/{request_id}", "metrics", self.request),
            Route("GET", "/api/v1/decisions", "admin", self.decisions, content=Content.of_text(JSON_LINES_TYPE)),
        )

    async def place(self, body: PlacementBody) -> dict[str, Any]:
        """Return the node for a hypothetical request, and the memory arithmetic of every node. No request is sent.

        If no node can take the request, `node` is null and `refused` has the reason. For an alias, `passed_over` has
        the candidates before the model. The limits of the calling key do not apply.
        Raise `ProblemError` 404 for an unknown profile of an alias or model.
        """
        target = self._traffic.names.resolve(body.model, self._traffic.placer.view, NO_LIMITS)
        if isinstance(target, Refused):
            raise ProblemError(problem_of(target))
        demand = ResourceDemand(body.model, prompt_tokens=body.prompt_tokens, max_tokens=body.max_tokens)
        model, result, passed_over = self._preview(demand, target)
        answer: dict[str, Any] = {
            "schema": 1,
            "alias": target.alias,
            "model": model,
            "passed_over": [{"model": row.model, "reason": row.reason} for row in passed_over],
            "node": None,
            "name": None,
            "refused": None,
            "candidates": explain(result.candidates, result.chosen.node if isinstance(result, Placement) else None),
        }
        if isinstance(result, Placement):
            return {**answer, "node": result.chosen.node, "name": result.chosen.name}
        problem = problem_of(result.refused)
        return {**answer, "refused": {"code": problem.code, "status": problem.status, "message": problem.message}}

    def _preview(
        self, demand: ResourceDemand, target: ModelTarget
    ) -> tuple[str, Placement | NoPlacement, list[PassedOver]]:
        """Return the model, its placement, and the candidates of an alias before it.

        Without a placement, the model is the first candidate, and all candidates of an alias were passed over.
        """
        passed_over: list[PassedOver] = []
        results: list[NoPlacement] = []
        for model in target.candidates:
            result = self._traffic.placer.preview(replace(demand, model=model))
            if isinstance(result, Placement):
                return model, result, passed_over
            results.append(result)
            passed_over.append(PassedOver(model, get_reason(result, model)))
        return target.candidates[0], results[0], passed_over if target.alias else []

    async def requests(self, last: Annotated[int, Query(ge=1, le=MAX_REQUESTS_KEPT)] = 50) -> dict[str, Any]:
        """List the newest `last` ended requests (default 50), including refused ones, oldest first, with their steps.

        `at` is the arrival in Unix seconds; the times of steps are in seconds after it. The newest 1000 ended requests
        and 500 invalid ones are stored.
        """
        return {"schema": 1, "requests": self._build_rows(self._traffic.history.list_newest(last))}

    def _build_rows(self, records: Iterable[RequestRecord]) -> list[dict[str, Any]]:
        names = self._ring.get_names()
        return [
            {**build_record_row(record, self._clock), "key_name": names.get(record.key, f"{record.key} (ended)")}
            for record in records
        ]

    async def request(self, request_id: str) -> dict[str, Any]:
        """Return the records of all requests with this id: phase or end, steps, and placement decisions.

        The newest 1000 ended requests, 500 invalid ones and 1000 decisions are stored; open requests are always found.
        A decision has the memory arithmetic of its stored candidates (`MAX_CANDIDATES_KEPT`). Raise `ProblemError` 404
        if there is no record.
        """
        history = self._traffic.history
        records, decisions = history.find_requests(request_id), history.find_decisions(request_id)
        open_requests = [
            request for request in self._traffic.list_open_requests() if request.spec.request_id == request_id
        ]
        if not records and not decisions and not open_requests:
            raise ProblemError(
                Problem(
                    404,
                    "request_not_found",
                    f"nothing is kept of a request {request_id[:100]!r}: the newest {MAX_REQUESTS_KEPT} are",
                )
            )
        return {
            "schema": 1,
            "under_way": [_build_open_row(open_request, self._traffic.get_time()) for open_request in open_requests],
            "requests": self._build_rows(records),
            "decisions": [
                {
                    "seconds_ago": round(self._traffic.get_time() - decision.at, 3),
                    "demand": msgspec.to_builtins(decision.demand),
                    "chosen": decision.chosen,
                    "refused": None if decision.refused is None else decision.refused.message,
                    "nodes": decision.nodes,
                    "candidates": decision.to_rows(),
                }
                for decision in decisions
            ],
        }

    async def decisions(self) -> Response:
        """Return the stored placement decisions (the newest 1000) as JSON lines, oldest first, for `cluster replay`."""
        return StreamingResponse(self._traffic.history.encode_lines(), media_type=JSON_LINES_TYPE)


class WallClock:
    """Converter of the dispatcher's times to Unix seconds. `now` returns the current time of the dispatcher.

    Conversions of one time have equal results until the offset between both clocks changes by more than
    `MAX_DRIFT_SECONDS`.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._offset = 0.0

    def to_unix(self, at: float) -> float:
        """Convert the time `at` of the dispatcher (monotonic seconds) to Unix seconds, rounded to milliseconds."""
        offset = time.time() - self._now()
        if abs(offset - self._offset) > MAX_DRIFT_SECONDS:
            self._offset = offset
        return round(at + self._offset, 3)


def build_record_row(record: RequestRecord, clock: WallClock) -> dict[str, Any]:
    """Return an ended request as a row of the API, with its steps in seconds after its arrival.

    The row has all fields of the record and those of `summarize_request`. Its `timings` are null for an incomplete
    answer.
    """
    row: dict[str, Any] = msgspec.to_builtins(record)
    return {
        **row,
        **summarize_request(record, clock),
        "steps": _build_step_rows(record.steps),
        "timings": None if record.timings is None else msgspec.structs.asdict(record.timings),
    }


def summarize_request(record: RequestRecord, clock: WallClock) -> dict[str, Any]:
    """Return the fields `at`, `node`, `ttft_seconds` and `tokens_per_second` of an ended request.

    `at` is the arrival in Unix seconds, `node` the last node (empty without one). `tokens_per_second` is the decode
    speed; None for fewer than two tokens, or for a decode of less than `MIN_DECODE_SECONDS`. `ttft_seconds` is None
    without a first token.
    """
    first = next((at for at, step, _ in record.steps if step == "first token"), None)
    nodes = [node for _, _, node in record.steps if node]
    decoding = 0.0 if first is None else record.seconds - first
    if record.timings is not None:  # short answers arrive in one piece: then only their node knows how long they took
        decoding = max(decoding, record.timings.decode)
    tokens = record.completion_tokens - 1
    rate = round(tokens / decoding, 1) if tokens > 0 and decoding >= MIN_DECODE_SECONDS else None
    return {
        "at": clock.to_unix(record.arrived),
        "node": nodes[-1] if nodes else "",
        "ttft_seconds": None if first is None else round(first, 3),
        "tokens_per_second": rate,
    }


def get_phase(request: ActiveRequest) -> str:
    """Return the phase of an open request: `queued`, `prefill`, `decode` or `upstream`.

    For a queued request that waits for a model swap, the phase is the text of that swap.
    """
    if request.state is RequestState.UPSTREAM:
        return "upstream"
    if request.node is None:
        return request.swap or "queued"
    return "prefill" if request.life.first_at is None else "decode"


def _build_open_row(request: ActiveRequest, now: float) -> dict[str, Any]:
    """Return an open request as a row. `now` is in monotonic seconds of the dispatcher."""
    return {
        "request_id": request.spec.request_id,
        "key": request.spec.key,
        "model": request.spec.demand.model,
        "alias": "" if request.alias is None else request.alias.name,
        "phase": get_phase(request),
        "seconds": now - request.arrived,
        "steps": _build_step_rows(request.steps),
    }


def _build_step_rows(steps: Iterable[tuple[float, str, str]]) -> list[dict[str, Any]]:
    return [{"at": at, "what": step, "node": node} for at, step, node in steps]

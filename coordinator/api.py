"""The control plane, /api/v1: every verb of `cluster` as one documented route, with the scope that it needs.

FastAPI lives here and only here; the routes that generate are plain ASGI in `router/app.py`. A route without a declared
scope does not exist: `_route` is the only way to add one.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, cast

import msgspec
from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from coordinator import logs
from coordinator.admin import LOCAL, Admin
from coordinator.approvals import Approvals, Decided, Locked
from coordinator.conditions.rules import WATCHED
from coordinator.conditions.watch import Conditions
from coordinator.events import KEPT, Events
from coordinator.loads import Done, Loads
from coordinator.metrics.service import Metrics, Unreachable
from coordinator.qr import squares
from coordinator.registry import Registry, measured, standing
from coordinator.store import AUDIT_KEPT
from coordinator.video.conductor import Conductor
from coordinator.video.shown import lease_row, package_rows, profile_rows
from coordinator.web.live import Live
from coordinator.web.visitors import CODE_SECONDS, PAGE, Visitors
from router.breaker import Breakers
from router.dialects.openapi import ALWAYS, openapi_schemas, told
from router.dialects.strict_json import read_object
from router.history import STORIES_KEPT, History, Story
from router.keys import KeyRing, credential
from router.placement import Demand, NoPlacement, Placement, explain
from router.problems import NO_KEY, WRONG_KEY, Problem, failed, invalid, missing_scope, not_found, wrong_method
from router.problems import from_refused as problem_of
from router.quotas import KeyLimits
from router.ticket import Failure, Ticket
from router.usage import Usage
from router.view import NodeView
from wire.identity import PROTOCOL, NodeId, valid_model
from wire.refusals import Refused

LONGEST_LOG = 2**30
STORIES_SHOWN = 50
"""Requests that the page shows, under way and ended."""
SILENT = 3.0
"""Seconds after which the page says how long a node is silent."""
EVENTS = "text/event-stream"
FOLLOW_SECONDS = 1.0
"""Between two looks at a log that is followed."""
LABEL = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
PLAIN = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""A text that moves no terminal's cursor."""
LONGEST_LIFE = 10 * 365 * 86400.0
"""Seconds that a key may live at most; one without an end lives until it is revoked."""
LONGEST_PAUSE = 365 * 86400.0
"""Seconds that a node is paused at most; one without an end is until it is resumed."""
DAY = r"^(\d{4}-\d{2}-\d{2})?$"
_actor: ContextVar[str] = ContextVar("actor", default="")
"""The key of the request that is being answered, as the audit log names it."""
_key: ContextVar[str] = ContextVar("key", default="")
"""The id of that key."""


class Body(BaseModel):
    """Base of request bodies: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class NewToken(Body):
    """A join token to make."""

    ttl_seconds: Annotated[float, Field(gt=0, le=30 * 86400)] = 3600.0
    uses: Annotated[int, Field(ge=1, le=1000)] = 1
    name: Annotated[str, Field(max_length=100, pattern=PLAIN)] = ""


class NewKey(Body):
    """An API key to make."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=PLAIN)]
    scopes: Annotated[list[Literal["infer", "metrics", "admin"]], Field(min_length=1, max_length=3)] = ["infer"]
    ttl_seconds: Annotated[float | None, Field(gt=0, le=LONGEST_LIFE)] = None
    limits: dict[str, Any] = {}


class Limits(Body):
    """A key's new limits, in place of all that it had."""

    limits: dict[str, Any]


class Labels(Body):
    """A node's new labels, in place of all that it had."""

    labels: Annotated[list[Annotated[str, Field(pattern=LABEL)]], Field(max_length=16)]


class Drain(Body):
    """How long to wait until a node has no requests."""

    wait_seconds: Annotated[float, Field(ge=0, le=86400)] = 0.0


class PauseBody(Body):
    """For how long a node takes nothing new; without an end it does not before it is resumed."""

    seconds: Annotated[float | None, Field(gt=0, le=LONGEST_PAUSE)] = None


class DryRun(Body):
    """A request to place without sending it."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    prompt_tokens: Annotated[int, Field(ge=1, le=10**9)] = 1000
    max_tokens: Annotated[int | None, Field(ge=1, le=10**9)] = None


class OneModel(Body):
    """A model to load, unload or measure, and where; without a node the pool decides."""

    model: Annotated[str, Field(min_length=1, max_length=200)]
    node: Annotated[str | None, Field(min_length=1, max_length=100)] = None


class Visit(Body):
    """The code of a link that `cluster open` gave."""

    code: Annotated[str, Field(min_length=1, max_length=100)]


class Traffic(Protocol):
    """What the API reads of the dispatcher."""

    usage: Usage
    history: History
    breakers: Breakers[NodeId]

    def in_flight(self, node: NodeId) -> int:
        """Requests on a node."""
        ...

    def waiting(self) -> int:
        """Requests that wait for a node."""
        ...

    def under_way(self) -> list[Ticket]:
        """Requests that are here, the oldest first."""
        ...

    def now(self) -> float:
        """The clock of its times."""
        ...

    async def emptied(self, node: NodeId, seconds: float) -> int:
        """Move what runs on a node, and wait until it has nothing."""
        ...

    def preview(self, demand: Demand) -> Placement | NoPlacement:
        """Place without reserving."""
        ...


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change while the coordinator runs."""

    name: str
    version: str
    epoch: int
    base_url: str
    cluster_url: str
    cluster: str
    started: float
    ca_pem: str = ""
    settings: tuple[dict[str, object], ...] = ()
    """Every setting in force: key, value, origin, description."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is seen of the pool: metrics, conditions, events, and the coordinator's own log."""

    metrics: Metrics
    conditions: Conditions
    events: Events
    log_file: Path


class ProblemError(Exception):
    """Carries a Problem out of a route."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def respond(problem: Problem, request: Request) -> Response:
    """Give a problem as an HTTP answer in the same shape as the routes that generate."""
    headers = {name.decode(): value.decode() for name, value in problem.headers()}
    body = problem.body(request.headers.get("x-request-id", "")[:64])
    return Response(body, problem.status, headers, "application/json")


class StrictRequest(Request):
    """A request whose body is read as strictly as on the routes that generate."""

    async def json(self) -> Any:
        """Give the JSON object, or the 400."""
        found = read_object(await self.body())
        if isinstance(found, Problem):
            raise HTTPException(found.status, found.message)
        return found


class StrictRoute(APIRoute):
    """A route that reads its body so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        plain = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await plain(StrictRequest(request.scope, request.receive))

        return handle


class Api:
    """The routes and what they act on."""

    def __init__(
        self,
        registry: Registry,
        admin: Admin,
        approvals: Approvals,
        ring: KeyRing,
        traffic: Traffic,
        loads: Loads,
        conductor: Conductor,
        facts: Facts,
        paths: Mapping[str, Any],
        visitors: Visitors,
        seen: Seen,
    ) -> None:
        self._registry = registry
        self._admin = admin
        self._approvals = approvals
        self._ring = ring
        self._traffic = traffic
        self._loads = loads
        self._conductor = conductor
        self._facts = facts
        self._paths = paths
        self._visitors = visitors
        self._live = Live(self._sections)
        self._metrics = seen.metrics
        self._conditions = seen.conditions
        self._events = seen.events
        self._log_file = seen.log_file
        self.app = FastAPI(
            title="Macpool",
            version=facts.version,
            description="The pool's endpoint and its administration.",
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            openapi_url="/api/v1/openapi.json",
        )
        self.app.router.route_class = StrictRoute
        self._answers: dict[tuple[str, str], dict[str, Any]] = {}
        self._install()
        self._document()

    def _install(self) -> None:
        app = self.app
        app.add_exception_handler(ProblemError, _on_problem)
        app.add_exception_handler(RequestValidationError, _on_invalid)
        app.add_exception_handler(HTTPException, _on_http)
        for method, path, scope, handler in (
            ("GET", "/status", "metrics", self.status),
            ("GET", "/version", "infer", self.version),
            ("GET", "/nodes", "metrics", self.nodes),
            ("GET", "/nodes/{node}", "metrics", self.node),
            ("GET", "/nodes/{node}/logs", "admin", self.logs),
            ("POST", "/nodes/{node}/cordon", "admin", self.cordon),
            ("POST", "/nodes/{node}/uncordon", "admin", self.uncordon),
            ("POST", "/nodes/{node}/drain", "admin", self.drain),
            ("POST", "/nodes/{node}/pause", "admin", self.pause),
            ("POST", "/nodes/{node}/resume", "admin", self.resume),
            ("PUT", "/nodes/{node}/labels", "admin", self.label),
            ("DELETE", "/nodes/{node}", "admin", self.remove),
            ("GET", "/models", "infer", self.models),
            ("POST", "/models/load", "admin", self.load),
            ("POST", "/models/unload", "admin", self.unload),
            ("POST", "/models/profile", "admin", self.profile),
            ("GET", "/videos/models", "infer", self.video_models),
            ("GET", "/leases", "metrics", self.leases),
            ("POST", "/place", "metrics", self.place),
            ("GET", "/requests", "metrics", self.requests),
            ("GET", "/requests/{request_id}", "metrics", self.request),
            ("GET", "/decisions", "admin", self.decisions),
            ("GET", "/live", "metrics", self.live),
            ("GET", "/settings", "admin", self.settings),
            ("POST", "/page/links", "admin", self.invite),
            ("DELETE", "/page/visit", "admin", self.leave),
            ("GET", "/conditions", "metrics", self.conditions),
            ("GET", "/events", "admin", self.events),
            ("GET", "/logs", "admin", self.own_logs),
            ("GET", "/tokens", "admin", self.list_tokens),
            ("POST", "/tokens", "admin", self.create_token),
            ("DELETE", "/tokens/{token}", "admin", self.revoke_token),
            ("GET", "/keys", "admin", self.list_keys),
            ("POST", "/keys", "admin", self.create_key),
            ("GET", "/keys/usage", "admin", self.keys_usage),
            ("PUT", "/keys/{key}/limits", "admin", self.limit_key),
            ("DELETE", "/keys/{key}", "admin", self.revoke_key),
            ("GET", "/usage", "infer", self.own_usage),
            ("GET", "/audit", "admin", self.audit),
            ("GET", "/joins", "admin", self.joins),
            ("POST", "/joins/{code}", "admin", self.approve),
            ("DELETE", "/joins/{code}", "admin", self.reject),
        ):
            self._route(method, "/api/v1" + path, scope, handler)
        for path, handler in (
            ("/metrics", self.metrics),
            ("/prometheus/sd", self.targets),
            ("/prometheus/nodes/{node}", self.node_metrics),
        ):
            self._route("GET", path, "metrics", handler)
        for method, path, handler in (("GET", "/ca.pem", self.ca), ("POST", "/page/visits", self.enter)):
            self._answers["/api/v1" + path, method.lower()] = _answers(path, method, handler.__name__)
            app.add_api_route(
                "/api/v1" + path, handler, methods=[method], summary=(handler.__doc__ or "").splitlines()[0],
                response_model=None, openapi_extra={"security": []},
            )  # fmt: skip

    def _route(self, method: str, path: str, scope: str, handler: Callable[..., Any]) -> None:
        self._answers[path, method.lower()] = _answers(path, method, handler.__name__)
        self.app.add_api_route(
            path,
            handler if method == "GET" or scope != "admin" else self._audited(handler),
            methods=[method],
            dependencies=[Depends(self._guard(scope))],
            openapi_extra={"x-scope": scope, "security": [{"key": []}]},
            summary=(handler.__doc__ or "").splitlines()[0],
            response_model=None,
        )

    async def ca(self) -> Response:
        """Give the certificate of the authority behind this endpoint (PEM), which is no secret."""
        if not self._facts.ca_pem:
            raise ProblemError(Problem(404, "no_authority", "this endpoint has no authority of its own"))
        return Response(self._facts.ca_pem, media_type="application/x-pem-file")

    def _audited(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Write what an administrator did into the audit log, once it is done."""

        @wraps(handler)
        async def audited(**given: Any) -> Any:
            answer = await handler(**given)
            self._admin.store.note(time.time(), _actor.get(), handler.__name__, _subject(given, answer))
            return answer

        return audited

    def _guard(self, scope: str) -> Callable[[Request], Awaitable[None]]:
        async def check(request: Request) -> None:
            presented = credential(request.scope["headers"])
            if presented is None:
                raise ProblemError(NO_KEY)
            key = self._ring.check(presented)
            if key is None:
                raise ProblemError(WRONG_KEY)
            if not key.allows(scope):
                raise ProblemError(missing_scope(scope))
            _actor.set(key.name if key.name in (LOCAL, PAGE) else key.id)
            _key.set(key.id)

        return check

    def _settle_usage(self) -> None:
        """Count what was used up to now."""
        self._admin.count(self._traffic.usage)

    def _document(self) -> None:
        plain = self.app.openapi

        def whole() -> dict[str, Any]:
            document = plain()
            for (path, method), answers in self._answers.items():
                document["paths"][path][method]["responses"] = answers
            for unused in ("HTTPValidationError", "ValidationError"):
                document["components"]["schemas"].pop(unused, None)
            document["paths"].update(self._paths)
            document["components"]["schemas"].update(openapi_schemas())
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            return document

        self.app.openapi = whole

    # -- the pool -----------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Say how the pool is and what needs a person."""
        return self._status()

    def _status(self) -> dict[str, Any]:
        facts = self._facts
        return {
            "schema": 1,
            "cluster": {"id": facts.cluster, "name": facts.name},
            "version": facts.version,
            "protocol": PROTOCOL,
            "epoch": facts.epoch,
            "uptime_seconds": round(time.monotonic() - facts.started, 3),
            "base_url": facts.base_url,
            "cluster_url": facts.cluster_url,
            "nodes": self._registry.states(),
            "models": sorted(self._registry.view().served()),
            "in_flight": sum(self._traffic.in_flight(node) for node in self._registry.pool.members),
            "queued": self._traffic.waiting(),
            "self_suspect": self._registry.pool.self_suspect,
            "warnings": self._registry.warnings(),
            "dangers": self._registry.dangers(),
            "conditions": [one.row() for one in self._conditions.active()],
        }

    async def version(self) -> dict[str, Any]:
        """Give version and protocol of the coordinator, and its clock (Unix seconds)."""
        return {"schema": 1, "version": self._facts.version, "protocol": PROTOCOL, "time": time.time()}

    async def nodes(self) -> dict[str, Any]:
        """List the nodes with their memory arithmetic; sizes in bytes."""
        members = self._registry.pool.members
        return {"schema": 1, "nodes": [self._describe(node) for node in members]}

    def _describe(self, node: NodeId) -> dict[str, Any]:
        return self._registry.describe(node, self._traffic.in_flight(node)) | {"breaker": self._breaker(node)}

    def _breaker(self, node: NodeId) -> dict[str, Any]:
        """Tell whether a node gets requests, as far as its engine's faults go; `until` in Unix seconds."""
        now = self._traffic.now()
        found = self._traffic.breakers.standing(node, now)
        if found is None:
            return {"state": "closed", "why": "", "until": None, "opened": 0}
        until = round(time.time() + found.until - now)
        return {"state": found.state, "why": found.why, "until": until, "opened": found.opened}

    async def node(self, node: str) -> dict[str, Any]:
        """Give everything that is known of one node."""
        return {"schema": 1, "node": self._describe(self._find(node))}

    async def logs(
        self, node: str, size: Annotated[int, Query(alias="bytes", ge=1, le=LONGEST_LOG)] = 65536, follow: bool = False
    ) -> Response:
        """Give the newest part of a node's log as text, fetched over its link; with `follow` also what is added."""
        links, found = self._registry.links, self._find(node)
        pieces = links.follow(found, "logs", size, FOLLOW_SECONDS) if follow else links.ask(found, "logs", size)
        return await self._text(pieces)

    async def own_logs(
        self, size: Annotated[int, Query(alias="bytes", ge=1, le=LONGEST_LOG)] = 65536, follow: bool = False
    ) -> Response:
        """Give the newest part of the coordinator's own log as text; with `follow` also what is added."""
        return await self._text(logs.read(self._log_file, size, every=FOLLOW_SECONDS if follow else None))

    async def events(
        self, request: Request, last: Annotated[int, Query(ge=0, le=KEPT)] = 50, follow: bool = False
    ) -> Response:
        """Tell the newest events of the coordinator as server-sent events; with `follow` also those that come.

        After a break `Last-Event-ID` asks for those that were missed."""
        if self._events.full:
            raise ProblemError(Problem(503, "too_many_readers", "as many read the events as may: try again later",
                                       retry_after=10.0))  # fmt: skip
        missed = request.headers.get("last-event-id", "")
        number = int(missed) if missed.isascii() and missed.isdigit() and len(missed) < 16 else None
        told = self._events.read(number, last, follow=follow)
        return StreamingResponse(told, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def _text(self, pieces: AsyncIterator[bytes]) -> Response:
        """Answer with text as it comes; a failure before the first of it is told as one."""
        try:
            first = await anext(pieces, b"")
        except (LookupError, TimeoutError) as error:
            raise ProblemError(Problem(503, "node_unreachable", str(error) or "the node did not answer")) from None
        except OSError as error:
            raise ProblemError(Problem(503, "no_log", f"the log cannot be read: {error.strerror}")) from None

        async def body() -> AsyncIterator[bytes]:
            yield first
            with contextlib.suppress(LookupError, TimeoutError, OSError):  # the node went: so ends its log
                async for piece in pieces:
                    yield piece

        return StreamingResponse(body(), media_type="text/plain; charset=utf-8")

    async def cordon(self, node: str) -> dict[str, Any]:
        """Send no new requests to a node; running ones end."""
        return self._set_cordon(node, on=True)

    async def uncordon(self, node: str) -> dict[str, Any]:
        """Send requests to a node again."""
        return self._set_cordon(node, on=False)

    async def drain(self, node: str, body: Drain) -> dict[str, Any]:
        """Send a node nothing new and move what runs there to others; answers when it is empty, or says what is left.

        It stays cordoned until it is uncordoned."""
        found = self._find(node)
        self._registry.cordon(found, on=True)
        left = await self._traffic.emptied(found, body.wait_seconds)
        return {"schema": 1, "node": found, "cordoned": True, "left": left}

    async def pause(self, node: str, body: PauseBody) -> dict[str, Any]:
        """Have a node take nothing new and give its memory back to its owner; what runs there goes on elsewhere.

        The node keeps the pause itself: it holds while the coordinator is away, and ends by itself."""
        return await self._pause(node, body.seconds)

    async def resume(self, node: str) -> dict[str, Any]:
        """End a node's pause; its own rule (`node.share`) may still keep it from taking work."""
        return await self._pause(node, 0.0)

    async def _pause(self, node: str, seconds: float | None) -> dict[str, Any]:
        found = self._find(node)
        try:
            sharing = await self._registry.pause(found, seconds, "an administrator of the pool")
        except LookupError as error:
            raise ProblemError(Problem(503, "node_unreachable", f"{node}: {error}")) from None
        if sharing is None:
            raise ProblemError(Problem(503, "node_unreachable", f"{node} has not said that it did so: look at its log"))
        left = self._traffic.in_flight(found)
        return {"schema": 1, "node": found, "sharing": msgspec.structs.asdict(sharing), "in_flight": left}

    def _set_cordon(self, node: str, *, on: bool) -> dict[str, Any]:
        found = self._find(node)
        self._registry.cordon(found, on=on)
        return {"schema": 1, "node": found, "cordoned": on}

    async def remove(self, node: str) -> dict[str, Any]:
        """Revoke a node's certificate at once and take it out of the pool."""
        found = self._find(node)
        self._registry.remove(found)
        await self._admin.store.flush()
        return {"schema": 1, "node": found}

    async def models(self) -> dict[str, Any]:
        """List the models and what each node says of them: loaded, loading, known, or failed; sizes in bytes."""
        return {"schema": 1, "models": self._models()}

    def _models(self) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for node in self._registry.view().nodes:
            for model in node.models.values():
                row = found.setdefault(
                    model.name, {"name": model.name, "nodes": [], "weights": model.weights, "context": model.context}
                )
                place = {"id": node.id, "name": node.name, "state": str(node.state), **standing(model)}
                row["nodes"].append({**place, "measured": measured(model)})
        return [found[name] for name in sorted(found)]

    async def load(self, body: OneModel) -> dict[str, Any]:
        """Load a model on a node, or where it is placed best; answers when it is loaded, which may take minutes."""
        answer = await self._loads.load(_model(body), self._node_view(body.node))
        if not isinstance(answer, Done):
            raise ProblemError(_problem(answer))
        return {"schema": 1, "model": body.model, "node": answer.row()}

    async def unload(self, body: OneModel) -> dict[str, Any]:
        """Give back the memory of a model on a node, or on every node that has it loaded."""
        done, wrong = await self._loads.unload(_model(body), self._node_view(body.node))
        if wrong is not None:
            raise ProblemError(_problem(wrong))
        return {"schema": 1, "model": body.model, "nodes": [one.row() for one in done]}

    async def profile(self, body: OneModel) -> dict[str, Any]:
        """Measure anew what a model takes, on a node or wherever it is loaded; answers when it is measured."""
        done, wrong = await self._loads.profile(_model(body), self._node_view(body.node))
        if wrong is not None:
            raise ProblemError(_problem(wrong))
        return {"schema": 1, "model": body.model, "nodes": [one.row() for one in done]}

    async def video_models(self) -> dict[str, Any]:
        """List the models that make videos, where they are, and what is known of the memory that they take."""
        conductor = self._conductor
        models = package_rows(self._registry.view(), conductor.profiles)
        return {"schema": 1, "lease": conductor.settings.lease_bytes, "models": models,
                "profiles": profile_rows(conductor.profiles)}  # fmt: skip

    async def leases(self) -> dict[str, Any]:
        """List the memory that nodes have lent to videos, oldest first; sizes in bytes."""
        view = self._registry.view()
        return {
            "schema": 1,
            "leases": [lease_row(hold, self._conductor.board, view) for hold in self._conductor.holds()],
        }

    def _node_view(self, node: str | None) -> NodeView | None:
        return None if node is None else self._registry.view().node(self._find(node))

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
        return {"schema": 1, "requests": [_told(story) for story in list(self._traffic.history.stories)[-last:]]}

    async def request(self, request_id: str) -> dict[str, Any]:
        """Give everything that is kept of a request: steps, end, and each decision with every node's arithmetic."""
        history = self._traffic.history
        stories, decisions = history.told(request_id), history.decided_on(request_id)
        if not stories and not decisions:
            raise ProblemError(Problem(404, "request_not_found", f"nothing is kept of a request {request_id[:100]!r}: "
                               f"the newest {STORIES_KEPT} are"))  # fmt: skip
        return {
            "schema": 1,
            "requests": [_told(story) for story in stories],
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
        return StreamingResponse(self._traffic.history.lines(), media_type="application/jsonl")

    # -- the page -------------------------------------------------------------------------------

    async def invite(self) -> dict[str, Any]:
        """Make a link that opens the page once, within two minutes, as an administrator."""
        url = f"{self._facts.base_url.removesuffix('/v1')}/#in={self._visitors.invite()}"
        return {"schema": 1, "url": url, "seconds": CODE_SECONDS}

    async def enter(self, body: Visit) -> dict[str, Any]:
        """Change the code of such a link for a key, which the page keeps."""
        entered = self._visitors.enter(body.code)
        if entered is None:
            raise ProblemError(Problem(401, "link_used_up", "this link was used, or is too old: run `cluster open`"))
        self._admin.store.note(time.time(), PAGE, "entered", "")
        return {"schema": 1, "key": entered[0], "expires": entered[1]}

    async def leave(self) -> dict[str, Any]:
        """End the visit whose key this is."""
        if not self._visitors.leave(_key.get()):
            raise ProblemError(Problem(404, "no_visit", "this key is none that the page was given: nothing ends"))
        return {"schema": 1}

    async def settings(self) -> dict[str, Any]:
        """List the coordinator's settings: value, where it comes from, what it means."""
        return {"schema": 1, "settings": list(self._facts.settings)}

    async def live(self, request: Request, follow: bool = False) -> Response:
        """Give what the page shows as server-sent events, a section each; with `follow` again whenever one changes.

        At most twice a second, and for as long as the key is good."""
        if self._live.full:
            raise ProblemError(Problem(503, "too_many_viewers", "too many pages are open: close one", retry_after=5))
        presented = credential(request.scope["headers"]) or b""

        def welcome() -> bool:
            key = self._ring.check(presented)
            return key is not None and key.allows("metrics")

        return StreamingResponse(
            self._live.stream(welcome, follow=follow), media_type=EVENTS,
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )  # fmt: skip

    def _sections(self) -> dict[str, object]:
        """Give what the page shows, in sections that change by themselves."""
        status = {name: value for name, value in self._status().items() if name != "uptime_seconds"}
        names = {row.id: row.name for row in self._ring.list()}
        stories = list(self._traffic.history.stories)[-STORIES_SHOWN:]
        return {
            "status": status,
            "nodes": [_steady(self._describe(node)) for node in self._registry.pool.members],
            "models": self._models(),
            "requests": [_under_way(ticket, names) for ticket in self._traffic.under_way()[:STORIES_SHOWN]],
            "ended": [{**_told(story), "key": names.get(story.key, story.key)} for story in stories],
            "joins": self._waiting(),
            "conditions": [one.row() for one in self._conditions.active()],
        }

    async def conditions(self) -> dict[str, Any]:
        """List what needs a person now, as alerts do: since when (Unix seconds), what it means and what to do."""
        rows = [one.row() for one in self._conditions.active()]
        return {"schema": 1, "conditions": rows, "watched": [rule.name for rule in WATCHED]}

    # -- for Prometheus --------------------------------------------------------------------------

    async def metrics(self, request: Request) -> Response:
        """Give the coordinator's metrics to Prometheus."""
        text, kind = await self._metrics.pool(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind})

    async def node_metrics(self, node: str, request: Request) -> Response:
        """Give a node's metrics to Prometheus, who knows it by the name that service discovery gives it."""
        try:
            text, kind = await self._metrics.node(self._find(node), request.headers.get("accept", ""))
        except Unreachable as error:
            raise ProblemError(Problem(503, "node_unreachable", str(error))) from None
        return Response(text, headers={"content-type": kind})

    async def targets(self, request: Request) -> Response:
        """List the nodes for Prometheus' service discovery, each behind this very address."""
        found = self._metrics.targets(request.headers["host"], request.url.scheme)
        return Response(msgspec.json.encode(found), media_type="application/json")

    def _find(self, node: str) -> NodeId:
        found = self._registry.find(node)
        if found is None:
            raise ProblemError(
                Problem(404, "node_not_found", f"there is no node {node[:100]!r}: look at `cluster nodes`")
            )
        return found

    # -- who may come in ------------------------------------------------------------------------

    async def list_tokens(self) -> dict[str, Any]:
        """List join tokens without their secrets."""
        return self._admin.list_tokens()

    async def create_token(self, body: NewToken) -> dict[str, Any]:
        """Make a join token. The answer is the only time its secret is shown."""
        answer = self._admin.create_token(body.ttl_seconds, body.uses, body.name)
        await self._admin.store.flush()
        join = f"cluster join {self._facts.cluster_url} --token {answer['token']}"
        return {**answer, "join": join, "qr": squares(join)}

    async def revoke_token(self, token: str) -> dict[str, Any]:
        """Make a join token useless at once."""
        if not self._admin.revoke_token(token):
            raise ProblemError(Problem(404, "token_not_found", f"there is no token {token[:40]!r}"))
        await self._admin.store.flush()
        return {"schema": 1, "id": token}

    async def list_keys(self) -> dict[str, Any]:
        """List API keys without their secrets."""
        return self._admin.list_keys()

    async def create_key(self, body: NewKey) -> dict[str, Any]:
        """Make an API key. The answer is the only time that it is shown."""
        if body.name in (LOCAL, PAGE):
            raise ProblemError(
                invalid(f"name: {body.name!r} stands for the owner of this machine in the audit log", "name")
            )
        answer = self._admin.create_key(body.name, list(body.scopes), body.ttl_seconds, _limits(body.limits))
        await self._admin.store.flush()
        return answer

    async def limit_key(self, key: str, body: Limits) -> dict[str, Any]:
        """Give a key other limits, at once: models, labels of nodes, rates, requests at once and in line, priority."""
        if not self._admin.limit_key(key, _limits(body.limits)):
            raise ProblemError(Problem(404, "key_not_found", f"there is no key {key[:40]!r}"))
        await self._admin.store.flush()
        return {"schema": 1, "id": key}

    async def keys_usage(
        self, key: str | None = None, since: Annotated[str, Query(pattern=DAY)] = ""
    ) -> dict[str, Any]:
        """Sum up the requests and tokens of every key by model, since a day (UTC, `2026-01-31`) or for ever."""
        self._settle_usage()
        return self._admin.usage(key, since)

    async def own_usage(self, since: Annotated[str, Query(pattern=DAY)] = "") -> dict[str, Any]:
        """Sum up the requests and tokens of the key that asks."""
        self._settle_usage()
        return self._admin.usage(_actor.get(), since)

    async def audit(self, last: Annotated[int, Query(ge=1, le=AUDIT_KEPT)] = 100) -> dict[str, Any]:
        """List the newest joins, keys and administrative acts, oldest first; times in Unix seconds."""
        return self._admin.acts(last)

    async def label(self, node: str, body: Labels) -> dict[str, Any]:
        """Give a node labels, to which keys can be bound."""
        found = self._find(node)
        self._registry.label(found, tuple(dict.fromkeys(body.labels)))
        await self._admin.store.flush()
        return {"schema": 1, "node": found, "labels": body.labels}

    async def revoke_key(self, key: str) -> dict[str, Any]:
        """Make an API key useless at once."""
        if not self._admin.revoke_key(key):
            raise ProblemError(Problem(404, "key_not_found", f"there is no key {key[:40]!r}"))
        await self._admin.store.flush()
        return {"schema": 1, "id": key}

    async def joins(self) -> dict[str, Any]:
        """List the machines that wait for a person to approve their code. The codes are not in the answer."""
        return {"schema": 1, "joins": self._waiting()}

    def _waiting(self) -> list[dict[str, Any]]:
        waiting = self._approvals.list(asyncio.get_running_loop().time())
        return [{"name": w.name, "address": w.address, "chip": w.hardware.chip} for w in waiting]

    async def approve(self, code: str) -> dict[str, Any]:
        """Let the machine in that shows this code."""
        return self._decided(self._approvals.approve(code, asyncio.get_running_loop().time()))

    async def reject(self, code: str) -> dict[str, Any]:
        """Turn the machine away that shows this code."""
        return self._decided(self._approvals.reject(code, asyncio.get_running_loop().time()))

    def _decided(self, decided: object) -> dict[str, Any]:
        if isinstance(decided, Decided):
            return {"schema": 1, "name": decided.waiting.name, "decision": decided.decision.value}
        if isinstance(decided, Locked):
            raise ProblemError(
                Problem(
                    429, "too_many_wrong_codes", "too many wrong codes: nothing is decided for a while",
                    retry_after=decided.seconds,
                )
            )  # fmt: skip
        raise ProblemError(Problem(404, "code_not_found", "no waiting machine shows this code: compare both screens"))


def _methods(request: Request) -> list[str]:
    """Give the methods of all routes at a path; the framework names those of the first alone."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    return sorted(method for route in routes if route.matches(request.scope)[0] is not Match.NONE
                  for method in route.methods or ())  # fmt: skip


_ORDERED = (404, 409, 429, 500, 502, 503, 504)
_MORE: dict[str, tuple[int, ...]] = {
    "logs": (503,), "load": _ORDERED, "unload": _ORDERED, "profile": _ORDERED, "approve": (429,), "reject": (429,),
    "ca": (404,), "enter": (401,), "leave": (404,), "live": (503,), "node_metrics": (503,), "own_logs": (503,),
    "events": (503,), "pause": (503,), "resume": (503,),
}  # fmt: skip
"""Statuses of single routes, by the name of what answers."""
_TEXTS = {
    "logs": "text/plain", "decisions": "application/jsonl", "ca": "application/x-pem-file", "metrics": "text/plain",
    "node_metrics": "text/plain", "own_logs": "text/plain", "events": EVENTS, "live": EVENTS,
}  # fmt: skip
"""What is not JSON, and what it is."""


def _answers(path: str, method: str, name: str) -> dict[str, Any]:
    """Describe what a route answers with."""
    answer: dict[str, Any] = {"type": "object", "required": ["schema"], "properties": {"schema": {"type": "integer"}}}
    if name == "targets":
        answer = {"type": "array", "items": {"type": "object"}}
    text = {"type": "object"} if _TEXTS.get(name) == EVENTS else {"type": "string"}
    good = {_TEXTS[name]: {"schema": text}} if name in _TEXTS else {"application/json": {"schema": answer}}
    bad = {*ALWAYS, *_MORE.get(name, ()), *((404,) if "{" in path else ()), *(() if method == "GET" else (408, 413))}
    described = {str(status): told("/api/v1/", status) for status in sorted(bad)}
    return {"200": {"description": "done" if method != "GET" else "the answer", "content": good}, **described}


def _steady(row: dict[str, Any]) -> dict[str, Any]:
    """Leave out of a node's row what changes with every look and means nothing: silence counts from three seconds."""
    heard = row["heard_seconds"]
    return {**row, "age": 0, "heard_seconds": None if heard is None else int(heard) if heard >= SILENT else 0}


def _under_way(ticket: Ticket, names: Mapping[str, str]) -> dict[str, Any]:
    """Describe a request that is here; not a word of what it says."""
    phase = "queued" if ticket.node is None else "prefill" if ticket.first_at is None else "decode"
    return {
        "id": ticket.job.request_id, "key": names.get(ticket.job.key, ticket.job.key), "model": ticket.job.demand.model,
        "node": ticket.node_name, "phase": phase, "prompt_tokens": ticket.read[0], "cached_tokens": ticket.read[1],
        "completion_tokens": ticket.wrote, "attempts": ticket.attempts, "stream": ticket.job.stream,
        "arrived": ticket.arrived,
    }  # fmt: skip


def _told(story: Story) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(story)
    steps = [{"at": at, "what": what, "node": node} for at, what, node in story.steps]
    return {**told, "steps": steps, "timings": None if story.timings is None else msgspec.structs.asdict(story.timings)}


def _subject(given: Mapping[str, Any], answer: Any) -> str:
    """Say to whom or what something was done: what the path names, else what the body names or the answer calls it."""
    named = [value for value in given.values() if isinstance(value, str)]
    body = next((value for value in given.values() if isinstance(value, Body)), None)
    told = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
    named += [str(value) for field in ("model", "node", "name") if (value := getattr(body, field, None))]
    return " ".join([*named, *([str(told["id"])] if "id" in told and told["id"] not in named else [])])[:300]


def _limits(given: Mapping[str, Any]) -> KeyLimits:
    try:
        return msgspec.convert(given, KeyLimits)
    except msgspec.ValidationError as error:
        raise ProblemError(invalid(f"limits: {error}", "limits")) from None


def _model(body: OneModel) -> str:
    if not valid_model(body.model):
        raise ProblemError(invalid("model: this cannot be the name of a model", "model"))
    return body.model


def _problem(answer: Refused | Failure) -> Problem:
    return problem_of(answer) if isinstance(answer, Refused) else failed(answer.code, answer.message)


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)  # noqa: S101  registered for this type
    return respond(error.problem, request)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101  registered for this type
    first = error.errors()[0]
    where = ".".join(str(step) for step in first["loc"][1:])
    return respond(invalid(f"{where or 'body'}: {first['msg']}", where or None), request)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  registered for this type
    if error.status_code == HTTPStatus.NOT_FOUND:
        return respond(not_found(request.url.path), request)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return respond(wrong_method(request.method, ", ".join(_methods(request))), request)
    if error.status_code == HTTPStatus.BAD_REQUEST:
        return respond(invalid(str(error.detail)), request)
    return respond(Problem(error.status_code, "http_error", str(error.detail)), request)

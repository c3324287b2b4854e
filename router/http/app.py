"""ASGI app of the router: serves the routes of inference, model lists and health. Other paths go to the control app.

These routes have no framework and no middleware, so that a token passes from the dispatcher through the request to one
call of `send`. Keys are checked before a body is read, and the size of a body is limited before it is parsed. At the
end of an exchange, each of its `ActiveRequest`s is closed, which cancels a request without an outcome on its node.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from msgspec.structs import replace

from router.admission.api_keys import SESSION_HEADER, ApiKey, KeyRing, extract_key, is_forwarded, parse_session
from router.admission.body_intake import BodyIntake
from router.admission.key_scope import filter_view
from router.dialects.anthropic import api
from router.dialects.anthropic.api import ANTHROPIC, MessagesRoute
from router.dialects.embeddings.api import EmbeddingsRoute, OllamaEmbeddingsRoute, OllamaEmbedRoute
from router.dialects.ollama import models as ollama_models
from router.dialects.ollama.api import OllamaChatRoute, OllamaGenerateRoute
from router.dialects.ollama.response import OLLAMA
from router.dialects.ollama.unsupported_routes import UNSUPPORTED_ROUTES, build_unsupported_route
from router.dialects.openai import models
from router.dialects.openai.chat import ChatRoute
from router.dialects.openai.completion import CompletionRoute
from router.dialects.openai.responses import ResponsesRoute, build_unsupported_use
from router.dialects.openapi import build_openapi_paths, build_openapi_schemas
from router.dialects.rerank.api import CohereRerankRoute, RerankRoute
from router.dialects.shared.interface import Dialect, ParsedRequest
from router.dispatch import count_tokens
from router.dispatch.active_request import ActiveRequest
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.request import RequestSpec
from router.errors import (
    FORWARDED_WITHOUT_KEY,
    NO_KEY,
    WRONG_KEY,
    Problem,
    build_missing_scope,
    build_not_found,
    build_wrong_method,
    from_refused,
)
from router.http import respond
from router.http.exchange import MAX_INLINE_BYTES, Exchange, Receive, Scope
from router.http.sse import Send
from router.settings import RouterSettings
from router.worker_thread import run_in_worker
from wire.node_state import NodeState
from wire.refusals import RefusalCode
from wire.units import show_size

P = TypeVar("P")
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
COUNT = "/v1/messages/count_tokens"
EMBEDDINGS = "/v1/embeddings"
MESSAGES = "/v1/messages"
MODELS = "/v1/models"
RESPONSES = "/v1/responses"
_READ = ("GET", "HEAD")
_ANY = (*_READ, "POST", "PUT", "DELETE")
FORWARDED = frozenset({CHAT, COMPLETIONS})
"""Paths of the routes whose requests an upstream may take."""
OLLAMA_PATHS = UNSUPPORTED_ROUTES | {"/api/tags", "/api/show", "/api/ps", "/api/version"}
"""Paths of Ollama's API on which no model answers."""

__all__ = ["App", "RouterApp", "build_openapi_paths", "build_openapi_schemas"]


class Forwarder(Protocol):
    """Interface of `router.http.upstream.forward.UpstreamForwarder`, which is imported only if there are upstreams."""

    async def forward(self, exchange: Exchange, request: ActiveRequest, body: bytes) -> None:
        """Pass a request with the body `body` on to its upstream, and answer the client."""
        ...


class RouterApp:
    """ASGI app of the routes of inference, model lists and health.

    `control` is the ASGI app for every other path and for websockets. `clock` returns Unix seconds. `forwarder` passes
    requests on to upstreams; None if there are no upstreams.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        keys: KeyRing,
        settings: RouterSettings,
        control: App,
        *,
        clock: Callable[[], float] = time.time,
        forwarder: Forwarder | None = None,
    ) -> None:
        self._forwarder = forwarder
        self._dispatcher = dispatcher
        self._counters = dispatcher.counters
        self._keys = keys
        self._settings = settings
        self._control = control
        self._clock = clock
        self._started = int(clock())
        self._short = min(settings.max_body_bytes, MAX_INLINE_BYTES)
        self._strict = strict = settings.unknown_fields == "refuse"
        self._responses = ResponsesRoute(strict=strict)
        self._intake = BodyIntake(settings.max_body_bytes)
        self.dialects: Mapping[str, Dialect] = {
            CHAT: ChatRoute(strict=strict),
            COMPLETIONS: CompletionRoute(strict=strict),
            MESSAGES: MessagesRoute(strict=strict),
            RESPONSES: self._responses,
            "/api/chat": OllamaChatRoute(strict=strict),
            "/api/generate": OllamaGenerateRoute(strict=strict),
            EMBEDDINGS: EmbeddingsRoute(strict=strict),
            "/api/embed": OllamaEmbedRoute(strict=strict),
            "/api/embeddings": OllamaEmbeddingsRoute(strict=strict),
            "/v1/rerank": RerankRoute(strict=strict),
            "/v2/rerank": CohereRerankRoute(strict=strict),
        }
        """Dialect of each route on which models answer, by path."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope: answer a request to a route of the router, or pass the scope to the control app.

        Answers of the router, except those of the health routes, are counted by status.
        """
        if scope["type"] != "http":
            await self._control(scope, receive, send)
            return
        path: str = scope["path"]
        dialect = self.dialects.get(path)
        if dialect is not None:
            exchange = Exchange(scope, receive, send, dialect.style)
            await self._count_answer(exchange, self._generate(exchange, dialect))
        elif path == MODELS or path.startswith(MODELS + "/"):
            exchange = Exchange(scope, receive, send)
            await self._count_answer(exchange, self._serve_models(exchange))
        elif path.startswith(RESPONSES + "/"):
            exchange = Exchange(scope, receive, send)
            await self._count_answer(exchange, self._serve_stored_response(exchange))
        elif path == COUNT:
            exchange = Exchange(scope, receive, send, ANTHROPIC)
            await self._count_answer(exchange, self._count_tokens(exchange))
        elif path in OLLAMA_PATHS or path.startswith("/api/blobs/"):
            exchange = Exchange(scope, receive, send, OLLAMA)
            await self._count_answer(exchange, self._serve_ollama(exchange))
        elif path == "/health":
            await self._serve_health(Exchange(scope, receive, send))
        elif path == "/livez":
            await self._serve_livez(Exchange(scope, receive, send))
        else:
            await self._control(scope, receive, send)

    async def _count_answer(self, exchange: Exchange, answered: Awaitable[None]) -> None:
        try:
            await answered
        finally:
            self._counters.count_answer(exchange.status)

    def _authorize(self, exchange: Exchange, methods: tuple[str, ...], scope: str) -> ApiKey | Problem:
        return authorize(self._keys, exchange, methods, scope)

    # generation

    async def _generate(self, exchange: Exchange, dialect: Dialect) -> None:
        key = self._authorize(exchange, ("POST",), "infer")
        if isinstance(key, Problem):
            await exchange.refuse(key)
            return
        body = b""

        def parse(received: bytes) -> ParsedRequest | Problem:
            nonlocal body
            body = received if self._forwarder is not None else b""
            return dialect.parse(received, key.id)

        parsed = await self._read_parsed(exchange, key, parse)
        if parsed is None:
            return
        if isinstance(parsed, Problem):
            await self._refuse(exchange, key, parsed)
            return
        specs = parsed.to_specs(key.id, exchange.request_id, int(self._clock()))
        if len(specs) > 1 and (refused := self._dispatcher.quotas.refuse_prompts(key.id, len(specs))) is not None:
            await self._refuse(exchange, key, from_refused(refused, "prompt"))
            return
        session = parse_session(exchange.get_header(SESSION_HEADER))
        if session:
            specs = tuple(replace(job, session=session) for job in specs)
        if self._forwarder is None or exchange.path not in FORWARDED or not self._may_forward(specs):
            await respond.generate(exchange, self._dispatcher, parsed, specs)
            return
        forward = partial(self._forwarder.forward, body=body)
        await respond.generate(exchange, self._dispatcher, parsed, [replace(specs[0], may_leave_pool=True)], forward)

    def _may_forward(self, specs: Sequence[RequestSpec]) -> bool:
        """Return whether a request has one prompt and may name an alias with an upstream, which can then take it."""
        dispatcher = self._dispatcher
        return len(specs) == 1 and dispatcher.names.may_mean_upstream(specs[0].demand.model, dispatcher.view)

    async def _refuse(self, exchange: Exchange, key: ApiKey, problem: Problem) -> None:
        """Answer with the problem of an invalid request or of a refused token count, and record it in the history."""
        self._dispatcher.history.record_invalid(self._dispatcher.get_time(), exchange.request_id, key.id, problem)
        await exchange.refuse(problem)

    async def _read_parsed(
        self, exchange: Exchange, key: ApiKey, parse: Callable[[bytes], P | Problem]
    ) -> P | Problem | None:
        """Receive and parse a body. Return the result of `parse`, a problem, or None if the client disconnected.

        A body of more than `MAX_INLINE_BYTES` counts towards the limit of its key (`BodyIntake`), and is parsed in a
        worker thread.
        """
        taken = 0

        async def reserve(size: int) -> Problem | None:
            nonlocal taken
            try:
                async with asyncio.timeout(self._settings.body_timeout_seconds):
                    await self._intake.take(key.id, size)
            except TimeoutError:
                return self._build_too_many_bytes(size)
            taken = size
            return None

        try:
            body = await exchange.receive_body(self._settings, reserve)
            if not isinstance(body, bytes):
                return body
            return parse(body) if len(body) <= MAX_INLINE_BYTES else await run_in_worker(partial(parse, body))
        finally:
            if taken:
                self._intake.release(key.id, taken)

    def _build_too_many_bytes(self, size: int) -> Problem:
        most, seconds = show_size(self._settings.max_body_bytes), self._settings.body_timeout_seconds
        text = f"this API key may send {most} of long bodies at the same time; this body of {show_size(size)} waited"
        return Problem(
            429, RefusalCode.RATE_LIMITED, f"{text} {seconds:g} s: send fewer bodies at once", retry_after=1.0
        )

    # other routes

    async def _count_tokens(self, exchange: Exchange) -> None:
        key = self._authorize(exchange, ("POST",), "infer")
        if isinstance(key, Problem):
            await exchange.refuse(key)
            return
        parsed = await self._read_parsed(
            exchange, key, partial(api.parse_count, created=int(self._clock()), strict=self._strict)
        )
        if parsed is None:
            return
        if isinstance(parsed, Problem):
            await self._refuse(exchange, key, parsed)
            return
        tokens = await count_tokens.count_prompt_tokens(self._dispatcher, parsed.tokens, key.id)
        if isinstance(tokens, Problem):
            await self._refuse(exchange, key, tokens)
            return
        await exchange.answer(b'{"input_tokens":%d}' % tokens, headers=respond.build_ignored_header(parsed.ignored))

    async def _serve_stored_response(self, exchange: Exchange) -> None:
        name = exchange.path[len(RESPONSES) + 1 :]
        unsupported = build_unsupported_use(name, exchange.query)
        key = self._authorize(exchange, (*_READ, "DELETE") if unsupported is None else _ANY, "infer")
        if isinstance(key, Problem):
            await exchange.refuse(key)
        elif unsupported is not None:
            await exchange.refuse(unsupported)
        else:
            act = self._responses.delete if exchange.method == "DELETE" else self._responses.get
            await exchange.respond(act(key.id, name))

    async def _serve_models(self, exchange: Exchange) -> None:
        if exchange.get_header(b"anthropic-version") is not None:
            exchange.use_style(ANTHROPIC)
        key = self._authorize(exchange, _READ, "infer")
        if isinstance(key, Problem):
            await exchange.refuse(key)
            return
        name = exchange.path[len(MODELS) + 1 :]
        visible = self._dispatcher.names.list_visible(self._dispatcher.view, key.limits)
        get_model, listing = models.get_model, models.list_models
        if exchange.style is ANTHROPIC:
            get_model, listing = models.get_anthropic_model, models.list_anthropic_models
        await exchange.respond(get_model(visible, name, self._started) if name else listing(visible, self._started))

    async def _serve_ollama(self, exchange: Exchange) -> None:
        path, view = exchange.path, self._dispatcher.view
        post = path == "/api/show"
        known = path in OLLAMA_PATHS - UNSUPPORTED_ROUTES
        key = self._authorize(exchange, (("POST",) if post else _READ) if known else _ANY, "infer")
        if isinstance(key, Problem):
            await exchange.refuse(key)
        elif not known:
            await exchange.refuse(build_unsupported_route(path))
        elif path == "/api/tags":
            visible = self._dispatcher.names.list_visible(view, key.limits)
            await exchange.respond(ollama_models.list_models(visible, self._started))
        elif path == "/api/ps":
            await exchange.respond(ollama_models.list_loaded_models(filter_view(view, key.limits)))
        elif path == "/api/version":
            await exchange.respond(ollama_models.encode_version())
        else:
            body = await exchange.receive_body(replace(self._settings, max_body_bytes=self._short))
            if body is not None:
                visible = self._dispatcher.names.list_visible(view, key.limits)
                await exchange.respond(
                    body if isinstance(body, Problem) else ollama_models.show_model(visible, body, self._started)
                )

    async def _serve_health(self, exchange: Exchange) -> None:
        if exchange.method not in _READ:
            await exchange.refuse(build_wrong_method(exchange.method, ", ".join(_READ)))
            return
        why = self._dispatcher.find_outage_reason()
        state: dict[str, object] = {"status": "unavailable" if why else "ok"}
        presented = extract_key(exchange.headers)
        if presented is not None and self._keys.is_valid(presented):
            ready = sum(node.state == NodeState.READY for node in self._dispatcher.view.nodes)
            state |= {"reason": why, "nodes_ready": ready, "waiting": len(self._dispatcher.queue)}
        await exchange.answer(json.dumps(state).encode(), 503 if why else 200)

    async def _serve_livez(self, exchange: Exchange) -> None:
        if exchange.method not in _READ:
            await exchange.refuse(build_wrong_method(exchange.method, ", ".join(_READ)))
            return
        await exchange.answer(b'{"status":"ok"}')


def authorize(keys: KeyRing, exchange: Exchange, methods: tuple[str, ...], scope: str) -> ApiKey | Problem:
    """Check the method, API key and scope of a request. Return the key, or a problem with status 405, 401 or 403.

    A request without a key has the key `KeyRing.anonymous`, if that is set and no proxy has forwarded the request. A
    wrong key is counted in `KeyRing.refused`.
    """
    if exchange.method not in methods:
        return build_wrong_method(exchange.method, ", ".join(methods))
    presented = extract_key(exchange.headers)
    key = keys.anonymous if presented is None else keys.check(presented)
    if key is None:
        return NO_KEY if presented is None else WRONG_KEY
    if key is keys.anonymous and is_forwarded(exchange.headers):
        return FORWARDED_WITHOUT_KEY
    return key if key.allows(scope) else build_missing_scope(scope)


async def serve_not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer every path with 404, and refuse websockets. This is the ASGI app of a router without a control app."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close"})  # before an accept the server answers with 403
        return
    exchange = Exchange(scope, receive, send)
    await exchange.refuse(build_not_found(exchange.path))

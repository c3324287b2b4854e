"""The front door: plain ASGI for the routes that models answer, everything else to the control app.

No framework and no middleware on these routes: a token's way is dispatcher → ticket → one `send`. Keys are checked
before a body is read, a body is bounded before it is parsed, and a request that leaves by any way closes its ticket, so
its reservation is freed and its node is told.
"""

import asyncio
import contextlib
import itertools
import json
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

from router.dialects import chat, chat_answer, models
from router.dialects.openapi import openapi_paths, openapi_schemas
from router.dispatch import Dispatcher
from router.events import EventStream, Message, Pump, Send, problem_of
from router.keys import ApiKey, KeyRing, credential
from router.problems import (
    NO_KEY,
    WRONG_KEY,
    Header,
    Problem,
    missing_scope,
    not_found,
    too_long,
    wrong_method,
)
from router.settings import RouterSettings
from router.stepper import Step, Stepper
from router.ticket import Outcome, StreamTicket, Ticket, WholeTicket
from wire.frames import Finished
from wire.identity import valid_request_id

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
_READ = ("GET", "HEAD")
_JSON = (b"content-type", b"application/json")
_PROCESS = secrets.token_hex(6)
_numbers = itertools.count(1)
"""Request ids are unique, not secret."""
GONE = 499
"""Counted, never sent: the client left before an answer."""

__all__ = ["App", "Exchange", "FrontDoor", "openapi_paths", "openapi_schemas"]


class Exchange:
    """One HTTP request and the one answer it gets."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: list[Header] = scope["headers"]
        self.receive = receive
        self.send = send
        self.request_id = _request_id(self.headers)
        self.status = GONE

    async def answer(self, body: bytes, status: int = 200, headers: list[Header] | None = None) -> None:
        """Send a whole JSON answer; HEAD gets its headers alone."""
        self.status = status
        head: list[Header] = [
            _JSON,
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", self.request_id.encode()),
        ]
        await self.send({"type": "http.response.start", "status": status, "headers": head + (headers or [])})
        await self.send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def refuse(self, problem: Problem, headers: list[Header] | None = None) -> None:
        """Send a problem."""
        await self.answer(problem.body(self.request_id), problem.status, problem.headers() + (headers or []))


def _request_id(headers: list[Header]) -> str:
    for name, value in headers:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if valid_request_id(text):
                return text
    return f"{_PROCESS}{next(_numbers):012x}"


class FrontDoor:
    """The ASGI app. `control` gets every other path, websockets and the lifespan; `clock` is seconds since 1970."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        keys: KeyRing,
        settings: RouterSettings,
        control: App,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._dispatcher = dispatcher
        self._counters = dispatcher.counters
        self._keys = keys
        self._settings = settings
        self._control = control
        self._clock = clock
        self._started = int(clock())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection scope."""
        if scope["type"] != "http":
            await self._control(scope, receive, send)
            return
        path: str = scope["path"]
        if path == CHAT:
            await self._counted(Exchange(scope, receive, send), self._chat)
        elif path == MODELS or path.startswith(MODELS + "/"):
            await self._counted(Exchange(scope, receive, send), self._models)
        elif path == "/health":
            await self._health(Exchange(scope, receive, send))
        elif path == "/livez":
            await self._livez(Exchange(scope, receive, send))
        else:
            await self._control(scope, receive, send)

    async def _counted(self, exchange: Exchange, route: Callable[[Exchange], Awaitable[None]]) -> None:
        try:
            await route(exchange)
        finally:
            self._counters.answered(exchange.status)

    # reading

    def _allowed(self, exchange: Exchange, methods: tuple[str, ...], scope: str) -> ApiKey | Problem:
        if exchange.method not in methods:
            return wrong_method(exchange.method, ", ".join(methods))
        presented = credential(exchange.headers)
        if presented is None:
            return NO_KEY
        key = self._keys.check(presented)
        if key is None:
            return WRONG_KEY
        return key if key.allows(scope) else missing_scope(scope)

    async def _body(self, exchange: Exchange) -> bytes | Problem | None:
        """Read a body up to the limit, None when the client left before its end."""
        limit = self._settings.body_bytes
        declared = next((value for name, value in exchange.headers if name == b"content-length"), b"0")
        if not declared.isdigit() or len(declared) > 18 or int(declared) > limit:
            return too_long(limit)
        first = await exchange.receive()
        if first["type"] != "http.request":
            return None
        body: bytes = first.get("body", b"")
        if len(body) > limit:
            return too_long(limit)
        if not first.get("more_body", False):
            return body
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                return await _rest(exchange.receive, bytearray(body), limit)
        except TimeoutError:
            seconds = self._settings.body_seconds
            return Problem(408, "request_timeout", f"the body did not arrive within {seconds:.0f} s")

    # chat

    async def _chat(self, exchange: Exchange) -> None:
        key = self._allowed(exchange, ("POST",), "infer")
        if isinstance(key, Problem):
            await exchange.refuse(key)
            return
        body = await self._body(exchange)
        if body is None:
            return
        asked = body if isinstance(body, Problem) else chat.parse(body)
        if isinstance(asked, Problem):
            await exchange.refuse(asked)
            return
        await self._answer(exchange, asked, key)

    async def _answer(self, exchange: Exchange, asked: chat.ChatRequest, key: ApiKey) -> None:
        ticket = self._dispatcher.submit(asked.job(key.id, exchange.request_id, int(self._clock())))
        watch = Watch(exchange.receive, lambda: self._dispatcher.close(ticket))
        try:
            if isinstance(ticket, StreamTicket):
                await _stream(exchange, ticket)
            else:
                await _whole(exchange, cast("WholeTicket", ticket))
        finally:
            watch.close()
            self._dispatcher.close(ticket)

    # the rest

    async def _models(self, exchange: Exchange) -> None:
        key = self._allowed(exchange, _READ, "infer")
        if isinstance(key, Problem):
            await exchange.refuse(key)
            return
        name = exchange.path[len(MODELS) + 1 :]
        view = self._dispatcher.view
        found = models.one(view, name, self._started) if name else models.listing(view, self._started)
        if isinstance(found, Problem):
            await exchange.refuse(found)
        else:
            await exchange.answer(found)

    async def _health(self, exchange: Exchange) -> None:
        if exchange.method not in _READ:
            await exchange.refuse(wrong_method(exchange.method, ", ".join(_READ)))
            return
        why = self._dispatcher.servable()
        ready = sum(node.state == "ready" for node in self._dispatcher.view.nodes)
        state = {"status": "unavailable" if why else "ok", "reason": why, "nodes_ready": ready,
                 "waiting": len(self._dispatcher.queue)}  # fmt: skip
        await exchange.answer(json.dumps(state).encode(), 503 if why else 200)

    async def _livez(self, exchange: Exchange) -> None:
        if exchange.method not in _READ:
            await exchange.refuse(wrong_method(exchange.method, ", ".join(_READ)))
            return
        await exchange.answer(b'{"status":"ok"}')


async def _rest(receive: Receive, body: bytearray, limit: int) -> bytes | Problem | None:
    while True:
        part = await receive()
        if part["type"] != "http.request":
            return None
        body += part.get("body", b"")
        if len(body) > limit:
            return too_long(limit)
        if not part.get("more_body", False):
            return bytes(body)


class Watch:
    """Calls `gone` when the client leaves."""

    __slots__ = ("_gone", "_receive", "_stepper")

    def __init__(self, receive: Receive, gone: Callable[[], None]) -> None:
        self._receive = cast("Callable[[], Step]", receive)
        self._gone = gone
        self._stepper = Stepper(self._received)
        self._stepper.run(self._receive())

    def close(self) -> None:
        """Watch no longer."""
        self._gone = _nothing
        self._stepper.close()

    def _received(self, message: Message | None) -> None:
        if message is None or message["type"] == "http.disconnect":
            self._gone()
        else:
            self._stepper.run(self._receive())


async def _whole(exchange: Exchange, ticket: WholeTicket) -> None:
    outcome = await ticket.outcome_of()
    if isinstance(outcome, Finished):
        body = chat_answer.completion(ticket.job, ticket.answer(), outcome)
        await exchange.answer(body, 200, _about(ticket))
    else:
        await _decline(exchange, ticket, outcome)


async def _stream(exchange: Exchange, ticket: StreamTicket) -> None:
    """Answer with events; until the first delta (or a long silence) a plain refusal is still possible."""
    while not ticket.ready:
        await ticket.wait()
    outcome = ticket.outcome
    if outcome is not None and not isinstance(outcome, Finished):
        await _decline(exchange, ticket, outcome)
        return
    chunks = chat_answer.ChatChunks(ticket.job)
    stream = EventStream(exchange.send)
    exchange.status = 200
    ticket.opened = True
    await stream.open([(b"x-request-id", exchange.request_id.encode()), *_about(ticket)])
    Pump(ticket, chunks, stream)
    await stream.done


async def _decline(exchange: Exchange, ticket: Ticket, outcome: Outcome) -> None:
    problem = problem_of(outcome)
    if problem is not None:
        await exchange.refuse(problem, _about(ticket))


def _nothing() -> None:
    return


def _about(ticket: Ticket) -> list[Header]:
    attempts = (b"x-macpool-attempts", str(ticket.attempts).encode())
    if not ticket.node_name:
        return [attempts]
    return [(b"x-macpool-node", ticket.node_name.encode("ascii", "replace")), attempts]


async def nothing_else(scope: Scope, receive: Receive, send: Send) -> None:
    """Stand in for the control app: nothing at any other path, and a lifespan that only says yes."""
    if scope["type"] == "lifespan":
        with contextlib.suppress(KeyError):
            while True:
                event = await receive()
                await send({"type": event["type"] + ".complete"})
                if event["type"] == "lifespan.shutdown":
                    return
    exchange = Exchange(scope, receive, send)
    await exchange.refuse(not_found(exchange.path))

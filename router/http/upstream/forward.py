"""Passing on of requests to upstreams: the client's body goes there, and the answer comes back event by event.

The model in the body becomes the model of the upstream, and the model in the answer becomes `upstream:NAME/MODEL`.
Defaults of a profile are added where the body has none. Nothing of the client's headers goes to the upstream.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import msgspec

from router.dispatch.active_request import ActiveRequest
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.request import RequestFailure
from router.errors import Header, Problem
from router.http.exchange import Exchange
from router.http.sse import build_problem
from router.http.upstream.client import UpstreamClient, UpstreamError
from router.http.upstream.events import (
    DONE,
    EventReader,
    UpstreamStreamError,
    Usage,
    check_answer,
    is_finished,
    parse_object,
    read_usage,
)
from router.profiles import PENALTIES, ProfileSettings
from wire.frames import Finished
from wire.refusals import FailureCode

MAX_ANSWER_BYTES = 32 * 1024 * 1024
"""Maximum bytes of an answer that is not streamed."""
UPSTREAM = b"x-macpool-upstream"
"""Header of the answer with the name of the upstream."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", *PENALTIES)
_COMMENT = b": waiting\n\n"
_BYTES_PER_TOKEN = 4


class UpstreamForwarder:
    """Forwarder of requests to upstreams.

    `clients` has the HTTP client of each upstream by its name. `profiles` has the profiles of the settings by
    their names; their defaults are added to bodies.
    """

    def __init__(
        self, dispatcher: Dispatcher, clients: Mapping[str, UpstreamClient], profiles: Mapping[str, ProfileSettings]
    ) -> None:
        self._dispatcher = dispatcher
        self._clients = clients
        self._profiles = profiles

    async def forward(self, exchange: Exchange, request: ActiveRequest, body: bytes) -> None:
        """Pass a request with this body on to its upstream, and answer the client.

        The request ends here, or earlier because its client left or the coordinator stops.
        """
        client = self._clients[request.answer.upstream]
        passing = _Passing(exchange, self._dispatcher, client, request, _build_headers(exchange, request, client.name))
        work = asyncio.ensure_future(passing.run(_build_body(body, request, client, self._profiles)))
        request.answer.attach(lambda: _cancel(work))
        try:
            await asyncio.wait({work})
        finally:
            request.answer.detach()
            work.cancel()
        if work.cancelled():
            await passing.end_stopped()
        else:
            work.result()


class _Passing:
    """One request at an upstream."""

    def __init__(
        self,
        exchange: Exchange,
        dispatcher: Dispatcher,
        client: UpstreamClient,
        request: ActiveRequest,
        headers: list[Header],
    ) -> None:
        self._exchange = exchange
        self._dispatcher = dispatcher
        self._client = client
        self._request = request
        self._headers = headers
        self._label = request.demand.model
        self._is_open = False
        self._usage: Usage | None = None
        self._chunks = 0

    async def run(self, body: bytes) -> None:
        """Send the body, answer the client, and end the request."""
        stream, seconds = self._request.spec.stream, self._client.settings.total_seconds
        failure: UpstreamError | None = None
        rendered = b""
        try:
            async with asyncio.timeout(seconds):
                async with self._client.request(_get_path(self._exchange), body, stream=stream) as received:
                    self._request.record_prefill(self._estimate_prompt_tokens(), 0)
                    if stream:
                        await self._pass_events(received)
                    else:
                        rendered = await self._read_answer(received)
        except TimeoutError:
            failure = self._client.build_error(f"did not end within {seconds:g} s")
        except UpstreamStreamError as error:
            failure = self._client.build_error(str(error))
        except UpstreamError as error:
            failure = error
        self._request.answer.detach()
        if failure is not None:
            await self._fail(failure)
            return
        self._end_complete()
        if stream:
            await self._send(b"data: [DONE]\n\n", last=True)
        else:
            await self._exchange.answer(rendered, 200, self._headers)

    async def end_stopped(self) -> None:
        """End a request whose client left, or that the coordinator stops."""
        outcome = self._request.outcome
        prompt, completion = self._count_tokens()
        self._record("cancelled", prompt=prompt, completion=completion)
        problem = None if outcome is None else build_problem(outcome)
        if problem is not None:
            await self._send_problem(problem)

    # the answer

    async def _read_answer(self, received: AsyncIterator[bytes]) -> bytes:
        whole = bytearray()
        async for part in received:
            whole += part
            if len(whole) > MAX_ANSWER_BYTES:
                raise UpstreamStreamError(f"sent an answer of more than {MAX_ANSWER_BYTES} bytes")
        answer = parse_object(bytes(whole))
        check_answer(answer)
        self._usage = read_usage(answer)
        self._chunks = len(whole) // _BYTES_PER_TOKEN
        return msgspec.json.encode({**answer, "model": self._label})

    async def _pass_events(self, received: AsyncIterator[bytes]) -> None:
        reader, finished = EventReader(), False
        async for part in received:
            events = b""
            for data in reader.feed(part):
                if data == DONE:
                    await self._send(events)
                    return
                if not data:
                    events += _COMMENT
                    continue
                chunk = parse_object(data)
                finished = is_finished(check_answer(chunk)) or finished
                events += self._convert_chunk(chunk)
            await self._send(events)
        if not finished:
            raise UpstreamStreamError("ended its stream in the middle of the answer")

    def _convert_chunk(self, chunk: dict[str, Any]) -> bytes:
        """Return the event for the client; empty for token counts that the client did not request."""
        self._usage = read_usage(chunk) or self._usage
        if chunk["choices"]:
            self._chunks += 1
            self._request.tokens.count_foreign(1)
        elif not self._request.spec.include_usage and "usage" in chunk:
            return b""
        return b"data: " + msgspec.json.encode({**chunk, "model": self._label}) + b"\n\n"

    async def _send(self, events: bytes, *, last: bool = False) -> None:
        if not events:
            return
        if not self._is_open:
            self._is_open = True
            self._exchange.begin()
            kind = (b"content-type", self._exchange.style.stream)
            head = [kind, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            headers = [*head, *self._exchange.build_id_headers(), *self._headers]
            await self._exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._exchange.send({"type": "http.response.body", "body": events, "more_body": not last})

    # ends

    def _end_complete(self) -> None:
        usage = self._usage or Usage(self._estimate_prompt_tokens(), self._chunks)
        choices = self._request.spec.params.n
        finished = Finished(0, ("stop",) * choices, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        self._dispatcher.upstreams.end_request(self._request, finished)
        self._record("ok", prompt=usage.prompt_tokens, completion=usage.completion_tokens)

    async def _fail(self, error: UpstreamError) -> None:
        """End the request with a failure: a plain answer before the first byte, else an event."""
        prompt, completion = self._count_tokens()
        outcome = "interrupted" if self._is_open else error.outcome
        fault = error.message if error.is_fault else ""
        self._record(outcome, fault=fault, prompt=prompt, completion=completion)
        local = self._request.alias.refused if self._request.alias is not None else None
        message = error.message if local is None else f"{error.message}; {local.message}"
        memory = None if local is None else local.numbers
        self._dispatcher.upstreams.end_request(self._request, RequestFailure(FailureCode.UPSTREAM_FAILED, message))
        problem = Problem(
            error.status, FailureCode.UPSTREAM_FAILED, message, memory=memory, retry_after=error.retry_after
        )
        await self._send_problem(problem)

    async def _send_problem(self, problem: Problem) -> None:
        if self._is_open:
            await self._send(problem.encode_event(self._exchange.request_id), last=True)
        else:
            await self._exchange.refuse(problem, self._headers)

    def _record(self, outcome: str, *, fault: str = "", prompt: int = 0, completion: int = 0) -> None:
        self._dispatcher.upstreams.record_end(
            self._client.name, self._request.number, outcome, fault=fault, prompt=prompt, completion=completion
        )

    def _count_tokens(self) -> tuple[int, int]:
        """Return the prompt and completion tokens so far, counted by the upstream or estimated.

        Both are 0 before the upstream answers.
        """
        usage = self._usage
        if usage is None:
            return self._request.prompt_counts[0], self._chunks
        return usage.prompt_tokens, usage.completion_tokens

    def _estimate_prompt_tokens(self) -> int:
        demand = self._request.demand
        return demand.prompt_bytes // _BYTES_PER_TOKEN if demand.prompt_tokens is None else demand.prompt_tokens


def _get_path(exchange: Exchange) -> str:
    return exchange.path.removeprefix("/v1")


def _build_headers(exchange: Exchange, request: ActiveRequest, upstream: str) -> list[Header]:
    return [(UPSTREAM, upstream.encode()), (b"x-macpool-model", request.demand.model.encode("ascii", "replace"))]


def _build_body(
    body: bytes, request: ActiveRequest, client: UpstreamClient, profiles: Mapping[str, ProfileSettings]
) -> bytes:
    """Return the body for the upstream: its model, the defaults of the profile, and token counts in the stream."""
    fields = cast("dict[str, Any]", msgspec.json.decode(body))
    fields["model"] = client.settings.model
    profile = profiles.get(request.spec.profile)
    if profile is not None:
        _add_defaults(fields, profile)
    if request.spec.stream and client.settings.stream_usage:
        options = fields.get("stream_options")
        fields["stream_options"] = {**(options or {}), "include_usage": True}
    return msgspec.json.encode(fields)


def _add_defaults(fields: dict[str, Any], profile: ProfileSettings) -> None:
    """Add the defaults of a profile to the fields of a body that are absent or null."""
    defaults = {name: getattr(profile, name) for name in _SAMPLING}
    if fields.get("max_completion_tokens") is None:
        defaults["max_tokens"] = profile.max_tokens
    for name, value in defaults.items():
        if value is not None and fields.get(name) is None:
            fields[name] = value
    if profile.chat_template_kwargs:
        own = cast("dict[str, Any]", fields.get("chat_template_kwargs") or {})
        fields["chat_template_kwargs"] = {**profile.chat_template_kwargs, **own}


def _cancel(work: asyncio.Future[None]) -> None:
    work.cancel()

"""Forwarding of requests to upstreams, which get the client's body and whose answers are sent event by event.

The model in the body becomes the model of the upstream, and the model in the answer becomes `upstream:NAME/MODEL`.
Defaults of a profile are added for fields that the body does not set. The client's headers are not sent to the
upstream.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from router.admission.request_limits import MAX_PROMPT_IDS
from router.dialects.shared.strict_json import PROMPT_FIELDS, read_object
from router.dispatch.active_request import ActiveRequest
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.request import SLOW, Outcome, RequestFailure
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
from router.profiles import SAMPLING_DEFAULTS, ProfileSettings
from router.settings import RouterSettings
from wire.frames import Finished
from wire.refusals import FailureCode

MAX_ANSWER_BYTES = 32 * 1024 * 1024
"""Maximum bytes of an answer that is not streamed."""
UPSTREAM = b"x-macpool-upstream"
"""Header of the answer with the name of the upstream."""
_COMMENT = b": waiting\n\n"
_BYTES_PER_TOKEN = 4
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _SlowClientError(Exception):
    """Raised if a client does not read its stream for `slow_client_seconds`."""


class UpstreamForwarder:
    """Forwarder of requests to upstreams.

    `clients` has the HTTP client of each upstream, by name. `settings` has the profiles, whose defaults are added to
    bodies, and the maximum time in which a client does not read its stream.
    """

    def __init__(self, dispatcher: Dispatcher, clients: Mapping[str, UpstreamClient], settings: RouterSettings) -> None:
        self._dispatcher = dispatcher
        self._clients = clients
        self._settings = settings

    async def forward(self, exchange: Exchange, request: ActiveRequest, body: bytes) -> None:
        """Pass a request with the body `body` on to its upstream, and answer the client.

        The request has ended when this method returns. If the upstream fails, or takes more than `total_seconds`, the
        client gets an error. The request to the upstream is aborted if the client disconnects, the coordinator stops,
        or this call is cancelled.
        """
        client, settings = self._clients[request.answer.upstream], self._settings
        headers = _build_headers(exchange, request, client.name)
        passing = _Passing(exchange, self._dispatcher, client, request, headers, settings.slow_client_seconds)
        work = asyncio.ensure_future(passing.run(_build_body(body, request, client, settings.profiles)))
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
        slow_seconds: float,
    ) -> None:
        self._exchange = exchange
        self._dispatcher = dispatcher
        self._client = client
        self._request = request
        self._headers = headers
        self._slow_seconds = slow_seconds
        self._label = request.demand.model
        self._is_open = False
        self._usage: Usage | None = None
        self._chunks = 0
        self._ends = 0.0
        """Time at which the upstream must have sent the answer, in seconds of the loop's clock."""

    async def run(self, body: bytes) -> None:
        """Send the body to the upstream, answer the client, and end the request."""
        stream, seconds = self._request.spec.stream, self._client.settings.total_seconds
        self._ends = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(self._ends) as clock:
                async with self._client.request(_get_path(self._exchange), body, stream=stream) as received:
                    self._request.record_prefill(self._estimate_prompt_tokens(), 0)
                    answer = b""
                    if stream:
                        await self._pass_events(received, clock)
                    else:
                        answer = await self._read_answer(received)
                    clock.reschedule(None)
                    await self._complete(answer)
        except _SlowClientError:
            self._end_slow()
        except TimeoutError:
            await self._fail(self._client.build_error(f"did not end within {seconds:g} s"))
        except UpstreamStreamError as error:
            await self._fail(self._client.build_error(str(error)))
        except UpstreamError as error:
            await self._fail(error)

    async def end_stopped(self) -> None:
        """Record the end of a request whose client disconnected or that the coordinator stopped.

        In the latter case, send the client the reason.
        """
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

    async def _pass_events(self, received: AsyncIterator[bytes], clock: asyncio.Timeout) -> None:
        """Send the events of an upstream to the client, up to the end of the stream.

        Events that arrive together with an invalid event are sent first. `clock` is the timeout of the upstream.
        """
        reader, finished, is_done = EventReader(), False, False
        async for part in received:
            events = b""
            try:
                for data in reader.feed(part):
                    if data == DONE:
                        is_done = True
                        break
                    if not data:
                        events += _COMMENT
                        continue
                    chunk = parse_object(data)
                    finished = is_finished(check_answer(chunk)) or finished
                    events += self._convert_chunk(chunk)
            except UpstreamStreamError:
                await self._send_in_time(events.replace(_COMMENT, b""), clock)
                raise
            await self._send_in_time(events, clock)
            if is_done:
                return
        if not finished:
            raise UpstreamStreamError("ended its stream in the middle of the answer")

    def _convert_chunk(self, chunk: dict[str, Any]) -> bytes:
        """Return the event for the client; empty for a chunk of token counts that the client did not request."""
        self._usage = read_usage(chunk) or self._usage
        if chunk["choices"]:
            self._chunks += 1
            self._request.tokens.count_foreign(1)
        elif not self._request.spec.include_usage and "usage" in chunk:
            return b""
        return b"data: " + msgspec.json.encode({**chunk, "model": self._label}) + b"\n\n"

    async def _send_in_time(self, events: bytes, clock: asyncio.Timeout) -> None:
        """Send events. The time that this takes does not count towards the timeout of the upstream."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        clock.reschedule(None)
        await self._send(events)
        self._ends += loop.time() - began
        clock.reschedule(self._ends)

    async def _send(self, events: bytes, *, last: bool = False) -> None:
        """Send events to the client. Raise `_SlowClientError` if this takes more than `slow_client_seconds`."""
        if not events:
            return
        try:
            async with asyncio.timeout(self._slow_seconds):
                await self._open_stream()
                await self._exchange.send({"type": "http.response.body", "body": events, "more_body": not last})
        except TimeoutError:
            raise _SlowClientError from None

    async def _open_stream(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        self._exchange.begin()
        kind = (b"content-type", self._exchange.style.stream)
        head = [kind, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        headers = [*head, *self._exchange.build_id_headers(), *self._headers]
        await self._exchange.send({"type": "http.response.start", "status": 200, "headers": headers})

    # ends

    async def _complete(self, answer: bytes) -> None:
        """End a request that the upstream answered, and send `answer`, or the end of a stream if that is empty."""
        usage = self._usage or Usage(self._estimate_prompt_tokens(), self._chunks)
        choices = self._request.spec.params.n
        finished = Finished(0, ("stop",) * choices, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        self._end(finished)
        self._record("ok", prompt=usage.prompt_tokens, completion=usage.completion_tokens)
        if answer:
            await self._exchange.answer(answer, 200, self._headers)
        else:
            await self._send(b"data: [DONE]\n\n", last=True)

    def _end_slow(self) -> None:
        """End a request whose client does not read its stream, which is not a fault of the upstream."""
        self._dispatcher.counters.count_slow_client()
        if self._request.outcome is None:
            prompt, completion = self._count_tokens()
            self._end(SLOW)
            self._record("cancelled", prompt=prompt, completion=completion)

    async def _fail(self, error: UpstreamError) -> None:
        """End the request with a failure: an answer of its own before the first event of a stream, else an event."""
        prompt, completion = self._count_tokens()
        outcome = "interrupted" if self._is_open else error.outcome
        fault = error.message if error.is_fault else ""
        self._record(outcome, fault=fault, prompt=prompt, completion=completion)
        local = self._request.alias.refused if self._request.alias is not None else None
        message = error.message if local is None else f"{error.message}; {local.message}"
        memory = None if local is None else local.numbers
        self._end(RequestFailure(FailureCode.UPSTREAM_FAILED, message))
        problem = Problem(
            error.status, FailureCode.UPSTREAM_FAILED, message, memory=memory, retry_after=error.retry_after
        )
        await self._send_problem(problem)

    def _end(self, outcome: Outcome) -> None:
        """End the request. The work of this object continues."""
        self._request.answer.detach()
        self._dispatcher.upstreams.end_request(self._request, outcome)

    async def _send_problem(self, problem: Problem) -> None:
        """Send a problem: as the answer, or as the last event of a stream, unless the client does not read it."""
        if not self._is_open:
            await self._exchange.refuse(problem, self._headers)
            return
        with suppress(_SlowClientError):
            await self._send(problem.encode_event(self._exchange.request_id), last=True)

    def _record(self, outcome: str, *, fault: str = "", prompt: int = 0, completion: int = 0) -> None:
        self._dispatcher.upstreams.record_end(
            self._client.name, self._request.number, outcome, fault=fault, prompt=prompt, completion=completion
        )

    def _count_tokens(self) -> tuple[int, int]:
        """Return the prompt and completion tokens so far, as counted by the upstream or else estimated.

        Both numbers are 0 before the upstream answers.
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
    """Return the body for the upstream, with its model, the defaults of the profile, and a request for token counts.

    Every other field is passed on as the client wrote it, because Python cannot represent some JSON numbers. A body
    with half of a surrogate pair in its prompt is decoded in full, because msgspec and upstreams refuse such a body.
    """
    try:
        fields: dict[str, Any] = _decode_members(body)
    except msgspec.DecodeError:
        fields = _decode_members(msgspec.json.encode(read_object(body, MAX_PROMPT_IDS, PROMPT_FIELDS)))
    fields["model"] = client.settings.model
    profile = profiles.get(request.spec.profile)
    if profile is not None:
        _add_defaults(fields, profile)
    if request.spec.stream and client.settings.stream_usage:
        fields["stream_options"] = {**_read_members(fields.get("stream_options")), "include_usage": True}
    return msgspec.json.encode(fields)


def _add_defaults(fields: dict[str, Any], profile: ProfileSettings) -> None:
    """Set the fields of a body that are absent or null to the defaults of a profile."""
    defaults = {name: getattr(profile, name) for name in SAMPLING_DEFAULTS}
    if _is_absent(fields.get("max_completion_tokens")):
        defaults["max_tokens"] = profile.max_tokens
    for name, value in defaults.items():
        if value is not None and _is_absent(fields.get(name)):
            fields[name] = value
    if profile.chat_template_kwargs:
        own = _read_members(fields.get("chat_template_kwargs"))
        fields["chat_template_kwargs"] = {**profile.chat_template_kwargs, **own}


def _is_absent(field: msgspec.Raw | None) -> bool:
    return field is None or bytes(field) == b"null"


def _read_members(field: msgspec.Raw | None) -> dict[str, msgspec.Raw]:
    """Return the members of a JSON object; empty if the field is absent or null."""
    return {} if field is None else msgspec.json.decode(field, type=dict[str, msgspec.Raw] | None) or {}


def _cancel(work: asyncio.Future[None]) -> None:
    work.cancel()

"""Answer a request in any dialect: submit it, wait for the answer, and send the answer.

Every `ActiveRequest` that this module opens is also closed here, whether the request is answered, refused, failed or
cancelled by its client.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from router.dialects.shared.interface import ParsedRequest
from router.dispatch.active_request import ActiveRequest
from router.dispatch.answer import CollectedAnswer, StreamedAnswer
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.multi_prompt import MergedRequest, MergedResponse, MergedStream
from router.dispatch.request import Outcome, RequestSpec
from router.errors import Header
from router.http.exchange import DisconnectWatch, Exchange
from router.http.sse import EventStream, StreamPump, build_problem
from router.worker_thread import run_in_worker
from wire.frames import Finished

IGNORED = b"x-macpool-ignored"
"""Header of an answer with the ignored fields and tools of its request."""
MODEL = b"x-macpool-model"
"""Header of an answer with the model that answers, for a request that names an alias."""
Answered = ActiveRequest | MergedRequest
"""Request of a client: one request for the dispatcher, or several, one for each prompt."""
Forward = Callable[[Exchange, ActiveRequest], Awaitable[None]]
"""Function that passes a request on to its upstream and answers the client."""


async def generate(
    exchange: Exchange,
    dispatcher: Dispatcher,
    parsed: ParsedRequest,
    specs: Sequence[RequestSpec],
    forward: Forward | None = None,
) -> None:
    """Answer a request with a valid body: submit one request per prompt, and send the combined answer.

    `specs` are the requests for the dispatcher, at least one. `parsed` encodes the answer in the client's dialect.
    `forward` passes a single request on to an upstream; None if no upstream may take it.

    If a request is refused or fails, the error is the response, or the last event if the stream has begun. All requests
    are cancelled when the client disconnects.
    """
    requests: list[ActiveRequest] = []

    def close_requests() -> None:
        for request in requests:
            dispatcher.close(request)

    watch = DisconnectWatch(exchange.receive, close_requests)
    try:
        if watch.disconnected:  # since its body arrived, which a thread may have parsed meanwhile
            return
        requests += (dispatcher.submit(job) for job in specs)
        request = requests[0] if len(requests) == 1 else MergedRequest(requests)
        if forward is not None and isinstance(request, ActiveRequest):
            await _wait_for_start(request.answer)
            if request.answer.upstream and request.outcome is None:
                await forward(exchange, request)
                return
        if isinstance(request.answer, StreamedAnswer | MergedStream):
            await _send_stream(exchange, parsed, request, request.answer)
        else:
            await _send_complete(exchange, parsed, request, request.answer)
    finally:
        watch.close()
        close_requests()


async def _wait_for_start(answer: StreamedAnswer | CollectedAnswer) -> None:
    """Wait until the request must be passed on to an upstream, its stream can begin, or its outcome is known."""
    while not (answer.outcome is not None or answer.upstream or (isinstance(answer, StreamedAnswer) and answer.ready)):
        await answer.wait()


async def _send_complete(
    exchange: Exchange, parsed: ParsedRequest, request: Answered, answer: CollectedAnswer | MergedResponse
) -> None:
    outcome = await answer.wait_for_outcome()
    if isinstance(outcome, Finished):
        write = partial(parsed.render_complete, request.spec, answer.build_answer(request.fingerprint), outcome)
        is_long = request.spec.params.logprobs or request.spec.embed is not None
        body = await run_in_worker(write) if is_long else write()
        await exchange.answer(body, 200, _build_request_headers(request))
    else:
        await _decline(exchange, request, outcome)


async def _send_stream(
    exchange: Exchange, parsed: ParsedRequest, request: Answered, answer: StreamedAnswer | MergedStream
) -> None:
    """Answer with events. Before the first delta or keep-alive, a refusal or failure still sets the HTTP status."""
    while not answer.ready:
        await answer.wait()
    outcome = answer.outcome
    if outcome is not None and not isinstance(outcome, Finished):
        await _decline(exchange, request, outcome)
        return
    stream = EventStream(exchange.send)
    exchange.begin()
    answer.mark_opened()
    await stream.open([*exchange.build_id_headers(), *_build_request_headers(request)], exchange.style.stream)
    StreamPump(answer, parsed.create_chunk_encoder(request), stream)
    await stream.done


async def _decline(exchange: Exchange, request: Answered, outcome: Outcome) -> None:
    problem = build_problem(outcome)
    if problem is not None:
        await exchange.refuse(problem, _build_request_headers(request))


def _build_request_headers(request: Answered) -> list[Header]:
    about = [(b"x-macpool-attempts", str(request.attempts).encode()), *build_optional_headers(request)]
    if request.node_name:
        about.insert(0, (b"x-macpool-node", request.node_name.encode("ascii", "replace")))
    return about


def build_optional_headers(request: Answered) -> list[Header]:
    """Return the optional headers of an answer: ignored fields and tools, model of an alias, and rates of the key."""
    ignored = request.spec.ignored
    headers = build_ignored_header(ignored) if ignored else []
    if request.alias is not None:
        names = request.model_names if isinstance(request, MergedRequest) else request.demand.model
        headers.append((MODEL, names.encode("ascii", "replace")))
    if not request.rates:
        return headers
    return headers + [
        (f"x-ratelimit-{name}-{rate.unit}".encode(), value.encode())
        for rate in request.rates
        for name, value in (
            ("limit", str(rate.limit)),
            ("remaining", str(rate.remaining)),
            ("reset", f"{rate.reset:.3f}s"),
        )
    ]


def build_ignored_header(ignored: Sequence[str]) -> list[Header]:
    """Return a list of the header that names the ignored fields and tools of a request; empty if there are none."""
    return [(IGNORED, ", ".join(ignored).encode("ascii", "replace"))] if ignored else []

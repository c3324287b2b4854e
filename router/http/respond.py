"""Answer a request in any dialect: submit, wait, send the answer, and close every `ActiveRequest`.

Every `ActiveRequest` that is opened here is closed here, whether the request is answered, refused, failed or cancelled
by its client.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

from router.dialects.shared.interface import ParsedRequest
from router.dispatch import multi_prompt
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.request import ActiveRequest, BufferedRequest, Outcome, RequestSpec, StreamingRequest
from router.errors import Header
from router.http.exchange import DisconnectWatch, Exchange
from router.http.sse import EventSource, EventStream, StreamPump, problem_of
from router.worker_thread import run_in_worker
from wire.frames import Finished

IGNORED = b"x-macpool-ignored"
"""Header that names ignored fields and tools."""
Streamed = StreamingRequest | multi_prompt.MergedStream
Collected = BufferedRequest | multi_prompt.MergedResponse


async def generate(
    exchange: Exchange, dispatcher: Dispatcher, asked: ParsedRequest, jobs: Sequence[RequestSpec]
) -> None:
    """Answer a request with a valid body: submit one job per prompt, and send the combined answer.

    `asked` encodes the answer in the client's dialect. A job that is refused or fails is answered with the problem.
    """
    tickets: list[ActiveRequest] = []

    def let_go() -> None:
        for ticket in tickets:
            dispatcher.close(ticket)

    watch = DisconnectWatch(exchange.receive, let_go)
    try:
        tickets += (dispatcher.submit(job) for job in jobs)
        if jobs[0].stream:
            await _stream(exchange, asked, _streamed(cast("list[StreamingRequest]", tickets)))
        else:
            await _whole(exchange, asked, _collected(cast("list[BufferedRequest]", tickets)))
    finally:
        watch.close()
        let_go()


def _streamed(tickets: list[StreamingRequest]) -> Streamed:
    return tickets[0] if len(tickets) == 1 else multi_prompt.MergedStream(tickets)


def _collected(tickets: list[BufferedRequest]) -> Collected:
    return tickets[0] if len(tickets) == 1 else multi_prompt.MergedResponse(tickets)


async def _whole(exchange: Exchange, asked: ParsedRequest, ticket: Collected) -> None:
    outcome = await ticket.outcome_of()
    if isinstance(outcome, Finished):
        write = partial(asked.whole, ticket.job, ticket.answer(), outcome)
        body = await run_in_worker(write) if ticket.job.params.logprobs else write()
        await exchange.answer(body, 200, _about(ticket))
    else:
        await _decline(exchange, ticket, outcome)


async def _stream(exchange: Exchange, asked: ParsedRequest, ticket: Streamed) -> None:
    """Answer with events; until the first delta (or a long silence) a plain refusal is still possible."""
    while not ticket.ready:
        await ticket.wait()
    outcome = ticket.outcome
    if outcome is not None and not isinstance(outcome, Finished):
        await _decline(exchange, ticket, outcome)
        return
    stream = EventStream(exchange.send)
    exchange.status = 200
    ticket.opened = True
    await stream.open([*exchange.named(), *_about(ticket)], exchange.style.stream)
    StreamPump(cast("EventSource", ticket), asked.chunks(ticket), stream)
    await stream.done


async def _decline(exchange: Exchange, ticket: Streamed | Collected, outcome: Outcome) -> None:
    problem = problem_of(outcome)
    if problem is not None:
        await exchange.refuse(problem, _about(ticket))


def _about(ticket: Streamed | Collected) -> list[Header]:
    about = [(b"x-macpool-attempts", str(ticket.attempts).encode()), *optional_headers(ticket)]
    if ticket.node_name:
        about.insert(0, (b"x-macpool-node", ticket.node_name.encode("ascii", "replace")))
    return about


def optional_headers(ticket: ActiveRequest | Streamed | Collected) -> list[Header]:
    """Return the headers of an answer that may be absent: ignored fields and tools, and the state of the key's
    rates."""
    if not ticket.rates:
        return named(ticket.job.ignored)
    return named(ticket.job.ignored) + [
        (f"x-ratelimit-{name}-{rate.what}".encode(), value.encode())
        for rate in ticket.rates
        for name, value in (
            ("limit", str(rate.limit)),
            ("remaining", str(rate.remaining)),
            ("reset", f"{rate.reset:.3f}s"),
        )
    ]


def named(ignored: Sequence[str]) -> list[Header]:
    """Return the header that names the ignored fields and tools of a request; empty if there are none."""
    return [(IGNORED, ", ".join(ignored).encode("ascii", "replace"))] if ignored else []

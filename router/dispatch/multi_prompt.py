"""Several requests of one exchange, combined into one with consecutive choices.

The combined request ends when all requests have ended, or when one of them fails. The code that opened the requests
closes them. The remaining requests therefore end with the first failure.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from msgspec.structs import replace

from router.admission.rate_limits import RateState
from router.dispatch.request import (
    ActiveRequest,
    BufferedRequest,
    CompleteAnswer,
    Outcome,
    RequestSpec,
    StreamingRequest,
)
from router.placement.candidate import ResourceDemand
from wire.frames import Delta, Finished

T = TypeVar("T")
K = TypeVar("K", bound=ActiveRequest)


class MergedAnswer(Generic[K]):
    """Base of the streamed and the whole answer of several requests, one for each prompt."""

    def __init__(self, requests: Sequence[K]) -> None:
        first = requests[0]
        self._requests = requests
        self._waiter: asyncio.Future[None] | None = None
        self._choices = first.job.params.n
        self.sink: Callable[[], None] | None = None
        params = replace(first.job.params, n=len(requests) * self._choices)
        self.job: RequestSpec = replace(first.job, params=params)
        for request in requests:
            request.sink = self._flow

    @property
    def demand(self) -> ResourceDemand:
        """Demand of the first request, for the parts that all requests share."""
        return self._requests[0].demand

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the first request's model."""
        return self._requests[0].fingerprint

    @property
    def rates(self) -> tuple[RateState, ...]:
        """Rate state of the key after the last request."""
        return self._requests[-1].rates

    @property
    def node_name(self) -> str:
        """Names of the nodes in order, without duplicates."""
        return ",".join(dict.fromkeys(request.node_name for request in self._requests if request.node_name))

    @property
    def waits_for(self) -> str:
        """Reason of a wait, for the client; empty when there is none."""
        return next((request.waits_for for request in self._requests if request.waits_for), "")

    @property
    def attempts(self) -> int:
        """Number of attempts of all requests."""
        return sum(request.attempts for request in self._requests)

    @property
    def outcome(self) -> Outcome | None:
        """Combined outcome of all requests, or the outcome of the first failed request; None while neither exists."""
        ends = [request.outcome for request in self._requests]
        failed = next((end for end in ends if end is not None and not isinstance(end, Finished)), None)
        if failed is not None:
            return failed
        finished = [end for end in ends if isinstance(end, Finished)]
        return _sum(finished, self._choices) if len(finished) == len(ends) else None

    def wait(self) -> asyncio.Future[None]:
        """Return a Future that is done when any request has something new."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _flow(self) -> None:
        if self.sink is not None:
            self.sink()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class MergedStream(MergedAnswer[StreamingRequest]):
    """Streamed answer of several requests; see `StreamingRequest`."""

    @property
    def opened(self) -> bool:
        """Whether the stream to the client has begun. A refusal can then no longer be a plain answer."""
        return self._requests[0].opened

    @opened.setter
    def opened(self, opened: bool) -> None:
        for request in self._requests:
            request.opened = opened

    @property
    def blocked(self) -> bool:
        """Whether the transport to the client is full."""
        return self._requests[0].blocked

    @blocked.setter
    def blocked(self, blocked: bool) -> None:
        for request in self._requests:
            request.blocked = blocked

    @property
    def keepalive_due(self) -> bool:
        """Whether a keep-alive is due."""
        return any(request.keepalive_due for request in self._requests)

    @property
    def pending(self) -> bool:
        """Whether any request holds deltas."""
        return any(request.pending for request in self._requests)

    @property
    def ready(self) -> bool:
        """Whether a request has deltas, its end or a keep-alive to send."""
        return any(request.ready and (request.pending or request.keepalive_due) for request in self._requests) or (
            self.outcome is not None
        )

    def take(self) -> list[Delta]:
        """Return pending deltas of all requests with consecutive choice numbers. Deltas of an unknown choice are left
        out."""
        taken: list[Delta] = []
        for at, request in enumerate(self._requests):
            base = at * self._choices
            taken += (
                replace(delta, choice=base + delta.choice)
                for delta in request.take()
                if 0 <= delta.choice < self._choices
            )
        return taken


class MergedResponse(MergedAnswer[BufferedRequest]):
    """Whole answer of several requests, read once at the end; see `BufferedRequest`."""

    async def outcome_of(self) -> Outcome:
        """Wait for the outcome and return it."""
        while (outcome := self.outcome) is None:
            await self.wait()
        return outcome

    def answer(self) -> CompleteAnswer:
        """Return the whole answer with consecutive choice numbers."""
        answers = [request.answer() for request in self._requests]
        texts = {
            (at * self._choices + choice, channel): text
            for at, answer in enumerate(answers)
            for (choice, channel), text in answer.texts.items()
        }
        calls, logprobs = ([answer.calls for answer in answers], [answer.logprobs for answer in answers])
        return CompleteAnswer(texts, self._counted(calls), self._counted(logprobs))

    def _counted(self, found: Sequence[Mapping[int, T]]) -> dict[int, T]:
        return {at * self._choices + choice: one for at, each in enumerate(found) for choice, one in each.items()}


def _sum(ends: Sequence[Finished], choices: int) -> Finished:
    """Combine the ends: reasons and stop strings in order, tokens added up."""

    def each(of: Sequence[str], default: str) -> tuple[str, ...]:
        return (tuple(of) + (default,) * choices)[:choices]

    return Finished(
        ends[0].request,
        tuple(reason for end in ends for reason in each(end.reasons, "stop")),
        sum(end.prompt_tokens for end in ends),
        sum(end.completion_tokens for end in ends),
        sum(end.cached_tokens for end in ends),
        ends[0].timings,
        stops=tuple(stop for end in ends for stop in each(end.stops, "")),
        reasoning_tokens=sum(end.reasoning_tokens for end in ends),
    )

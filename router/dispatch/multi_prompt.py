"""Several requests of one HTTP exchange, combined into one request with consecutive choices.

The combined request ends when all requests have ended, or when one of them fails. The code that opened the requests
then closes all of them, which cancels those that still run.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from msgspec.structs import replace

from router.admission.rate_limits import RateState
from router.dispatch.active_request import ActiveRequest
from router.dispatch.aliases.candidates import AliasCandidates
from router.dispatch.answer import CollectedAnswer, StreamedAnswer
from router.dispatch.request import CompleteAnswer, Outcome, RequestSpec
from router.placement.candidate import ResourceDemand
from wire.frames import Delta, Finished

T = TypeVar("T")
A = TypeVar("A", StreamedAnswer, CollectedAnswer)


class MergedRequest:
    """Several requests, one for each prompt, as one request with a combined answer.

    `spec` is that of the first request, with the choices of all requests together. All requests must have the same
    number of choices, and either all or none of them must stream.
    """

    def __init__(self, requests: Sequence[ActiveRequest]) -> None:
        first = requests[0]
        self._requests = requests
        choices = first.spec.params.n
        params = replace(first.spec.params, n=len(requests) * choices)
        self.spec: RequestSpec = replace(first.spec, params=params)
        answers = [request.answer for request in requests]
        streamed = [answer for answer in answers if isinstance(answer, StreamedAnswer)]
        self.answer: MergedStream | MergedResponse = (
            MergedStream(streamed, choices)
            if streamed
            else MergedResponse([answer for answer in answers if isinstance(answer, CollectedAnswer)], choices)
        )

    @property
    def demand(self) -> ResourceDemand:
        """Demand of the first request. Use only the values that all requests share."""
        return self._requests[0].demand

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the first request's model."""
        return self._requests[0].fingerprint

    @property
    def rates(self) -> tuple[RateState, ...]:
        """State of the key's rates per minute after the last request; empty for a key without any."""
        return self._requests[-1].rates

    @property
    def alias(self) -> AliasCandidates | None:
        """Candidates of the alias that the client named; None without one."""
        return self._requests[0].alias

    @property
    def model_names(self) -> str:
        """Names of the models of all requests, separated by commas, in order and without duplicates."""
        return ",".join(dict.fromkeys(request.demand.model for request in self._requests))

    @property
    def node_name(self) -> str:
        """Names of the nodes of all requests, separated by commas, in order and without duplicates."""
        return ",".join(dict.fromkeys(request.node_name for request in self._requests if request.node_name))

    @property
    def attempts(self) -> int:
        """Number of attempts of all requests."""
        return sum(request.attempts for request in self._requests)


class MergedAnswer(Generic[A]):
    """Base of the streamed and of the complete answer of several requests, each with `choices` choices."""

    def __init__(self, answers: Sequence[A], choices: int) -> None:
        self._answers = answers
        self._choices = choices
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[], None] | None = None
        for answer in answers:
            answer.attach(self._notify)

    @property
    def waits_for(self) -> str:
        """Reason why the first waiting request waits, as shown to the client; empty if no request waits."""
        return next((answer.waits_for for answer in self._answers if answer.waits_for), "")

    @property
    def outcome(self) -> Outcome | None:
        """Outcome of the first failed request, in order, or the combined outcome of all requests.

        None while no request has failed and not all have ended.
        """
        ends = [answer.outcome for answer in self._answers]
        failed = next((end for end in ends if end is not None and not isinstance(end, Finished)), None)
        if failed is not None:
            return failed
        finished = [end for end in ends if isinstance(end, Finished)]
        return _combine_ends(finished, self._choices) if len(finished) == len(ends) else None

    def attach(self, sink: Callable[[], None]) -> None:
        """Call `sink` at every flush of any request from now on."""
        self._sink = sink

    def detach(self) -> None:
        """Remove the sink. Later flushes wake a waiting reader again."""
        self._sink = None

    def wait(self) -> asyncio.Future[None]:
        """Return a Future that the next flush of any request completes, if no sink is attached."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _notify(self) -> None:
        if self._sink is not None:
            self._sink()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class MergedStream(MergedAnswer[StreamedAnswer]):
    """Streamed answer of several requests; see `StreamedAnswer`."""

    def mark_opened(self) -> None:
        """Record for all requests that the client has the status of the answer."""
        for answer in self._answers:
            answer.mark_opened()

    def set_blocked(self, blocked: bool) -> None:
        """Record for all requests whether the write buffer of the client's transport is full (`blocked`)."""
        for answer in self._answers:
            answer.set_blocked(blocked)

    @property
    def keepalive_due(self) -> bool:
        """Whether a keep-alive is due for any request."""
        return any(answer.keepalive_due for answer in self._answers)

    @property
    def pending(self) -> bool:
        """Whether any request has deltas that the reader has not taken."""
        return any(answer.pending for answer in self._answers)

    @property
    def ready(self) -> bool:
        """Whether a request has deltas or a keep-alive to send, or the combined outcome is known."""
        return any(answer.pending or answer.keepalive_due for answer in self._answers) or self.outcome is not None

    def take_deltas(self) -> list[Delta]:
        """Take and return the pending deltas of all requests, with consecutive choice numbers across the requests.

        Deltas of a choice that their request does not have are dropped. See `StreamedAnswer.take_deltas`.
        """
        taken: list[Delta] = []
        for at, answer in enumerate(self._answers):
            base = at * self._choices
            taken += (
                replace(delta, choice=base + delta.choice)
                for delta in answer.take_deltas()
                if 0 <= delta.choice < self._choices
            )
        return taken


class MergedResponse(MergedAnswer[CollectedAnswer]):
    """Complete answer of several requests, read once at the end; see `CollectedAnswer`."""

    async def wait_for_outcome(self) -> Outcome:
        """Wait without a time limit for the outcome, and return it. A cancellation does not end the requests."""
        while (outcome := self.outcome) is None:
            await self.wait()
        return outcome

    def build_answer(self, fingerprint: str = "") -> CompleteAnswer:
        """Return the complete answer, with consecutive choice numbers across the requests.

        `fingerprint` is that of the model that generated the answer.
        """
        answers = [answer.build_answer() for answer in self._answers]
        texts = {
            (at * self._choices + choice, channel): text
            for at, answer in enumerate(answers)
            for (choice, channel), text in answer.texts.items()
        }
        calls, logprobs = ([answer.calls for answer in answers], [answer.logprobs for answer in answers])
        return CompleteAnswer(texts, self._renumber_choices(calls), self._renumber_choices(logprobs), fingerprint)

    def _renumber_choices(self, parts: Sequence[Mapping[int, T]]) -> dict[int, T]:
        return {at * self._choices + choice: part for at, each in enumerate(parts) for choice, part in each.items()}


def _combine_ends(ends: Sequence[Finished], choices: int) -> Finished:
    """Return one end for several: reasons and stop strings in order, sums of tokens, and the timings of the first."""

    def pad(of: Sequence[str], default: str) -> tuple[str, ...]:
        return (tuple(of) + (default,) * choices)[:choices]

    return Finished(
        request=ends[0].request,
        reasons=tuple(reason for end in ends for reason in pad(end.reasons, "stop")),
        prompt_tokens=sum(end.prompt_tokens for end in ends),
        completion_tokens=sum(end.completion_tokens for end in ends),
        cached_tokens=sum(end.cached_tokens for end in ends),
        timings=ends[0].timings,
        stops=tuple(stop for end in ends for stop in pad(end.stops, "")),
        reasoning_tokens=sum(end.reasoning_tokens for end in ends),
    )

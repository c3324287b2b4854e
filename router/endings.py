"""What a request leaves behind when it has ended: its key's usage and quota, the counts, its story.

A request that ended early used what was read and written until then: leaving is no way around a limit.
"""

from router.history import History, Story
from router.metrics import Counters
from router.quotas import Quotas
from router.ticket import Failure, Outcome, Ticket
from router.usage import Usage
from wire.frames import Finished
from wire.refusals import Code, Refused

QUOTING = frozenset({Code.INVALID, Code.UNSUPPORTED, Code.TEMPLATE})
"""Refusals whose message may quote the request: it is told to its client, and kept nowhere."""


class Endings:
    """Writes an end into all the books; a key gets back what it was charged and did not use."""

    def __init__(self, counters: Counters, usage: Usage, history: History) -> None:
        self._counters = counters
        self._usage = usage
        self._history = history

    def ended(self, ticket: Ticket, outcome: Outcome, model: str, quotas: Quotas, now: float) -> None:
        """Count a request that ended `now`, for a model that some member has (empty: for none)."""
        seconds = now - ticket.arrived
        if ticket.charged is not None:
            used, job = self._account(ticket, outcome, model), ticket.job
            quotas.settle(job.key, job.demand, ticket.charged, used, now)
        self._counters.ended(_label(outcome), model, seconds)
        self._history.stories.append(_story(ticket, outcome, seconds))

    def _account(self, ticket: Ticket, outcome: Outcome, model: str) -> int:
        """Count what a request used for its key, and give its tokens."""
        prompt, cached, written = _took(ticket, outcome)
        used = self._usage.of(ticket.job.key, model)
        used.requests += 1
        used.failed += not isinstance(outcome, Finished)
        used.prompt_tokens += prompt
        used.cached_tokens += cached
        used.completion_tokens += written
        self._counters.model(model).used(prompt, cached, written)
        return prompt + written


def _took(ticket: Ticket, outcome: Outcome) -> tuple[int, int, int]:
    """Give the prompt's tokens, those of them that were cached, and the tokens that were written."""
    if isinstance(outcome, Finished):
        return outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens
    return (*ticket.read, ticket.wrote)


def _story(ticket: Ticket, outcome: Outcome, seconds: float) -> Story:
    job = ticket.job
    steps = tuple(ticket.steps)
    if isinstance(outcome, Finished):
        return Story(job.request_id, job.key, job.demand.model, job.stream, ticket.arrived, seconds, "ok", "", steps,
                     outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens,
                     outcome.timings)  # fmt: skip
    return Story(job.request_id, job.key, job.demand.model, job.stream, ticket.arrived, seconds, _label(outcome),
                 _worth_keeping(outcome), steps, ticket.demand.prompt_tokens, ticket.read[1], ticket.wrote)  # fmt: skip


def _worth_keeping(outcome: Refused | Failure) -> str:
    """Give the message of an end for those who look on: not one that may quote what its client wrote."""
    quotes = isinstance(outcome, Refused) and outcome.code in QUOTING
    return "its client was told why" if quotes else outcome.message


def _label(outcome: Outcome) -> str:
    if isinstance(outcome, Finished):
        return "ok"
    return outcome.code.value if isinstance(outcome, Refused) else outcome.code

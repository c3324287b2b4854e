"""Accounting of ended requests: usage and quota of the API key, counters, history.

A request that ends early is charged for the tokens processed until then: disconnecting is no way around a limit.
"""

import structlog
from msgspec.structs import replace

from router.admission.rate_limits import DEFAULT_ANSWER_TOKENS, RateLimits
from router.admission.usage import UsageCounter
from router.dispatch.active_request import ActiveRequest
from router.dispatch.counters import Counters
from router.dispatch.decision_log import DecisionLog, RequestRecord
from router.dispatch.request import Outcome, RequestFailure
from wire.frames import Finished
from wire.refusals import RefusalCode, Refused

log = structlog.get_logger("router.dispatch.accounting")
TEMPLATE_TOKENS = 4096
"""Tokens that a chat template may add to a prompt, in addition to MESSAGE_TOKENS for each message."""
MESSAGE_TOKENS = 32
UNSENT_TOKENS = 8
"""Tokens of one choice that are generated and never sent: the end token and tokens held back for a stop string."""
QUOTING = {
    RefusalCode.INVALID: "its grammar or a value is invalid for this model; the response to the client has the details",
    RefusalCode.UNSUPPORTED: "the model lacks a feature of the request; the response to the client has the details",
    RefusalCode.TEMPLATE: "the template or tokenizer rejects the messages; the response to the client has the details",
}
"""Stored text for refusals whose message may quote the request: the message goes to the client and is not stored."""


class Accounting:
    """Recorder of ended requests for usage, limits, counters and history. It refunds the unused part of a key's
    charge."""

    def __init__(self, counters: Counters, usage: UsageCounter, history: DecisionLog) -> None:
        self._counters = counters
        self._usage = usage
        self._history = history

    def ended(self, request: ActiveRequest, outcome: Outcome, model: str, quotas: RateLimits, now: float) -> None:
        """Record a request that ended at `now` (monotonic seconds), and settle its charge in `quotas`.

        `model` is its model, or empty if no member has a model of that name.
        """
        seconds = now - request.arrived
        if request.charged is not None:
            used, job = self._account(request, outcome, model), request.job
            quotas.record_end(job.key, job.demand, request.charged, used, now)
        self._counters.ended(_label(outcome), model, seconds)
        self._history.records.append(_record(request, outcome, seconds))

    def _account(self, request: ActiveRequest, outcome: Outcome, model: str) -> int:
        """Record a request's usage for its key and return its tokens: at least the tokens that were sent."""
        prompt, cached, written = _took(request, outcome)
        used = self._usage.of(request.job.key, model)
        used.count(prompt, cached, written, failed=not isinstance(outcome, Finished))
        self._counters.model(model).used(prompt, cached, written)
        self._counters.used_by(request.job.key, model, prompt + written)
        return max(prompt + written, request.tokens.total)


def most_prompt(request: ActiveRequest) -> int:
    """Return the maximum prompt tokens that a node may report for a request.

    Each byte of the prompt is at most one token. The chat template adds a bounded number of tokens.
    """
    demand, messages = request.job.demand, request.job.messages
    text = max(demand.prompt_bytes, demand.prompt_tokens or 0, len(request.job.ids))
    return text + TEMPLATE_TOKENS + MESSAGE_TOKENS * len(messages)


def bounded_usage(request: ActiveRequest, frame: Finished) -> Finished:
    """Return the end of a request with the node's usage numbers, limited to the bounds of the client's request.

    A false report can therefore exhaust neither a key's limits nor its usage.
    """
    params = request.job.params
    unbounded = max(DEFAULT_ANSWER_TOKENS * params.n, request.tokens.total + UNSENT_TOKENS * params.n)
    prompt = min(frame.prompt_tokens, most_prompt(request))
    completion = min(frame.completion_tokens, params.max_tokens * params.n if params.max_tokens else unbounded)
    cached, reasoning_tokens = min(frame.cached_tokens, prompt), min(frame.reasoning_tokens, completion)
    reported = frame.prompt_tokens, frame.completion_tokens, frame.cached_tokens, frame.reasoning_tokens
    if reported == (prompt, completion, cached, reasoning_tokens):
        return frame
    log.warning("usage implausible", node=request.node_name, request=request.attempt, reported=reported)
    return replace(
        frame,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        reasoning_tokens=reasoning_tokens,
    )


def _took(request: ActiveRequest, outcome: Outcome) -> tuple[int, int, int]:
    """Return the prompt tokens, the cached tokens among them, and the generated tokens."""
    if isinstance(outcome, Finished):
        return outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens
    return (*request.read, request.tokens.total)


def _record(request: ActiveRequest, outcome: Outcome, seconds: float) -> RequestRecord:
    job = request.job
    finished = outcome if isinstance(outcome, Finished) else None
    prompt, cached, completion = _took(request, outcome)
    return RequestRecord(
        request_id=job.request_id,
        key=job.key,
        model=job.demand.model,
        stream=job.stream,
        arrived=request.arrived,
        seconds=seconds,
        outcome=_label(outcome),
        message="" if isinstance(outcome, Finished) else _worth_keeping(outcome),
        steps=tuple(request.steps),
        prompt_tokens=request.demand.prompt_tokens if finished is None else prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        timings=None if finished is None else finished.timings,
        ignored=job.ignored,
    )


def _worth_keeping(outcome: Refused | RequestFailure) -> str:
    """Return the stored message of an end: never a message that may quote the client's request."""
    quoting = QUOTING.get(outcome.code) if isinstance(outcome, Refused) else None
    return quoting or outcome.message


def _label(outcome: Outcome) -> str:
    if isinstance(outcome, Finished):
        return "ok"
    return outcome.code.value if isinstance(outcome, Refused) else outcome.code

"""Accounting of ended requests: usage and quota of the API key, counters, history.

A request that ends early is charged for the tokens processed until then, so that a client that disconnects early does
not avoid a limit.
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
"""Tokens that a chat template may add to a prompt, in addition to `MESSAGE_TOKENS` for each message."""
MESSAGE_TOKENS = 32
INPUT_TOKENS = 512
"""Maximum tokens that a model adds to each text of a request for embeddings or scores.

These are an instruction, a first and a last token.
"""
UNSENT_TOKENS = 8
"""Tokens of one choice that a node may count without sending them.

These are the end token, and tokens held back for a stop string.
"""
QUOTING = {
    RefusalCode.INVALID: "its grammar or a value is invalid for this model; the response to the client has the details",
    RefusalCode.UNSUPPORTED: "the model lacks a feature of the request; the response to the client has the details",
    RefusalCode.TEMPLATE: "the template or tokenizer rejects the messages; the response to the client has the details",
}
"""Stored text, by code, for refusals whose message may quote the request. The message itself goes only to the client.
"""


class Accounting:
    """Recorder of ended requests for usage, limits, counters and history.

    The recorder also settles the charge of each request: it refunds unused tokens to the key, and charges the tokens
    beyond the estimate.
    """

    def __init__(self, counters: Counters, usage: UsageCounter, history: DecisionLog) -> None:
        self._counters = counters
        self._usage = usage
        self._history = history

    def record_end(self, request: ActiveRequest, outcome: Outcome, model: str, quotas: RateLimits, now: float) -> None:
        """Record a request that ended at `now` (monotonic seconds), and settle its charge in `quotas`.

        A request whose `charged` is None is counted and stored in the history, but changes neither the usage nor the
        quota of its key.

        `model` is the name for the totals: the request's model or the label of its upstream. It is empty if no member
        has a model of that name.
        """
        seconds, spec, counters, charged = now - request.arrived, request.spec, self._counters, request.charged
        sent = request.tokens.total  # a request used at least the tokens that were sent
        if isinstance(outcome, Finished):
            name, message, timings, failed = "ok", "", outcome.timings, False
            prompt, cached, generated = outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens
            stored_prompt: int | None = prompt
        else:
            name, message, timings, failed = _name_outcome(outcome), _choose_stored_message(outcome), None, True
            (prompt, cached), generated = request.prompt_counts, sent
            stored_prompt = request.demand.prompt_tokens
        counts = counters.count_end(name, model, seconds)
        if charged is not None:
            key, tokens = spec.key, prompt + generated
            self._usage.get_totals(key, model).count(prompt, cached, generated, failed=failed)
            counts.add_tokens(prompt, cached, generated)
            counters.add_key_tokens(key, model, tokens)
            quotas.record_end(key, spec.demand, charged, max(tokens, sent), now)
        alias = request.alias
        self._history.records.append(
            RequestRecord(  # by position: with names it takes ten times as long
                spec.request_id,
                spec.key,
                spec.demand.model,
                spec.stream,
                request.arrived,
                seconds,
                name,
                message,
                tuple(request.steps),
                stored_prompt,
                cached,
                generated,
                timings,
                spec.ignored,
                "" if alias is None else alias.name,
                spec.profile,
                () if alias is None else alias.list_passed_over(),
            )
        )


def compute_max_prompt_tokens(request: ActiveRequest) -> int:
    """Return the maximum prompt tokens that a node may report for a request.

    Each byte of the prompt is at most one token. The chat template adds at most `TEMPLATE_TOKENS`, and `MESSAGE_TOKENS`
    for each message. Embeddings and scores have no template: each text adds at most `INPUT_TOKENS`.
    """
    demand, messages = request.spec.demand, request.spec.messages
    text = max(demand.prompt_bytes + demand.other_bytes, demand.prompt_tokens or 0, len(request.spec.ids))
    if request.spec.embed is not None:
        return text + INPUT_TOKENS * request.spec.embed.count
    return text + TEMPLATE_TOKENS + MESSAGE_TOKENS * len(messages)


def _compute_max_completion_tokens(request: ActiveRequest) -> int:
    """Return the maximum generated tokens that a node may report for a request."""
    params = request.spec.params
    if params.max_tokens:
        return params.max_tokens * params.n
    return max(DEFAULT_ANSWER_TOKENS * params.n, request.tokens.total + UNSENT_TOKENS * params.n)


def bound_usage(request: ActiveRequest, frame: Finished) -> Finished:
    """Return the end of a request, with the usage numbers of the node limited to the maximum that the request can use.

    A false report therefore costs the key at most these bounds. A report beyond them is logged. `frame` itself is
    returned if all its numbers are within the bounds.
    """
    prompt, completion = frame.prompt_tokens, frame.completion_tokens
    most_completion = _compute_max_completion_tokens(request)
    # the number of `Admitted` is within the bounds already
    most_prompt = prompt if prompt == request.prompt_counts[0] else compute_max_prompt_tokens(request)
    if (
        prompt <= most_prompt
        and completion <= most_completion
        and frame.cached_tokens <= prompt
        and frame.reasoning_tokens <= completion
    ):
        return frame
    reported = prompt, completion, frame.cached_tokens, frame.reasoning_tokens
    prompt, completion = min(prompt, most_prompt), min(completion, most_completion)
    cached, reasoning_tokens = min(frame.cached_tokens, prompt), min(frame.reasoning_tokens, completion)
    log.warning("usage implausible", node=request.node_name, request=request.attempt, reported=reported)
    return replace(
        frame,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        reasoning_tokens=reasoning_tokens,
    )


def _choose_stored_message(outcome: Refused | RequestFailure) -> str:
    """Return the message of an end that the history stores. It never quotes the client's request."""
    quoting = QUOTING.get(outcome.code) if isinstance(outcome, Refused) else None
    return quoting or outcome.message


def _name_outcome(outcome: Refused | RequestFailure) -> str:
    return outcome.code.value if isinstance(outcome, Refused) else outcome.code

"""Cost model of placement: the expected times of a request on a node, and the delay that it causes there.

The time of a node is the expected time to the first token of the request, plus two costs. The first cost is the delay
of other queued prompts by the request. The second, with less weight, is the duration of the answer next to the running
rows, and the time for which those rows stall. Prefills on a node alternate between the shortest and the oldest prompt,
and are slower while rows decode. A short prompt therefore does not wait for all of a long one, and its time is less
than the sum of all prompts ahead. If all decode rows are taken, enough requests have to end first, one at a time.

For a model that is not loaded, the load time is added to the time to the first token.
"""

from router.placement.cluster_view import ServedModel
from router.placement.reservations import NodeReservations
from router.placement.weights import PREFILL_SLOWDOWN_WHILE_DECODING, ROW_WEIGHT, TTFT_STEP_SECONDS
from wire.report import ROW_COST, EngineState

_NOISE_SECONDS = TTFT_STEP_SECONDS / 2
"""Prefill time ahead of a request, in seconds, that is below the noise of the measured speed."""


def estimate_times(
    served: ServedModel,
    engine: EngineState,
    account: NodeReservations,
    tokens_ahead: int,
    prefill_tokens: int,
    output_tokens: int,
    choices: int,
) -> tuple[float, float, float]:
    """Return three expected times in seconds: to the first token, from the first to the last token, and the delay.

    The delay is `Candidate.delay`. `engine` is the state of the node's engine, and `account` has the requests of this
    router on the node. `tokens_ahead` is the number of tokens of other requests that the node must still prefill. The
    node must prefill `prefill_tokens` for this request, and generate `output_tokens` for each of its `choices`.
    """
    model, running, taken_rows = served.model, engine.running, account.rows
    speed = model.prefill_speed
    ttft, delay = estimate_prefill_wait(account, tokens_ahead, prefill_tokens, speed)
    if running:
        ttft *= PREFILL_SLOWDOWN_WHILE_DECODING
        delay += ROW_WEIGHT * running * prefill_tokens / speed
    if not model.loaded:
        ttft += served.load_seconds
    answer = output_tokens / model.decode_speed * (1.0 + ROW_COST * taken_rows)
    max_rows = engine.rows
    if max_rows and taken_rows + choices > max_rows:
        ttft += (taken_rows + choices - max_rows) * answer / max_rows
    return ttft, answer, delay


def estimate_prefill_wait(
    account: NodeReservations, tokens_ahead: int, prefill_tokens: int, speed: float
) -> tuple[float, float]:
    """Return two expected times in seconds: until a prompt is prefilled, and the sum of its delays of other prompts.

    Prefills of a node alternate between the shortest and the oldest prompt. The prompt has `prefill_tokens`.
    `tokens_ahead` is the number of tokens of other prompts. They belong to the unfinished prompts of `account`; any
    surplus belongs to unknown prompts, which count as long ones. `speed` is in prompt tokens per second.
    """
    mine, others, known = prefill_tokens / speed, tokens_ahead / speed, account.pending_tokens
    if not known or others < _NOISE_SECONDS:
        return mine + others, 0.0
    left = min(1.0, tokens_ahead / known)
    shorter, longer, behind = mine, max(0, tokens_ahead - known) / speed, 0
    for prompt in account.pending_prefills.values():
        seconds = prompt.seconds * left
        if seconds <= mine:
            shorter += seconds
        else:
            longer += seconds
            behind += 1
    return shorter + min(shorter, longer), behind * mine

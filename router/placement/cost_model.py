"""Cost model of placement: the expected times of a request on a node, and the delay that it adds there.

The time of a node is its expected time to the first token plus two costs. The first cost is the added wait of the
prompts queued behind it. The second, with less weight, is the duration of its answer next to the running rows, and the
time for which those rows stall. Prompts on a node alternate between the shortest and the oldest, and prefill is slower
while rows decode. A short prompt therefore does not wait for a long one. Its time is not the sum of all prompts in
front of it (simulated, a household: the median wait falls from 10.8 s to 3.9 s). When all decode rows are taken, enough
requests have to end first, and they end one at a time.

A model that is not loaded costs its load time.
"""

from router.placement.cluster_view import NodeView
from router.placement.reservations import NodeReservations
from router.placement.weights import (
    MIN_LOAD_LEFT_SHARE,
    PREFILL_SLOWDOWN_WHILE_DECODING,
    ROW_WEIGHT,
    TTFT_STEP_SECONDS,
    UNKNOWN_LOAD_LEFT_SHARE,
)
from wire.report import ROW_COST, Model


def expected_times(
    node: NodeView, model: Model, account: NodeReservations, reading: int, output: int, choices: int
) -> tuple[float, float, float]:
    """Return three times in seconds of a request on a node: to the first token, from there to the last, and delay.

    The delay is the time by which the request delays the other requests of the node. `reading` is the number of prompt
    tokens to prefill, `output` that of answer tokens for each of `choices`. `account` has the requests of this router
    on the node.
    """
    speed, engine = model.prefill_speed, node.engine
    ttft, delay = prefill_wait(account, engine.queued_tokens + account.tokens, reading, speed)
    if engine.running:
        ttft *= PREFILL_SLOWDOWN_WHILE_DECODING
        delay += ROW_WEIGHT * engine.running * reading / speed
    if not model.loaded:
        read = model.progress or UNKNOWN_LOAD_LEFT_SHARE
        ttft += model.load_seconds * (max(MIN_LOAD_LEFT_SHARE, 1.0 - read) if model.loading else 1.0)
    taken, most = account.rows, engine.rows
    answer = output / model.decode_speed * (1.0 + ROW_COST * taken)
    if taken + choices > most > 0:
        ttft += (taken + choices - most) * answer / most
    return ttft, answer, delay


def prefill_wait(account: NodeReservations, ahead: int, reading: int, speed: float) -> tuple[float, float]:
    """Return two times in seconds: until a prompt of `reading` tokens is prefilled, and the wait that it adds to other
    prompts.

    The prompts of a node alternate between the shortest and the oldest. `ahead` is the number of tokens in front. It
    covers the rest of the account's unfinished prompts; any surplus belongs to unknown prompts, which count as long
    ones. `speed` is in prompt tokens per second.
    """
    mine, others, known = reading / speed, ahead / speed, account.unread_tokens
    if not known or others < TTFT_STEP_SECONDS / 2:  # below the noise of the measured speed
        return mine + others, 0.0
    left = min(1.0, ahead / known)
    shorter, longer, behind = mine, max(0, ahead - known) / speed, 0
    for one in account.unread.values():
        seconds = one.seconds * left
        if seconds <= mine:
            shorter += seconds
        else:
            longer += seconds
            behind += 1
    return shorter + min(shorter, longer), behind * mine

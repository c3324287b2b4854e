"""Log probabilities of a token for the API dialects: the sampled token and the most likely alternatives, as bytes."""

import math
from collections.abc import Callable
from typing import cast

import mlx.core as mx

from wire.frames import Logprob

MAX_ALTERNATIVES = 20
"""Maximum number of alternatives of a token."""
MIN_LOGPROB = -9999.0
"""Value for a probability of 0 in OpenAI's API, because only finite numbers are sent."""


def compute_logprob(logprobs: mx.array, token: int, count: int, token_bytes: Callable[[int], bytes]) -> Logprob:
    """Return the natural log probability of a token, and the tokens and log probabilities of the `count` most likely
    tokens in descending order. `count` is from 0 to `MAX_ALTERNATIVES`.

    `logprobs` has the shape (vocabulary,). `token_bytes(token)` returns the bytes of a token. Tokens that a grammar
    forbids are not among the most likely tokens. `MIN_LOGPROB` is returned for a token with the probability 0.
    """
    drawn = logprobs[token].item()
    top: tuple[tuple[bytes, float], ...] = ()
    count = min(count, MAX_ALTERNATIVES, logprobs.shape[-1])
    if count:
        places = mx.argpartition(-logprobs, kth=count - 1)[:count]
        ids = cast("list[int]", places.tolist())
        values = cast("list[float]", logprobs[places].tolist())
        ranked = sorted(zip(values, ids, strict=True), reverse=True)
        top = tuple((token_bytes(alternative), value) for value, alternative in ranked if value > -math.inf)
    value = float(cast("float", drawn))
    return Logprob(token_bytes(token), value if math.isfinite(value) else MIN_LOGPROB, top)

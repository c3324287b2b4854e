"""Lengths of commitments: growth of a decoding row, and return of a preempted one. Pure. All lengths are in tokens."""

from wire.capacity.arithmetic import KV_GROWTH_TOKENS

GATE_RETRY_SECONDS = 0.1
"""Seconds until the gate is tried again for work that waits for memory."""


def compute_growth_tokens(promised: int, most: int) -> int:
    """Return the tokens to commit in addition for a row that has used all `promised` ones: 1 to `KV_GROWTH_TOKENS`.

    `most` are the tokens of the row at its end, prompt included.
    """
    return max(1, min(KV_GROWTH_TOKENS, most - promised))


def compute_return_tokens(known: int, most: int) -> int:
    """Return the tokens to commit for a row that returns: the `known` ones, and at most `KV_GROWTH_TOKENS` more.

    `most` are the tokens of the row at its end, prompt included.
    """
    return max(known, min(known + KV_GROWTH_TOKENS, most))

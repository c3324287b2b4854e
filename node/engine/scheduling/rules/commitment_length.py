"""Lengths of commitments, in tokens: growth of a decoding row, and return of a preempted row. Pure."""

from wire.capacity.arithmetic import KV_GROWTH_TOKENS

GATE_RETRY_SECONDS = 0.1
"""Seconds until the gate is tried again for work that waits for memory, and between two returns of preempted
requests."""


def compute_growth_tokens(promised: int, most: int) -> int:
    """Return the number of additional tokens to commit for a row that has used all `promised` tokens of its commitment:
    1 to `KV_GROWTH_TOKENS`.

    `most` is the maximum number of tokens of the row, including its prompt.
    """
    return max(1, min(KV_GROWTH_TOKENS, most - promised))


def compute_return_tokens(known: int, most: int) -> int:
    """Return the number of tokens to commit for a row that returns: its `known` tokens, and at most `KV_GROWTH_TOKENS`
    more.

    `most` is the maximum number of tokens of the row, including its prompt.
    """
    return max(known, min(known + KV_GROWTH_TOKENS, most))

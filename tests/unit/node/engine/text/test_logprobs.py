"""Log probabilities of tokens for clients: the token itself and the most likely ones."""

import mlx.core as mx
import pytest

from node.engine.text.logprobs import MAX_ALTERNATIVES, MIN_LOGPROB, compute_logprob

VALUES = (-3.0, -0.5, -7.0, -1.25, -float("inf"), -2.0)


def name(token: int) -> bytes:
    return f"t{token}".encode()


@pytest.mark.parametrize(
    ("count", "tokens"),
    [(0, []), (1, [1]), (3, [1, 3, 5]), (5, [1, 3, 5, 0, 2]), (6, [1, 3, 5, 0, 2]), (20, [1, 3, 5, 0, 2])],
)
def test_the_most_likely_tokens_are_in_descending_order_without_forbidden_ones(count: int, tokens: list[int]):
    found = compute_logprob(mx.array(VALUES), 5, count, name)
    assert (found.token, found.logprob) == (b"t5", -2.0)
    assert found.top == tuple((name(token), VALUES[token]) for token in tokens)


def test_a_token_without_a_probability_has_a_finite_number():
    found = compute_logprob(mx.array(VALUES), 4, 1, name)
    assert (found.token, found.logprob, found.top) == (b"t4", MIN_LOGPROB, ((b"t1", -0.5),))


def test_at_most_twenty_alternatives_are_returned():
    found = compute_logprob(-mx.arange(100, dtype=mx.float32), 0, 50, name)
    assert [token for token, _ in found.top] == [name(token) for token in range(MAX_ALTERNATIVES)]

"""Poolings of padded batches and of chunks, compared with numpy over the states of each text alone."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from node.engine.embedding.pooling import PooledTexts
from node.models.embedding_layout import Pooling

LENGTHS = (1, 7, 4, 9)
STATES = np.random.default_rng(3).normal(size=(len(LENGTHS), max(LENGTHS), 5)).astype(np.float32)
REFERENCE: dict[Pooling, Callable[[np.ndarray], np.ndarray]] = {
    Pooling.CLS: lambda states: states[0],
    Pooling.MAX: lambda states: states.max(axis=0),
    Pooling.MEAN: lambda states: states.mean(axis=0),
    Pooling.MEAN_SQRT_LENGTH: lambda states: states.sum(axis=0) / np.sqrt(len(states)),
    Pooling.WEIGHTED_MEAN: lambda states: np.average(states, axis=0, weights=np.arange(1, len(states) + 1)),
    Pooling.LAST: lambda states: states[-1],
}


def pooled(*poolings: Pooling, chunk: int = 100) -> np.ndarray:
    """Pool the states in chunks of some tokens."""
    made = PooledTexts(poolings, LENGTHS)
    for start in range(0, STATES.shape[1], chunk):
        made.add(mx.array(STATES[:, start : start + chunk]))
    return np.array(made.compute())


def expected(pooling: Pooling) -> np.ndarray:
    return np.stack([REFERENCE[pooling](STATES[row, :length]) for row, length in enumerate(LENGTHS)])


@pytest.mark.parametrize("chunk", [100, 3, 1])
@pytest.mark.parametrize("pooling", Pooling)
def test_a_pooling_reads_the_tokens_of_the_text_alone(pooling: Pooling, chunk: int):
    assert pooled(pooling, chunk=chunk) == pytest.approx(expected(pooling), abs=1e-6)


def test_several_poolings_are_joined_in_order():
    both = pooled(Pooling.CLS, Pooling.MEAN)
    assert both == pytest.approx(np.concatenate([expected(Pooling.CLS), expected(Pooling.MEAN)], axis=1), abs=1e-6)


def test_padding_that_is_not_finite_changes_no_vector():
    states = STATES.copy()
    for row, length in enumerate(LENGTHS):
        states[row, length:] = np.nan
    for pooling in Pooling:
        made = PooledTexts((pooling,), LENGTHS)
        made.add(mx.array(states))
        assert np.array(made.compute()) == pytest.approx(expected(pooling), abs=1e-6)


def test_states_in_half_precision_are_summed_in_single_precision():
    made = PooledTexts((Pooling.MEAN,), (4096,))
    for _ in range(8):
        made.add(mx.full((1, 512, 1), 3.0, mx.bfloat16))
    assert np.array(made.compute()).tolist() == [[3.0]]

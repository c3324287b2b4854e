"""Vectors after the forward."""

import mlx.core as mx
import numpy as np
import pytest

from node.engine.embedding.vectors import NotFiniteError, check_finite, cut_vectors, normalize


def test_normalize_returns_length_one_and_keeps_zeros() -> None:
    vectors = np.array(normalize(mx.array([[3.0, 4.0], [0.0, 0.0]])))
    assert vectors.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [0.0, 0.0]]


@pytest.mark.parametrize(("normalized", "expected"), [(True, [0.6, 0.8]), (False, [3.0, 4.0])])
def test_cut_vectors_normalizes_again_only_on_request(normalized: bool, expected: list[float]) -> None:
    data = cut_vectors(mx.array([[3.0, 4.0, 12.0]]), 2, normalized=normalized)
    assert np.frombuffer(data, np.float32) == pytest.approx(expected)


@pytest.mark.parametrize("dimensions", [0, 3, 4])
def test_cut_vectors_leaves_vectors_that_are_short_enough(dimensions: int) -> None:
    data = cut_vectors(mx.array([[3.0, 4.0, 12.0]]), dimensions, normalized=True)
    assert np.frombuffer(data, np.float32).tolist() == [3.0, 4.0, 12.0]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_check_finite_refuses_a_number_that_is_not_finite(number: float) -> None:
    check_finite(mx.array([[1.0, 2.0]]))
    with pytest.raises(NotFiniteError, match="may be damaged"):
        check_finite(mx.array([[1.0, number]]))

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from node.engine.memory.least_squares import FitPoint, Floats, fit_from_above, solve_non_negative

NUMBERS = st.one_of(st.just(0.0), st.floats(1e-3, 1e6))
MATRICES = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.tuples(st.lists(NUMBERS, min_size=width, max_size=width), st.floats(0.01, 10.0)), min_size=1, max_size=12
    )
)


def error(matrix: Floats, goal: Floats, terms: Floats) -> float:
    return float(np.sum((matrix @ terms - goal) ** 2))


def best_of_all_subsets(matrix: Floats, goal: Floats) -> float:
    """Return the smallest error of all subsets of columns whose solution has no negative term."""
    width = matrix.shape[1]
    errors = [error(matrix, goal, np.zeros(width))]
    for count in range(1, width + 1):
        for chosen in map(list, combinations(range(width), count)):
            found = np.linalg.lstsq(matrix[:, chosen], goal, rcond=None)[0]
            if (found >= 0).all():
                terms = np.zeros(width)
                terms[chosen] = found
                errors.append(error(matrix, goal, terms))
    return min(errors)


@given(MATRICES)
def test_no_subset_of_terms_fits_better_and_no_term_is_negative(samples: list[tuple[list[float], float]]):
    matrix = np.array([row for row, _ in samples])
    goal = np.array([value for _, value in samples])
    terms = solve_non_negative(matrix, goal)
    assert (terms >= 0).all()
    assert error(matrix, goal, terms) <= best_of_all_subsets(matrix, goal) * (1 + 1e-6) + 1e-9 * float(goal @ goal)


def test_terms_of_exact_samples_are_found():
    points = [
        FitPoint((1.0, tokens, tokens * past), 7e6 + 3e4 * tokens + 12.0 * tokens * past, 1.0)
        for tokens in (8, 64, 512)
        for past in (0, 256, 3000)
    ]
    assert np.allclose(fit_from_above(points), (7e6, 3e4, 12.0), rtol=1e-6)


def test_a_term_that_would_be_negative_is_left_out():
    points = [FitPoint((1.0, tokens), 1e6 - 100.0 * tokens, 1.0) for tokens in (10, 100, 1000)]
    fixed, token = fit_from_above(points)
    assert token == 0.0
    assert 0.8e6 < fixed < 1.1e6


def test_a_fit_lies_above_nearly_all_samples():
    values = [100.0, 101.0, 99.0, 100.5, 99.5, 140.0]
    (level,) = fit_from_above([FitPoint((1.0,), value, 1.0) for value in values])
    assert sum(value > level for value in values) <= 1


def test_points_without_a_value_are_ignored_and_none_at_all_fit_nothing():
    assert fit_from_above([FitPoint((1.0, 2.0), 0.0, 1.0)]) == (0.0, 0.0)
    with_zero = [FitPoint((1.0,), 0.0, 9.0), FitPoint((1.0,), 5.0, 1.0)]
    assert np.allclose(fit_from_above(with_zero), (5.0,))


def test_columns_that_depend_on_each_other_are_no_error():
    points = [FitPoint((1.0, tokens, 2.0 * tokens), 10.0 + tokens, 1.0) for tokens in (1.0, 2.0, 3.0)]
    fixed, single, double = fit_from_above(points)
    assert np.isclose(fixed, 10.0)
    assert np.isclose(single + 2 * double, 1.0)

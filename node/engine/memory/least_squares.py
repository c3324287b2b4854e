"""Non-negative least squares for a few terms, and a fit by relative error from above. Pure.

The algorithm is NNLS of Lawson and Hanson (Solving Least Squares Problems, chapter 23). Terms are added one by one, and
a term that becomes negative is removed. Columns are scaled to length 1, because the terms differ by many powers of ten.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FIT_ROUNDS, ABOVE_FIT_WEIGHT = 5, 20.0
"""Rounds of a fit, and factor on the weight of a sample above the fit in the next round."""
TOLERANCE = 1e-9
"""Minimum gradient, as a share of the length of the goal, at which another term is added. Also the minimum singular
value, as a share of the largest, of columns that count as independent."""
MAX_STEPS_PER_TERM = 10
"""Maximum iterations of `solve_non_negative` per term. Because of rounding, a term could otherwise change between free
and zero without end."""

Floats = NDArray[np.float64]


class FitPoint(NamedTuple):
    """Sample of a fit. The fit makes `features · terms` close to `value`."""

    features: tuple[float, ...]
    """Factors of the terms."""
    value: float
    """Measured value."""
    weight: float
    """Weight of its squared relative error."""


def load_solver() -> None:
    """Run a small fit, because the first fit loads 4 MiB of numpy's routines into memory. Must be called before the
    engine reads its base footprint."""
    fit_from_above([FitPoint((1.0, 1.0), 1.0, 1.0), FitPoint((1.0, 2.0), 1.0, 1.0)])


def fit_from_above(points: Sequence[FitPoint]) -> tuple[float, ...]:
    """Return non-negative terms, one for each feature, fitted to `points` by relative error.

    The fit is repeated `FIT_ROUNDS` times with more weight on points above it, which moves it above nearly all points.
    Points without a positive value are ignored; if no other point is left, all terms are 0. `points` must not be empty.
    """
    used = [point for point in points if point.value > 0]
    if not used:
        return (0.0,) * len(points[0].features)
    rows = np.array([point.features for point in used]) / np.array([[point.value] for point in used])
    weights = np.array([point.weight for point in used])
    terms = np.zeros(rows.shape[1])
    for _ in range(FIT_ROUNDS):
        root = np.sqrt(weights)
        terms = solve_non_negative(rows * root[:, None], root)
        weights = weights * np.where(rows @ terms < 1, ABOVE_FIT_WEIGHT, 1.0)
    return tuple(terms.tolist())


def solve_non_negative(matrix: Floats, goal: Floats) -> Floats:
    """Return the terms (columns,), none of them negative, that minimize `|matrix · terms - goal|`.

    `matrix` has the shape (samples, columns), `goal` the shape (samples,).
    """
    lengths = np.linalg.norm(matrix, axis=0)
    lengths[lengths == 0] = 1.0
    scaled, width = matrix / lengths, matrix.shape[1]
    least = TOLERANCE * max(float(np.linalg.norm(goal)), 1e-300)
    terms, free = np.zeros(width), np.zeros(width, dtype=bool)
    for _ in range(MAX_STEPS_PER_TERM * width):
        gradient = np.where(free, -np.inf, scaled.T @ (goal - scaled @ terms))
        entering = int(np.argmax(gradient))
        if gradient[entering] <= least:
            break
        free[entering] = True
        terms = _remove_negative(scaled, goal, terms, free)
    return terms / lengths


def _remove_negative(matrix: Floats, goal: Floats, terms: Floats, free: NDArray[np.bool_]) -> Floats:
    """Return the solution of the `free` terms, from which terms that would become negative are removed one by one."""
    while free.any():
        solution = np.zeros_like(terms)
        solution[free] = np.linalg.lstsq(matrix[:, free], goal, rcond=TOLERANCE)[0]
        negative = free & (solution < 0)
        if not negative.any():
            return solution
        shares = np.full(terms.shape, np.inf)
        shares[negative] = terms[negative] / (terms[negative] - solution[negative])
        leaving = int(np.argmin(shares))
        terms = np.maximum(0.0, terms + shares[leaving] * (solution - terms))
        terms[leaving], free[leaving] = 0.0, False
    return terms

"""The table of loaded models: the worst residual of their forwards."""

from types import SimpleNamespace
from typing import Any

import pytest

from node.engine.models.model_table import compute_worst_residual

FLOOR = 64


def a_model(residual: int, measured: int | None = None, chunk: int = FLOOR, context: int = 1000) -> Any:
    """Return a model whose forwards exceeded their estimate by `residual` bytes, in its measurement by `measured`."""
    profile = None if measured is None else SimpleNamespace(residual=measured, chunk=chunk)
    return SimpleNamespace(
        estimator=SimpleNamespace(residual=residual),
        stats=SimpleNamespace(profile=profile),
        descriptor=SimpleNamespace(context=context),
    )


@pytest.mark.parametrize(
    ("models", "residual"),
    [
        ((), None),
        ((a_model(5),), None),
        ((a_model(5, 7), a_model(5)), None),
        ((a_model(5, 7, FLOOR - 1),), None),
        ((a_model(5, 7, FLOOR + 1), a_model(5, 7, FLOOR - 1)), None),
        ((a_model(5, 7, FLOOR - 2, context=FLOOR - 1),), None),
        ((a_model(5, 7, FLOOR - 1, context=FLOOR - 1),), 7),
        ((a_model(5, 7),), 7),
        ((a_model(7, 5),), 7),
        ((a_model(1, 2), a_model(3, 9), a_model(4, 5)), 9),
        ((a_model(1, 2), a_model(8, 3), a_model(4, 5)), 8),
    ],
)
def test_the_worst_residual_is_known_once_all_models_are_measured(models: tuple[Any, ...], residual: int | None):
    assert compute_worst_residual(models, FLOOR) == residual

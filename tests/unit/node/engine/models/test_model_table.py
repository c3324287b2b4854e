"""The table of loaded models: the worst residual of their forwards, and the bytes of a load in progress."""

from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import pytest

from node.engine.models.load_state import LoadBegan, LoadStep, ModelLoad, PieceDue, step
from node.engine.models.model_descriptor import ModelDescriptor
from node.engine.models.model_table import ModelTable, compute_worst_residual

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


def test_weights_that_are_still_to_load_are_reserved_and_the_others_known():
    table, load = ModelTable(), ModelLoad(ModelDescriptor("m", PurePath("m"), "f1"))
    seen = list[tuple[int, int, int, int]]()
    for event in (LoadBegan(90, 1.0), PieceDue(LoadStep(100, 5)), PieceDue(LoadStep(30, 5)), PieceDue(LoadStep(0, 5))):
        load = step(load, event)
        table.set_load(load)
        known, reserved = table.compute_known_bytes(), table.compute_reserved_bytes()
        seen.append((known, reserved, table.get_weights("m"), table.get_weights("other")))
    assert seen == [(0, 90, 0, 0), (0, 100, 0, 0), (70, 30, 70, 0), (100, 0, 100, 0)]
    table.set_load(None)
    assert (table.compute_known_bytes(), table.compute_reserved_bytes(), table.get_weights("m")) == (0, 0, 0)

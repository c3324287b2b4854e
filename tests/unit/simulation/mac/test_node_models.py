"""Loads of a simulated node run one at a time: progress, remaining time and memory of a queued load."""

import pytest

from simulation.mac.ended_chats import EndedChats
from simulation.mac.hardware import BASE, CHIPS
from simulation.mac.node_memory import NodeMemory
from simulation.mac.node_models import NodeModels
from simulation.scenario import ModelSpec
from wire.units import GIB


def make_models() -> NodeModels:
    """Return three models of 4 GiB, of which `c` is in memory, on a disk that reads 1 GiB per second."""
    models = NodeModels(CHIPS["M4"], GIB, 48 * GIB)
    for name in "abc":
        models.add(ModelSpec(name=name, weights="4GiB", kv_per_token="1MiB", active=8.0), loaded=name == "c")
    return models


def test_a_queued_load_has_read_nothing_and_waits_for_the_load_before():
    models = make_models()
    models.load(models["a"], 0.0)
    models.load(models["b"], 0.0)
    assert [models[name].to_report(1.0).progress for name in "ab"] == [pytest.approx(0.25), 0.0]
    assert [models.estimate_load_seconds(models[name], 1.0) for name in "abc"] == [
        pytest.approx(3),
        pytest.approx(7),
        0,
    ]


def test_a_load_that_was_not_requested_waits_for_all_others():
    models = make_models()
    assert models.estimate_load_seconds(models["a"], 1.0) == pytest.approx(4)
    models.load(models["a"], 1.0)
    assert models.estimate_load_seconds(models["b"], 2.0) == pytest.approx(7)


def test_weights_of_a_queued_load_are_reserved_but_not_in_memory():
    models = make_models()
    models.load(models["a"], 0.0)
    models.load(models["b"], 0.0)
    memory = NodeMemory(64 * GIB, models, EndedChats()).read(1.0)
    assert memory.phys == pytest.approx(BASE + 5 * GIB)
    assert memory.reserved == pytest.approx(7 * GIB)

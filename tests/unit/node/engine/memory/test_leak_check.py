"""The pure rule of when memory counts as not returned."""

import pytest

from node.engine.memory.leak_check import SETTLE_SECONDS, LeakCheck
from wire.units import GIB, MIB

BASE = 90 * MIB


@pytest.mark.parametrize(
    ("weights", "phys", "missing"),
    [
        (4 * MIB, BASE + 64 * MIB, 0),
        (4 * MIB, BASE + 64 * MIB + 1, 64 * MIB + 1),
        (4 * GIB, BASE + 400 * MIB, 0),
        (4 * GIB, BASE + 410 * MIB, 410 * MIB),
        (4 * GIB, BASE - MIB, 0),
        (4 * GIB, None, 0),
    ],
)
def test_unreturned_bytes_above_a_tenth_of_the_weights_are_reported(weights: int, phys: int | None, missing: int):
    returns = LeakCheck()
    returns.on_unload(weights, 10.0)
    assert returns.next_check_at == 10.0 + SETTLE_SECONDS
    assert returns.check(phys, BASE) == missing == returns.unreturned
    assert returns.next_check_at is None, "it looks once"


def test_all_models_that_went_count_together_and_one_that_comes_ends_it():
    returns = LeakCheck()
    returns.on_unload(2 * GIB, 10.0)
    returns.on_unload(2 * GIB, 20.0)
    assert returns.next_check_at == 20.0 + SETTLE_SECONDS
    assert returns.check(BASE + 400 * MIB, BASE) == 0
    returns.on_unload(4 * MIB, 30.0)
    assert returns.check(BASE + 400 * MIB, BASE) == 400 * MIB, "nothing is left of what went before"
    returns.on_unload(4 * MIB, 40.0)
    returns.on_load()
    assert (returns.next_check_at, returns.unreturned) == (None, 0)

import gc

from host.power import parse_idle_seconds
from tests.neuter.mutate import functions


def test_live_finds_a_function_that_is_frozen_as_collected_tests_are():
    gc.freeze()
    (function,) = functions(["host.power.parse_idle_seconds"])
    assert function.live() == [parse_idle_seconds]

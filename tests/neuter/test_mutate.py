import gc

from host.power import idle_in
from tests.neuter.mutate import functions


def test_live_finds_a_function_that_is_frozen_as_collected_tests_are():
    gc.freeze()
    (function,) = functions(["host.power.idle_in"])
    assert function.live() == [idle_in]

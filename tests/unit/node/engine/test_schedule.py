from hypothesis import given
from hypothesis import strategies as st

from node.engine.schedule import BURST, LEAST, LONE, STEPS, budget, chunk_tokens, next_prefill


def test_the_shortest_and_the_oldest_take_turns():
    waiting = [(60_000, 1.0), (20, 2.0), (10, 3.0)]
    assert [next_prefill(waiting, turn) for turn in range(4)] == [0, 2, 0, 2]


def test_of_equals_the_first_goes_first():
    assert next_prefill([(10, 1.0), (10, 2.0)], 1) == 0


def test_a_chunk_may_take_as_long_as_those_beside_it_can_bear():
    assert budget(0.0, 99.0) == LONE
    assert budget(0.04, 99.0) == STEPS * 0.04
    assert budget(0.04, BURST) == BURST, "a short prompt is written at once"


@given(st.floats(0.001, 2.0), st.floats(0, 1.0), st.floats(0, 0.1), st.integers(32, 8192))
def test_a_chunk_fits_its_time_or_is_the_smallest(seconds: float, fixed: float, each: float, most: int):
    tokens = chunk_tokens(seconds, fixed, each, most)
    assert LEAST <= tokens <= most
    assert tokens == LEAST or fixed + tokens * each <= seconds * 1.001

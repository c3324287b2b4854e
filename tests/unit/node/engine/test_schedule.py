from hypothesis import given
from hypothesis import strategies as st

from node.engine.schedule import CHUNK_STEPS, LEAST_CHUNK, LONE_CHUNK, chunk_tokens, next_prefill


def test_the_shortest_and_the_oldest_take_turns():
    waiting = [(60_000, 1.0), (20, 2.0), (10, 3.0)]
    assert [next_prefill(waiting, turn) for turn in range(4)] == [0, 2, 0, 2]


def test_of_equals_the_first_goes_first():
    assert next_prefill([(10, 1.0), (10, 2.0)], 1) == 0


@given(st.floats(1, 1e5), st.floats(0.001, 2.0), st.integers(32, 8192))
def test_a_chunk_takes_as_long_as_it_may_and_no_more(speed: float, steps: float, most: int):
    tokens = chunk_tokens(speed, steps, most)
    assert LEAST_CHUNK <= tokens <= most
    assert tokens == LEAST_CHUNK or tokens / speed <= CHUNK_STEPS * steps
    alone = chunk_tokens(speed, 0.0, most)
    assert alone == LEAST_CHUNK or alone / speed <= LONE_CHUNK

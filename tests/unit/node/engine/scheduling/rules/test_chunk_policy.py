import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine.scheduling.rules.chunk_policy import (
    CHUNK_PER_STEP,
    FULL_PROMPT_SECONDS,
    IDLE_CHUNK_SECONDS,
    MAX_PADDING_SHARE,
    MIN_CHUNK_TOKENS,
    NEAR_PAST_TOKENS,
    PACKED_FORWARD_SECONDS,
    RECOVERY_SECONDS,
    ChunkPace,
    PrefillSpeed,
    compute_budget,
    compute_shared_budget,
    next_prefill,
    select_batch,
)
from wire.capacity.fairness import CROWDED_PROMPTS, PrefillFairness, WeightedKey

ADA, BOB = WeightedKey("ada"), WeightedKey("bob")


def test_the_shortest_and_the_oldest_take_turns():
    waiting = [(20, 2.0, ADA), (60_000, 1.0, ADA), (10, 3.0, ADA)]
    assert [next_prefill(waiting, turn, PrefillFairness()) for turn in range(4)] == [1, 2, 1, 2]


def test_of_equal_prompts_the_first_is_prefilled_first():
    assert next_prefill([(10, 1.0, ADA), (10, 2.0, ADA)], 1, PrefillFairness()) == 0


def test_with_many_requests_of_one_key_the_second_turn_is_fair_between_keys():
    reading = PrefillFairness()
    waiting = [(5000, float(number), ADA) for number in range(CROWDED_PROMPTS + 1)] + [(6000, 99.0, BOB)]
    taken = list[int]()
    for turn in range(0, 20, 2):
        place = next_prefill(waiting, turn, reading)
        reading.count_prefilled(waiting[place][2], 100)
        taken.append(place)
    assert taken == [0, CROWDED_PROMPTS + 1] * 5


def test_a_chunk_may_take_as_long_as_those_beside_it_can_bear():
    assert compute_budget(0.0, 99.0) == IDLE_CHUNK_SECONDS
    assert compute_budget(0.04, 99.0) == CHUNK_PER_STEP * 0.04
    assert compute_budget(0.04, FULL_PROMPT_SECONDS) == FULL_PROMPT_SECONDS, "a short prompt is written at once"


def test_the_time_per_token_is_learned_without_the_time_for_its_past():
    pace = ChunkPace(each=0.001, far=1e-6)
    for _ in range(200):
        pace.learn(100, NEAR_PAST_TOKENS - 1, 100 * (0.002 + 1e-6 * (NEAR_PAST_TOKENS - 1)))
    assert pace.each == pytest.approx(0.002, rel=1e-3)


def test_several_prompts_may_take_the_longer_the_fewer_are_beside_them():
    assert compute_shared_budget(0.0, 99, 0) == compute_shared_budget(0.04, 7, 1) == PACKED_FORWARD_SECONDS
    assert FULL_PROMPT_SECONDS < compute_shared_budget(0.04, 3, 5) < PACKED_FORWARD_SECONDS
    assert compute_shared_budget(0.04, 1, 5) == FULL_PROMPT_SECONDS


def test_prompts_of_about_one_length_are_read_together():
    assert select_batch([100, 300, 95, 20, 110], 2048) == [0, 2, 4]
    assert select_batch([100, 100, 100], 299) == [0, 1], "no more than fits"


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(1, 8192))
def test_what_is_read_together_has_its_size_and_little_padding(lengths: list[int], most: int):
    chosen = select_batch(lengths, most)
    size = len(chosen) * max(lengths[place] for place in chosen)
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 1 or size <= most
    assert size - sum(lengths[place] for place in chosen) <= MAX_PADDING_SHARE * size


PACES = st.builds(ChunkPace, st.floats(0, 1.0), st.floats(0, 0.1), st.floats(0, 1e-4))


@given(PACES, st.floats(0.001, 2.0), st.integers(0, 100_000), st.integers(1, 8192))
def test_a_chunk_fits_its_time_or_is_the_smallest(pace: ChunkPace, seconds: float, past: int, most: int):
    tokens = pace.fit_tokens(seconds, past, most)
    assert min(MIN_CHUNK_TOKENS, most) <= tokens <= most
    assert tokens <= MIN_CHUNK_TOKENS or pace.estimate_seconds(tokens, past) <= seconds * 1.001
    assert tokens in (most, MIN_CHUNK_TOKENS) or pace.estimate_seconds(tokens + 1, past) >= seconds * 0.999


def test_long_prompts_and_short_ones_do_not_spoil_each_others_sizes():
    true, pace = ChunkPace(0.02, 0.0014, 1.4e-6), ChunkPace(0.02, 0.001)
    for past in range(0, 6000, 20):
        pace.learn(20, past + 10, true.estimate_seconds(20, past))
        pace.learn(100, 50, true.estimate_seconds(100, 0))
    for past in (0, 2000, 6000):
        assert pace.estimate_seconds(20, past) == pytest.approx(true.estimate_seconds(20, past), rel=0.15)
    assert pace.fit_tokens(0.1, 6000, 2048) < 10 < 40 < pace.fit_tokens(0.1, 0, 2048)


def test_the_first_measurements_far_into_a_prompt_may_be_odd():
    pace = ChunkPace(0.02, 0.01)
    pace.learn(20, 3000, 0.03)
    assert pace.estimate_seconds(20, 3000) >= 0.02
    assert pace.far == 0


def test_who_was_slow_once_is_expected_at_its_best_after_a_rest():
    speed = PrefillSpeed()
    for newest in (40.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0):
        speed.learn(newest)
    assert speed.predict_speed(0.0) == speed.predict_speed(RECOVERY_SECONDS - 1) < 8, (
        "as it was of late, as long as that is of late"
    )
    assert speed.predict_speed(RECOVERY_SECONDS) == 40.0


def test_one_measurement_makes_no_node_fast_and_the_best_lasts_a_while():
    speed = PrefillSpeed()
    for newest in (10.0, 10.0, 1e6, 10.0, 10.0):
        speed.learn(newest)
    assert speed.predict_speed(RECOVERY_SECONDS) < 20


def test_a_machine_that_is_ten_times_as_fast_as_its_first_run_is_known_for_it_soon():
    """The first run is short, and short runs are not typical of a GPU."""
    speed = PrefillSpeed()
    for newest in (300.0, *[3000.0] * 8):
        speed.learn(newest)
    assert speed.predict_speed(0.0) > 2000

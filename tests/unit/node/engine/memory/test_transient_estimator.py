"""The estimator: never below its samples, close to unknown values, for any samples."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.engine.memory.transient_estimator import (
    CHUNKS,
    MAX_SAMPLES,
    MIN_FORWARDS_COVERED,
    MIN_LOGITS_CHUNK_TOKENS,
    NOISE_SHARE,
    REPEAT_FACTOR,
    STEPS,
    TransientEstimator,
)
from wire.capacity.arithmetic import estimate_prefill_transient, estimate_step_transient
from wire.report import TransientModel

PRIOR = TransientModel(token=1000, pair=16, seen=400, logits=2048, step_row=4096, step_seen=16)
TRUE = TransientModel(fixed=50_000, token=9000, pair=18, seen=500, step_fixed=30_000, step_row=9000, step_seen=40)
HYBRID = TransientModel(fixed=50_000, token=9000, pair=18, seen=500, least=24_000)
WALK = [
    (512, 0),
    (32, 512),
    (256, 544),
    (64, 800),
    (128, 864),
    (512, 992),
    (64, 1504),
    (256, 1568),
    (32, 1824),
    (128, 1856),
    (512, 1984),
    (256, 2496),
]


def walked(true: TransientModel) -> TransientEstimator:
    estimator = TransientEstimator(PRIOR)
    for tokens, past in [(32, 0), (64, 0), (128, 0), (256, 0), *WALK]:
        grew = past % 256 == 0
        estimator.observe_prefill(tokens, past, estimate_prefill_transient(true, tokens, past, grows=grew), grew=grew)
    estimator.fit()
    return estimator


def test_before_the_first_sample_it_is_the_formula():
    assert TransientEstimator(PRIOR).estimate_chunk(256, 1000) == estimate_prefill_transient(PRIOR, 256, 1000)
    assert TransientEstimator(PRIOR).estimate_step(4, 1000) == estimate_step_transient(PRIOR, 4, 1000)
    assert TransientEstimator(PRIOR).estimate_join(1000, 4) == 250


def test_one_sample_above_the_formula_raises_all_of_it_at_once():
    estimator = TransientEstimator(PRIOR)
    estimator.observe_prefill(256, 1000, 3 * estimate_prefill_transient(PRIOR, 256, 1000))
    assert estimator.estimate_chunk(256, 1000) >= 3 * estimate_prefill_transient(PRIOR, 256, 1000)
    assert estimator.estimate_chunk(256, 8000) >= 3 * estimate_prefill_transient(PRIOR, 256, 8000)


def test_a_sample_leaves_room_for_what_the_same_forward_takes_another_time():
    estimator, taken = TransientEstimator(PRIOR), 3 * estimate_prefill_transient(PRIOR, 256, 1000)
    estimator.observe_prefill(256, 1000, taken)
    assert estimator.estimate_chunk(256, 1000) == pytest.approx(REPEAT_FACTOR * (1 + NOISE_SHARE) * taken, rel=1e-6)
    estimator.observe_step(4, 100, 10**9)
    assert estimator.estimate_step(4, 100) == pytest.approx(REPEAT_FACTOR * (1 + NOISE_SHARE) * 10**9, rel=1e-3)
    estimator.observe_prefill(MIN_LOGITS_CHUNK_TOKENS, 0, 10**9, last=True)
    assert estimator.estimate_chunk(MIN_LOGITS_CHUNK_TOKENS, 0, last=True) >= REPEAT_FACTOR * 10**9


def test_several_prompts_in_one_forward_need_as_much_as_one_by_one():
    estimator = covered(512, 10**9)
    one = estimator.estimate_prefill(128, 0)
    assert estimator.estimate_packed(4, 128) == 4 * one
    assert estimator.estimate_packed(5, 128) == 5 * one + 10**9, "640 tokens are more than were measured"
    estimator.observe_packed(4, 128, 4 * one)
    assert (estimator.residual, estimator.highest, estimator.estimate_prefill(128, 0)) == (0, 4 * one, one)
    estimator.observe_packed(4, 128, 4 * one + 4000)
    assert (estimator.residual, estimator.highest) == (4000, 4 * one + 4000)
    assert estimator.estimate_prefill(128, 0) == pytest.approx(
        REPEAT_FACTOR * (1 + NOISE_SHARE) * (one + 1000), rel=1e-6
    )


def test_what_was_fitted_before_is_begun_with_and_its_highest_kept():
    estimator = TransientEstimator(PRIOR)
    estimator.observe_prefill(8, 0, 1000)
    for logits, highest in ((4096.0, 500), (1.0, 2000)):
        estimator.set_coefficients(TransientModel(token=5.0, logits=logits), highest)
        assert estimator.transient == TransientModel(token=5.0, logits=4096.0)
        assert estimator.highest == max(1000, highest)
    estimator.set_coefficients(TransientModel(token=5.0, logits=1.0), 0)
    assert (estimator.transient.logits, estimator.highest) == (4096.0, 2000)


def test_a_join_copies_a_batch_layer_by_layer():
    assert [TransientEstimator(PRIOR).estimate_join(1000, layers) for layers in (0, 1, 3)] == [1000, 1000, 333]


def test_a_fit_foresees_chunks_that_it_has_not_seen():
    for true in (TRUE, HYBRID):
        estimator = walked(true)
        for tokens, past in ((96, 0), (48, 300), (700, 0), (384, 3000), (1000, 2000), (200, 6000)):
            for grows in (False, True):
                taken = estimate_prefill_transient(true, tokens, past, grows=grows)
                least = 1.1 * NOISE_SHARE * estimate_prefill_transient(true, 512, 1984)
                assert taken <= estimator.estimate_chunk(tokens, past, grows=grows) <= 1.25 * taken + least, (
                    tokens,
                    past,
                )


def test_a_fit_foresees_steps_that_it_has_not_seen():
    estimator = walked(TRUE)
    for rows, longest in ((1, 100), (2, 100), (4, 300), (8, 300), (8, 1200), (2, 2000)):
        estimator.observe_step(rows, longest, estimate_step_transient(TRUE, rows, longest, grows=False))
    estimator.fit()
    for rows, longest in ((3, 500), (16, 1000), (32, 4000)):
        ratio = estimator.estimate_step(rows, longest) / estimate_step_transient(TRUE, rows, longest)
        assert 1.0 <= ratio <= 1.25, (rows, longest, ratio)


def test_unknown_dimensions_count_nothing_until_something_is_seen():
    estimator = TransientEstimator(TransientModel())
    assert estimator.estimate_chunk(256, 1000) == 0
    estimator.observe_prefill(256, 1000, 5_000_000)
    assert estimator.estimate_chunk(256, 1000) >= 5_000_000


def test_logits_beyond_their_estimate_raise_it():
    estimator = TransientEstimator(PRIOR)
    estimator.observe_prefill(100, 0, 10_000_000, last=True)
    assert estimator.estimate_chunk(100, 0, last=True) >= 10_000_000
    assert estimator.estimate_chunk(100, 0) == estimate_prefill_transient(PRIOR, 100, 0), (
        "the other layers take what they took"
    )


def test_what_a_window_does_not_see_costs_nothing():
    windowed = TransientEstimator(TransientModel(token=1000, pair=16, window=64))
    assert windowed.estimate_chunk(100, 64) == windowed.estimate_chunk(100, 10_000)


SHAPES = st.tuples(st.integers(1, 4096), st.integers(0, 100_000), st.integers(0, 2**34), st.booleans())


@given(st.lists(SHAPES, min_size=1, max_size=12))
@settings(deadline=None)
def test_no_sample_lies_above_the_estimate_right_after_it(samples: list[tuple[int, int, int, bool]]):
    estimator = TransientEstimator(PRIOR)
    for tokens, past, taken, grew in samples:
        estimator.observe_prefill(tokens, past, taken, grew=grew)
        assert estimator.estimate_chunk(tokens, past, grows=grew) >= taken
        assert estimator.highest >= taken


@given(st.lists(SHAPES, min_size=1, max_size=12))
@settings(deadline=None)
def test_no_step_lies_above_the_estimate_right_after_it(samples: list[tuple[int, int, int, bool]]):
    estimator = TransientEstimator(PRIOR)
    for rows, longest, taken, grew in samples:
        estimator.observe_step(rows, longest, taken, grew=grew)
        assert estimator.estimate_step(rows, longest, grows=grew) >= taken


def test_samples_are_bounded():
    estimator = TransientEstimator(PRIOR)
    for tokens in range(1, 2000, 3):
        estimator.observe_prefill(tokens, tokens * 7, estimate_prefill_transient(TRUE, tokens, tokens * 7))
    assert estimator.samples[CHUNKS] <= MAX_SAMPLES


def covered(tokens: int, narrowed: int, rows: int = 4) -> TransientEstimator:
    estimator = TransientEstimator(TransientModel(token=1000.0))
    estimator.set_profiled_range(tokens, rows, lambda: narrowed)
    return estimator


def test_a_chunk_beyond_what_was_measured_needs_room_for_the_full_margin():
    estimator = covered(512, 10**9)
    assert estimator.estimate_chunk(512, 0) == estimator.estimate_prefill(512, 0)
    assert estimator.estimate_chunk(513, 0) == estimator.estimate_prefill(513, 0) + 10**9
    assert TransientEstimator(TransientModel(token=1000.0)).estimate_chunk(9999, 0) == 9999 * 1000, (
        "without a profile the margin is full"
    )


def test_a_few_chunks_of_a_size_extend_what_is_covered():
    estimator = covered(512, 10**9)
    for tokens in (2048, 1024):
        estimator.observe_prefill(tokens, 0, 1)
        assert estimator.estimate_chunk(1024, 0) > 10**9
    estimator.observe_prefill(2048, 0, 1)
    assert estimator.estimate_chunk(1024, 0) < 10**9
    assert estimator.estimate_chunk(2048, 0) > 10**9
    estimator.observe_prefill(2048, 0, 1)
    assert estimator.estimate_chunk(2048, 0) < 10**9


def test_a_covered_chunk_above_its_estimate_raises_the_residual():
    estimator = covered(512, 0)
    estimator.observe_prefill(100, 0, 50_000)
    assert estimator.residual == 0
    above = 700_000 - estimator.estimate_prefill(256, 0)
    estimator.observe_prefill(256, 0, 700_000)
    assert estimator.residual == above > 0
    estimator.observe_prefill(2048, 0, 10**9)
    assert estimator.residual == above, "of what is not covered the fit learns, and the full margin holds"
    estimator.set_profiled_range(512, 4, lambda: 0)
    assert estimator.residual == 0


def test_a_join_and_a_step_of_more_rows_than_were_measured_need_room_for_the_full_margin():
    estimator = covered(512, 10**9, rows=4)
    assert estimator.estimate_charged_join(800, 8, 4) == estimator.estimate_join(800, 8) == 100
    assert estimator.estimate_charged_join(800, 8, 5) == 100 + 10**9
    assert estimator.estimate_charged_step(4, 100) == estimator.estimate_step(4, 100)
    assert estimator.estimate_charged_step(5, 100) == estimator.estimate_step(5, 100) + 10**9
    assert TransientEstimator(TransientModel()).estimate_charged_step(99, 1) == 0, (
        "without a profile the margin is full"
    )


def test_a_few_joins_and_steps_of_a_width_extend_what_is_covered():
    estimator = covered(512, 10**9, rows=4)
    for _ in range(MIN_FORWARDS_COVERED):
        assert (estimator.rows, estimator.compute_uncovered_bytes(STEPS, 8)) == (4, 10**9)
        estimator.observe_step(8, 100, 1)
    assert estimator.compute_uncovered_bytes(STEPS, 8) == 0
    assert estimator.rows == 4, "joins of 8 rows are not measured yet"
    for _ in range(MIN_FORWARDS_COVERED):
        estimator.observe_join(8, 0)
    assert estimator.rows == 8


def test_a_covered_join_or_step_above_its_estimate_raises_the_residual():
    estimator = covered(512, 0, rows=4)
    estimator.observe_join(5, 10**9)
    assert estimator.residual == 0
    estimator.observe_join(4, 3000)
    assert estimator.residual == 3000
    estimator.observe_step(4, 100, estimator.estimate_step(4, 100, grows=False) + 5000)
    assert estimator.residual == 5000

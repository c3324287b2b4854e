from node.engine.models.model_stats import (
    FIRST_PREFILL_TOKENS_PER_SECOND,
    MIN_MEASURED_TOKENS,
    ModelStats,
    ModelUsage,
    create_warmed_stats,
)


def test_a_model_is_in_use_until_its_last_hold_is_released():
    usage = ModelUsage()
    first, second = usage.hold(), usage.hold()
    assert usage.users == 2
    first.release()
    first.release()
    assert usage.users == 1
    assert usage.compute_idle_seconds(100.0) == 0.0
    second.release()
    usage.mark_used(90.0)
    usage.mark_used(80.0)
    assert usage.compute_idle_seconds(100.0) == 10.0


def test_a_hold_ends_with_its_context():
    usage = ModelUsage()
    with usage.hold():
        assert usage.users == 1
    assert usage.users == 0


def test_a_first_prefill_is_expected_to_be_slow():
    stats = ModelStats()
    assert stats.estimate_prefill_seconds(100) == 100 / FIRST_PREFILL_TOKENS_PER_SECOND
    stats.record_prefill(100, 0.5, 50.0)
    assert stats.estimate_prefill_seconds(100) == 0.5


def test_a_warm_up_gives_the_first_speeds():
    stats = create_warmed_stats(200.0, 0.1)
    assert (stats.prefill_speed.late, stats.decode_speed.late, stats.step_seconds) == (200.0, 10.0, 0.1)
    assert stats.pace.estimate_seconds(10, 0) == 0.1 + 10 / 200


def test_text_of_short_prompts_is_not_measured():
    stats = ModelStats()
    stats.record_text(1000, MIN_MEASURED_TOKENS - 1)
    assert stats.bytes_per_token == 0.0
    stats.record_text(3 * MIN_MEASURED_TOKENS, MIN_MEASURED_TOKENS)
    assert stats.bytes_per_token == 3.0

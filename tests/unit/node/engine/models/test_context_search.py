"""The longest row: it is compared with a reading, 5 % less at a time, and the failure names the settings."""

import pytest

from node.engine.models.context_search import ATTEMPTS, ContextSearchResult, describe_failed_search, search_context


def run(tokens: int, passing: int, *, search: bool = True) -> tuple[ContextSearchResult, list[int]]:
    """Settle where rows of up to `passing` tokens pass; return the result and the tried lengths."""
    tried: list[int] = []
    steps = search_context(tokens, lambda wanted: tried.append(wanted) or wanted <= passing, search=search)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, tried


@pytest.mark.parametrize(
    ("passing", "tried", "share"),
    [
        (1000, [1000], 1.0),
        (950, [1000, 950], 0.95),
        (902, [1000, 950, 902], 0.902),
        (857, [1000, 950, 902, 856], 0.856),
    ],
)
def test_a_row_that_does_not_pass_is_made_five_percent_shorter(passing: int, tried: list[int], share: float):
    settled, found = run(1000, passing)
    assert found == tried
    assert settled.ok
    assert settled.tokens == tried[-1]
    assert settled.share == pytest.approx(share)


def test_after_four_attempts_the_failure_names_every_knob():
    settled, tried = run(1000, 100)
    assert not settled.ok
    assert len(tried) == settled.attempts == ATTEMPTS == 4
    text = describe_failed_search("a/b", settled)
    assert "a/b" in text
    assert "4 attempts" in text
    assert "856" in text
    for knob in (
        "engine.mlx.prefill_step_size,",
        "engine.mlx.min_prefill_step",
        "engine.mlx.max_batch_size",
        "engine.mlx.max_context",
        "memory.cap",
        "memory.margin",
        "smaller quantization",
    ):
        assert knob in text


def test_a_row_that_a_person_set_is_tried_once_and_not_searched_for():
    assert run(1000, 999, search=False)[1] == [1000]
    assert run(1000, 1000, search=False)[0].ok


def test_no_row_at_all_is_a_failure_too():
    settled, tried = run(0, 100)
    assert not settled.ok
    assert tried == []
    assert 0 < settled.share <= 1

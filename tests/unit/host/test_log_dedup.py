"""Equal events: which of them are logged, and how the suppressed ones are reported."""

from typing import Any

import pytest

from host.log_dedup import BURST_EVENTS, MAX_SUBJECTS, WINDOW_SECONDS, LogDeduplicator


def admitted(
    repeats: LogDeduplicator, count: int, now: float, event: str = "denied", **fields: Any
) -> list[int | None]:
    return [repeats.admit("links", event, fields, now) for _ in range(count)]


def test_a_burst_is_admitted_and_the_next_window_has_the_number_left_out():
    repeats = LogDeduplicator()
    assert admitted(repeats, BURST_EVENTS + 3, 100.0) == [0] * BURST_EVENTS + [None] * 3
    assert admitted(repeats, 1, 100.0 + WINDOW_SECONDS - 0.5) == [None]
    assert admitted(repeats, BURST_EVENTS + 2, 100.0 + WINDOW_SECONDS) == [4] + [0] * (BURST_EVENTS - 1) + [None] * 2
    assert admitted(repeats, 1, 100.0 + 2 * WINDOW_SECONDS) == [2]
    assert admitted(repeats, 1, 100.0 + 3 * WINDOW_SECONDS) == [0]


@pytest.mark.parametrize("subject", ["node", "peer", "address", "reason", "why", "condition", "model"])
def test_subjects_are_counted_each_for_itself(subject: str):
    repeats = LogDeduplicator()
    assert admitted(repeats, BURST_EVENTS + 1, 0.0, **{subject: "a"})[-1] is None
    assert admitted(repeats, 1, 0.0, **{subject: "b"}) == [0]
    assert admitted(repeats, 1, 0.0) == [0]
    assert admitted(repeats, 1, 0.0, "gone", **{subject: "a"}) == [0]
    assert repeats.admit("store", "denied", {subject: "a"}, 0.0) == 0
    assert admitted(repeats, 1, 0.0, **{subject: "a", "request": "7"}) == [None], "another field makes no subject"


def test_of_a_long_subject_the_beginning_counts():
    repeats = LogDeduplicator()
    assert admitted(repeats, BURST_EVENTS, 0.0, reason="x" * 100 + "a") == [0] * BURST_EVENTS
    assert admitted(repeats, 1, 0.0, reason="x" * 100 + "b") == [None]


def test_too_many_subjects_count_as_one_until_old_ones_are_forgotten():
    repeats = LogDeduplicator()
    for number in range(MAX_SUBJECTS - 1):
        assert admitted(repeats, 1, 0.0, peer=number) == [0]
    assert admitted(repeats, BURST_EVENTS + 1, 0.0, peer="loud")[-1] is None
    others = [admitted(repeats, 1, 1.0, peer=f"other {number}") for number in range(BURST_EVENTS + 1)]
    assert others == [[0]] * BURST_EVENTS + [[None]]
    assert admitted(repeats, 1, 1.0, peer=0) == [0], "a known peer is still counted separately"
    assert admitted(repeats, 2, WINDOW_SECONDS, peer="new") == [0, 0], "an entry older than the window is replaced"
    assert admitted(repeats, 1, WINDOW_SECONDS + 1, peer="loud") == [1], (
        "a peer is not forgotten before its count was logged"
    )


def test_of_a_full_memory_only_what_is_a_window_old_is_forgotten():
    repeats = LogDeduplicator()
    for number in range(MAX_SUBJECTS):
        assert admitted(repeats, 1, 0.0, peer=number) == [0]
    assert admitted(repeats, BURST_EVENTS, WINDOW_SECONDS, peer="a") == [0] * BURST_EVENTS
    for number in range(MAX_SUBJECTS):
        assert admitted(repeats, 1, WINDOW_SECONDS + 1, peer=f"b {number}") in ([0], [None])
    assert admitted(repeats, 1, WINDOW_SECONDS + 1, peer="a") == [None]


def test_the_first_subject_beyond_a_full_memory_makes_room_for_itself():
    repeats = LogDeduplicator()
    for number in range(MAX_SUBJECTS):
        admitted(repeats, 1, 0.0, peer=number)
    assert admitted(repeats, BURST_EVENTS, WINDOW_SECONDS, peer="a") == [0] * BURST_EVENTS
    assert admitted(repeats, 1, WINDOW_SECONDS, peer="b") == [0]

"""A few thousand mutated frames, always with the same seed."""

from tests.fuzz.frames import inputs, run


def test_mutated_frames_make_no_surprise() -> None:
    assert run(seed=1, count=4000) == []


def test_the_same_seed_makes_the_same_frames() -> None:
    assert list(inputs(7, 50)) == list(inputs(7, 50)) != list(inputs(8, 50))

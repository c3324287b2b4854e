"""Plans of clips: rounded sizes and lengths, limits, refusals and warnings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.video.state.clip_plan import (
    MAX_FPS,
    MAX_SIDE,
    MIN_FPS,
    MIN_SIDE,
    Clip,
    ClipLimits,
    ClipRefusal,
    ClipRequest,
    find_fitting_fps,
    plan_clip,
    round_frames,
    round_side,
)
from wire.units import GIB
from wire.video import VideoPackage

A14B = VideoPackage("wan", engine="0.18.14", bits=8, expert=int(14.35 * GIB))
LEASE = 36 * GIB

sides = st.integers(-10, 5000)
wishes = st.builds(
    ClipRequest,
    st.none() | st.tuples(sides, sides),
    st.none() | st.integers(-5, 500),
    st.none() | st.integers(-5, 500),
    st.none() | st.integers(-5, 500),
    st.none() | st.integers(-5, 500),
)
packages = st.builds(
    VideoPackage,
    st.just("wan"),
    token_side=st.sampled_from([16, 32]),
    token_frames=st.sampled_from([4, 8]),
    fps=st.sampled_from([16, 24]),
)


@given(wishes, packages)
def test_every_clip_that_is_made_keeps_the_limits_and_every_refusal_names_its_parameter(
    wish: ClipRequest, package: VideoPackage
):
    limits = ClipLimits()
    found = plan_clip(wish, limits, package, 20)
    if isinstance(found, ClipRefusal):
        assert found.param in ("size", "seconds", "frames", "fps", "steps")
        assert found.param in found.message
        return
    assert found.width % package.token_side == found.height % package.token_side == 0
    assert found.width * found.height <= limits.pixels
    assert found.frames % package.token_frames == 1
    assert found.frames <= limits.frames
    assert 1 <= found.steps <= limits.steps
    if wish.size is not None:
        assert (found.width, found.height) == wish.size or any("is made as" in text for text in found.warnings)
        assert all(
            0 <= made - asked < package.token_side
            for made, asked in zip((found.width, found.height), wish.size, strict=True)
        )


@pytest.mark.parametrize(("seconds", "frames"), [(3, 49), (4, 65), (5, 81), (7, 113)])
def test_seconds_become_frames(seconds: int, frames: int):
    found = plan_clip(ClipRequest(seconds=seconds), ClipLimits(), A14B, 20)
    assert isinstance(found, Clip)
    assert found.frames == frames
    assert bool(found.warnings) == (frames > 81)


@pytest.mark.parametrize(("seconds", "fps"), [(8, 15), (12, 10), (30, 4)])
def test_refusal_of_a_long_clip_names_a_frame_rate_that_fits(seconds: int, fps: int):
    found = plan_clip(ClipRequest(seconds=seconds), ClipLimits(), A14B, 20)
    assert isinstance(found, ClipRefusal)
    assert f"fps {fps} would fit" in found.message
    assert isinstance(plan_clip(ClipRequest(seconds=seconds, fps=fps), ClipLimits(), A14B, 20), Clip)
    assert isinstance(plan_clip(ClipRequest(seconds=seconds, fps=fps + 1), ClipLimits(), A14B, 20), ClipRefusal)


@pytest.mark.parametrize(("limit", "frames", "seconds"), [(121, 121, 30), (120, 117, 29), (5, 5, 1)])
def test_refusal_names_the_most_frames_and_the_longest_clip_that_are_possible(limit: int, frames: int, seconds: int):
    def plan(wish: ClipRequest) -> Clip | ClipRefusal:
        return plan_clip(wish, ClipLimits(limit), A14B, 20)

    assert isinstance(plan(ClipRequest(frames=frames)), Clip)
    assert plan(ClipRequest(frames=frames + 1)) == ClipRefusal(
        "frames", f"frames must be 1 to {frames}, not {frames + 1}"
    )
    refusal = plan(ClipRequest(seconds=500))
    assert isinstance(refusal, ClipRefusal)
    assert refusal.message.endswith(f"a clip may have {frames}: {seconds} s are possible at most")
    assert isinstance(plan(ClipRequest(seconds=seconds, fps=MIN_FPS)), Clip)
    assert isinstance(plan(ClipRequest(seconds=seconds + 1, fps=MIN_FPS)), ClipRefusal)


@given(st.integers(1, 200), st.integers(5, 500), st.sampled_from([4, 8]))
def test_the_rate_that_is_named_always_fits(seconds: int, most: int, step: int):
    fps = find_fitting_fps(seconds, most, step)
    if fps is not None:
        assert round_frames(seconds * fps, step) <= max(most, step + 1)


@given(st.integers(1, 5000), st.sampled_from([16, 32]))
def test_sides_are_rounded_up_by_less_than_a_token(pixels: int, token: int):
    assert 0 <= round_side(pixels, token) - pixels < token


def test_a_frame_rate_of_zero_is_refused_and_is_not_the_default():
    found = plan_clip(ClipRequest(fps=0), ClipLimits(), A14B, 20)
    assert isinstance(found, ClipRefusal)
    assert found.param == "fps"


def test_frames_and_seconds_together_are_refused():
    found = plan_clip(ClipRequest(seconds=3, frames=49), ClipLimits(), A14B, 20)
    assert isinstance(found, ClipRefusal)
    assert found.param == "frames"


@pytest.mark.parametrize(("frames", "made"), [(1, 5), (2, 5), (5, 5), (6, 9), (81, 81)])
def test_frames_are_rounded_up_to_groups_and_one(frames: int, made: int):
    assert round_frames(frames, 4) == made


def test_rounded_sizes_and_frames_and_long_clips_have_warnings():
    package, limits = VideoPackage("wan"), ClipLimits(pixels=MAX_SIDE * MAX_SIDE)
    for size in ((480, 272), (MIN_SIDE, MAX_SIDE), (MAX_SIDE, MIN_SIDE)):
        made = plan_clip(ClipRequest(size=size, frames=81), limits, package, 20)
        assert isinstance(made, Clip)
        assert (made.width, made.height, made.warnings, made.seconds) == (*size, (), 81 / package.fps)
    made = plan_clip(ClipRequest(size=(479, 271), frames=82), limits, package, 20)
    assert isinstance(made, Clip)
    assert [warning.split(":")[0] for warning in made.warnings] == [
        "size 479x271 is made as 480x272",
        "82 frames are made as 85",
        "85 frames are more than the 81 that the model was trained on",
    ]
    for size in ((MIN_SIDE - 1, 272), (480, MIN_SIDE - 1), (MAX_SIDE + 1, 272), (480, MAX_SIDE + 1)):
        refusal = plan_clip(ClipRequest(size=size), limits, package, 20)
        assert isinstance(refusal, ClipRefusal)
        assert refusal.param == "size"


@pytest.mark.parametrize(
    ("wish", "limits", "param"),
    [
        (ClipRequest(size=(640, 320)), ClipLimits(pixels=640 * 320), ""),
        (ClipRequest(size=(640, 320)), ClipLimits(pixels=640 * 320 - 1), "size"),
        (ClipRequest(size=(625, 320)), ClipLimits(pixels=640 * 320 - 1), "size"),
        (ClipRequest(fps=MIN_FPS, frames=5), ClipLimits(), ""),
        (ClipRequest(fps=MIN_FPS - 1, frames=5), ClipLimits(), "fps"),
        (ClipRequest(fps=MAX_FPS, frames=5), ClipLimits(), ""),
        (ClipRequest(fps=MAX_FPS + 1, frames=5), ClipLimits(), "fps"),
        (ClipRequest(steps=1), ClipLimits(), ""),
        (ClipRequest(steps=0), ClipLimits(), "steps"),
        (ClipRequest(steps=30), ClipLimits(steps=30), ""),
        (ClipRequest(steps=31), ClipLimits(steps=30), "steps"),
        (ClipRequest(seconds=1), ClipLimits(), ""),
        (ClipRequest(seconds=0), ClipLimits(), "seconds"),
    ],
)
def test_a_clip_may_have_each_limit_and_no_more(wish: ClipRequest, limits: ClipLimits, param: str):
    found = plan_clip(wish, limits, A14B, 20)
    assert (found.param if isinstance(found, ClipRefusal) else "") == param

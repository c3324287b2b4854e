import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.video.state.memory_model import (
    FIRST_MEASURED_PROFILE,
    MAX_SIDE,
    MIN_FPS,
    MIN_SIDE,
    Clip,
    ClipLimits,
    ClipRefusal,
    ClipRequest,
    VideoMemoryProfile,
    explain_too_large,
    find_fitting_fps,
    parse_engine_version,
    plan_clip,
    predict_profile,
    round_frames,
    round_side,
)
from wire.units import GIB
from wire.video import VideoPackage

A14B = VideoPackage("wan", engine="0.18.14", bits=8, expert=int(14.35 * GIB))
LEASE = 36 * GIB


def clip(size: str, package: VideoPackage = A14B) -> Clip:
    width, height = map(int, size.split("x"))
    found = plan_clip(ClipRequest((width, height)), ClipLimits(pixels=10**8), package, 20)
    assert isinstance(found, Clip)
    return found


def need(size: str, profile: VideoMemoryProfile = FIRST_MEASURED_PROFILE) -> float:
    return round(profile.compute_need(clip(size).tokens) / GIB, 2)


@pytest.mark.parametrize(
    ("size", "tokens", "expected"),
    [
        ("384x224", 336, 24.47),
        ("480x272", 510, 24.98),
        ("640x368", 920, 26.17),
        ("832x480", 1560, 28.02),
        ("960x544", 2040, 29.42),
        ("1280x704", 3520, 33.71),
        ("1280x720", 3600, 33.94),
        ("1920x1088", 8160, 47.16),
    ],
)
def test_the_first_profile_gives_the_numbers_of_the_first_case(size: str, tokens: int, expected: float):
    assert clip(size).tokens == tokens
    assert need(size) == pytest.approx(expected, abs=0.011)
    assert need(size, predict_profile(A14B)) == pytest.approx(expected, abs=0.011)


def test_job_above_the_lease_is_refused_with_numbers():
    assert explain_too_large(FIRST_MEASURED_PROFILE, clip("1280x720"), LEASE) is None
    text = explain_too_large(FIRST_MEASURED_PROFILE, clip("1920x1088"), LEASE)
    assert text is not None
    for number in ("1920x1088", "41.2 GiB", "6.0 GiB", "47.2 GiB", "36.0 GiB", "uncalibrated"):
        assert number in text
    measured = explain_too_large(FIRST_MEASURED_PROFILE.add_measurement(336, 0), clip("1920x1088"), LEASE)
    assert "measured on 1 jobs" in (measured or "")


def test_add_measurement_raises_the_base_by_what_a_peak_exceeds_the_prediction():
    first = VideoMemoryProfile(base=10, slope=1.0).add_measurement(5, 20)
    assert (first.base, first.measured) == (15, 1)
    second = first.add_measurement(5, 19)
    assert (second.base, second.measured) == (15, 2)


@pytest.mark.parametrize(
    ("engine", "bits", "low"),
    [
        ("0.18.16", 8, True),
        ("0.18.17", 8, False),
        ("0.38.0", 8, False),
        ("0.38.0", 4, True),
        ("", 8, False),
        ("1.x", 8, False),
    ],
)
def test_newer_engines_hold_eight_bits_in_sixteen(engine: str, bits: int, low: bool):
    package = VideoPackage("wan", engine=engine, bits=bits, expert=int(14.35 * GIB))
    assert (predict_profile(package).compute_need(336) < 25 * GIB) is low
    if not low:
        assert predict_profile(package).compute_need(336) / GIB == pytest.approx(36.74, abs=0.5)


def test_predict_profile_without_details_is_the_first_measured_profile():
    assert predict_profile(VideoPackage("wan", engine="0.18.14")) == FIRST_MEASURED_PROFILE
    assert parse_engine_version("0.18.14") < parse_engine_version("0.18.17.dev1") < parse_engine_version("junk")


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 2**40)), max_size=10))
def test_a_measured_peak_never_lowers_a_profile_and_is_covered_by_it(measured: list[tuple[int, int]]):
    profile = FIRST_MEASURED_PROFILE
    for tokens, peak in measured:
        after = profile.add_measurement(tokens, peak)
        assert after.base >= profile.base
        assert after.predict_peak(tokens) >= peak
        assert after.calibrated
        profile = after


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

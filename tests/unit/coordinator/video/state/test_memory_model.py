"""Predicted and measured peaks of video jobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.video.state.clip_plan import (
    Clip,
    ClipLimits,
    ClipRequest,
    plan_clip,
)
from coordinator.video.state.memory_model import (
    FIRST_MEASURED_PROFILE,
    VideoMemoryProfile,
    explain_too_large,
    parse_engine_version,
    predict_profile,
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

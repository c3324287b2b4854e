"""Rows of video models, memory profiles, leases and nodes in the API."""

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.video.rows import build_lease_row, build_package_rows, build_profile_rows, build_video_row
from coordinator.video.state.job_table import JobTable, LeaseHold
from coordinator.video.state.memory_model import VideoMemoryProfile, VideoProfileKey, get_profile_key, predict_profile
from router.placement.cluster_view import ClusterView
from tests.unit.coordinator.video.state.test_job_table import a_job
from tests.unit.coordinator.video.state.test_lease_placement import WAN, a_node
from wire.units import GIB
from wire.video import LeaseState, VideoPackage, VideoState

SMALL = VideoPackage("small", engine="1.0", bits=4, weights=3 * GIB, expert=2 * GIB)


def video(node: str = "a", **changes: Any) -> VideoState:
    return replace(a_node(node).video, **changes)


def test_models_are_sorted_with_their_prediction_on_each_node():
    view = ClusterView(
        (a_node("b"), a_node("a", video=video(packages=(WAN, SMALL)), video_allowed=False, state="draining"))
    )
    measured = VideoMemoryProfile(5, 2.4, 1, measured=3)
    small, wan = build_package_rows(view, {get_profile_key(SMALL): measured})
    assert (small["name"], wan["name"], small["kind"]) == ("small", "wan", "video")
    (row,) = small["nodes"]
    assert (row["id"], row["state"], row["weights"], row["engine"], row["bits"]) == ("a", "draining", 3 * GIB, "1.0", 4)
    assert row["profile"] == {"base": 5, "slope": 2, "margin": 1, "measured": 3, "calibrated": True}
    predicted = predict_profile(WAN)
    assert [one["id"] for one in wan["nodes"]] == ["b", "a"]
    assert wan["nodes"][0]["profile"]["base"] == predicted.base
    assert [one["ready"] for one in wan["nodes"]] == [True, False]


@pytest.mark.parametrize(
    ("changes", "ready", "cause"),
    [
        ({}, True, ""),
        (
            {"video": video(packages=(replace(WAN, cause="a file is missing"),), cause="no Ray")},
            True,
            "a file is missing",
        ),
        ({"video": video(ready=False, cause="no engine", ray_cause="no Ray")}, False, "no engine"),
        ({"video": video(ray="", ray_cause="no Ray")}, False, "no Ray"),
        ({"video_allowed": False, "video": video(ready=False, cause="no engine")}, False, "no engine"),
        ({"video_allowed": False}, False, "it is not allowed to make videos: `cluster node allow-video a` allows it"),
    ],
)
def test_a_model_is_ready_on_a_node_that_can_and_may_make_videos(changes: dict[str, Any], ready: bool, cause: str):
    ((node,),) = [row["nodes"] for row in build_package_rows(ClusterView((a_node("a", **changes),)), {})]
    assert (node["ready"], node["cause"]) == (ready, cause)


def test_stored_profiles_are_sorted_with_their_keys():
    keys = [VideoProfileKey("wan", "2.0", 8), VideoProfileKey("wan", "1.0", 8), VideoProfileKey("small", "9.0", 4)]
    rows = build_profile_rows({key: VideoMemoryProfile(number, 1.6) for number, key in enumerate(keys)})
    assert [
        (row["package"], row["engine"], row["bits"], row["base"], row["slope"], row["calibrated"]) for row in rows
    ] == [
        ("small", "9.0", 4, 2, 2, False),
        ("wan", "1.0", 8, 1, 2, False),
        ("wan", "2.0", 8, 0, 2, False),
    ]


HOLD = LeaseHold("l1", "a", 2, "video_1", 36 * GIB, 100.0)
REPORTED = LeaseState("l1", 2, phase="denoising", progress=40, footprint=20 * GIB, peak=30 * GIB)


@pytest.mark.parametrize(
    ("granted", "leases", "phase", "progress"),
    [
        (False, (), "asked", 0),
        (True, (), "granted", 0),
        (True, (replace(REPORTED, lease="l0"),), "granted", 0),
        (True, (replace(REPORTED, lease="l0"), REPORTED), "denoising", 40),
    ],
)
def test_a_lease_has_the_state_that_its_node_reports(
    granted: bool, leases: tuple[LeaseState, ...], phase: str, progress: int
):
    hold = dataclasses.replace(HOLD, granted=granted)
    row = build_lease_row(hold, JobTable(), ClusterView((a_node("a", video=video(leases=leases)),)))
    assert (row["phase"], row["progress"], row["granted"], row["size"], row["since"]) == (
        phase,
        progress,
        granted,
        36 * GIB,
        100.0,
    )
    assert (row["footprint"], row["peak"]) == ((20 * GIB, 30 * GIB) if progress else (0, 0))


@pytest.mark.parametrize(
    ("changes", "orphan"),
    [
        ({"lease": "l1", "generation": 2}, False),
        ({"lease": "l1", "generation": 3}, True),
        ({"lease": "l2", "generation": 2}, True),
        (None, True),
    ],
)
def test_a_lease_without_its_job_is_an_orphan(changes: dict[str, Any] | None, orphan: bool):
    jobs = {} if changes is None else {"video_1": replace(a_job(1), **changes)}
    row = build_lease_row(HOLD, JobTable(jobs=jobs), ClusterView())
    assert (row["orphan"], row["node"], row["name"], row["job"], row["generation"]) == (orphan, "a", "a", "video_1", 2)


def test_a_node_shows_its_packages_and_leases():
    row = build_video_row(video(leases=(REPORTED,), cause="x", ray_cause="y"), allowed=True)
    assert (row["ready"], row["allowed"], row["cause"], row["ray"], row["ray_cause"]) == (True, True, "x", "ray-a", "y")
    assert [package["name"] for package in row["packages"]] == ["wan"]
    assert [lease["progress"] for lease in row["leases"]] == [40]

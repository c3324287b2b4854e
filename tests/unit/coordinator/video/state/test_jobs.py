"""Rows of video jobs in the API."""

from typing import Any

import msgspec
import pytest

from coordinator.video.state.jobs import JobFault, JobState, RequestedClip, to_row
from tests.unit.coordinator.video.state.test_job_table import a_job


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        (
            {},
            {
                "status": "queued",
                "progress": 0,
                "completed_at": None,
                "expires_at": None,
                "node": None,
                "error": None,
                "peak": None,
                "made": None,
                "wall_seconds": None,
            },
        ),
        ({"state": JobState.LEASING, "node": "a"}, {"status": "queued", "node": "a"}),
        ({"state": JobState.IN_PROGRESS, "progress": 40}, {"status": "in_progress", "progress": 40}),
        ({"state": JobState.FINALIZING, "progress": 99}, {"status": "in_progress", "progress": 99}),
        (
            {"state": JobState.COMPLETED, "ended": 7.9, "expires": 99.9, "progress": 99, "peak": 5, "seconds": 1.23456},
            {
                "status": "completed",
                "progress": 100,
                "completed_at": 7,
                "expires_at": 99,
                "peak": 5,
                "wall_seconds": 1.235,
            },
        ),
        (
            {
                "state": JobState.FAILED,
                "ended": 7.9,
                "fault": JobFault("cancelled", "it was cancelled"),
                "progress": 40,
            },
            {
                "status": "failed",
                "progress": 40,
                "completed_at": None,
                "error": {"code": "cancelled", "message": "it was cancelled"},
            },
        ),
    ],
)
def test_a_job_is_a_row_in_the_words_of_openai(changes: dict[str, Any], row: dict[str, Any]):
    found = to_row(a_job(1, **changes))
    assert {name: found[name] for name in row} == row
    assert (found["id"], found["seconds"], found["size"], found["frames"]) == ("video_1", "3.062", "384x224", 49)


@pytest.mark.parametrize(
    ("more", "row"),
    [
        ({}, {}),
        ({"negative_prompt": "rain", "guidance": 0.0, "guidance_2": 2.5, "seed": 0}, None),
    ],
)
def test_a_worker_gets_the_clip_without_absent_values(more: dict[str, Any], row: dict[str, Any] | None):
    clip = RequestedClip("wan", "a fox", 384, 224, 49, 16, 20, 336, labels=("lab",), warnings=("late",), **more)
    fields = {"prompt": "a fox", "width": 384, "height": 224, "frames": 49, "fps": 16, "steps": 20}
    assert msgspec.json.decode(clip.encode_spec()) == fields | (more if row is None else row)

"""Counts of video jobs: every end once, under a reason of a closed set, for any name that a node uses."""

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.video.metrics import OTHER, VideoCounters, take_video_snapshot
from coordinator.video.state.jobs import JobFault, JobState, RequestedClip, StoredFile, VideoJob

JOB = VideoJob("video_1", 1, "key", 100.0, RequestedClip("m", "p", 64, 48, 16, 8, 4, 12), 36)


def ended(code: str = "", **changes: Any) -> VideoJob:
    fault = JobFault(code, "why") if code else None
    return replace(
        JOB, state=JobState.FAILED if code else JobState.COMPLETED, fault=fault, started=110.0, ended=150.0, **changes
    )


@pytest.mark.parametrize(
    ("job", "end", "reasons"),
    [
        pytest.param(ended(), "completed", {}, id="completed"),
        pytest.param(ended("cancelled"), "cancelled", {}, id="cancelled"),
        pytest.param(ended("worker_lost"), "failed", {"worker_lost": 1}, id="failed"),
        pytest.param(ended('x"} 1\n'), "failed", {OTHER: 1}, id="a word that a node made up"),
    ],
)
def test_an_end_is_counted_once(job: VideoJob, end: str, reasons: dict[str, int]):
    counters = VideoCounters()
    counters.count_transition(replace(JOB, state=JobState.IN_PROGRESS), job, 150.0)
    counters.count_transition(job, replace(job, expired=True), 500.0)
    assert {name: count for name, count in counters.ends.items() if count} == {end: 1}
    assert counters.failures == reasons
    assert counters.clip_seconds == (2.0 if end == "completed" else 0.0)
    assert counters.run_seconds.tally().total == (40.0 if end == "completed" else 0.0)


def test_the_wait_ends_with_the_lease():
    counters = VideoCounters()
    running = replace(JOB, state=JobState.IN_PROGRESS, started=112.5)
    counters.count_transition(replace(JOB, state=JobState.LEASING), running, 112.5)
    counters.count_transition(replace(JOB, state=JobState.LEASING), replace(JOB, state=JobState.QUEUED), 113.0)
    assert (sum(counters.queue_seconds.counts), counters.queue_seconds.total) == (1, 12.5)


def test_snapshot_counts_jobs_by_state():
    running = replace(JOB, id="b", state=JobState.IN_PROGRESS, node="n", progress=40)
    kept = ended(files=(StoredFile("clip.mp4", 1000, "00"),))
    seen = take_video_snapshot(VideoCounters(), [JOB, running, kept], 160.0, offered=True)
    assert seen.states == {"queued": 1, "leasing": 0, "in_progress": 1, "finalizing": 0}
    assert (seen.oldest_wait_seconds, seen.stored_bytes, seen.progress, seen.used) == (60.0, 1000, {"n": 0.4}, True)


def test_a_pool_without_videos_shows_none():
    assert not take_video_snapshot(VideoCounters(), [], 0.0, offered=False).used


def test_the_oldest_wait_is_that_of_the_queued_job_that_came_first():
    jobs = [replace(JOB, id=str(created), created=created) for created in (130.0, 100.0, 120.0)]
    leasing = replace(JOB, id="leasing", state=JobState.LEASING, created=10.0)
    seen = take_video_snapshot(VideoCounters(), [*jobs, leasing], 160.0, offered=True)
    assert (seen.oldest_wait_seconds, seen.states["queued"], seen.states["leasing"]) == (60.0, 3, 1)
    assert take_video_snapshot(VideoCounters(), [leasing], 160.0, offered=True).oldest_wait_seconds == 0.0


def test_a_lease_is_counted_by_its_confirmation_and_the_wait_by_the_begin():
    counters = VideoCounters()
    counters.count_grant(0.25)
    counters.count_grant(-1.0)
    assert (sum(counters.confirm_seconds.counts), counters.confirm_seconds.total) == (2, 0.25)
    assert sum(counters.queue_seconds.counts) == sum(counters.run_seconds.counts) == 0


def test_files_of_all_jobs_are_kept_bytes_and_a_finalizing_job_shows_its_progress():
    kept = [ended(files=(StoredFile("a.mp4", 1000, "00"), StoredFile("b.webp", 24, "00"))), ended("worker_lost")]
    finalizing = replace(JOB, id="f", state=JobState.FINALIZING, node="n2", progress=99)
    seen = take_video_snapshot(VideoCounters(), [*kept, finalizing], 160.0, offered=False)
    assert (seen.stored_bytes, seen.progress, seen.used, seen.states["finalizing"]) == (1024, {"n2": 0.99}, True, 1)


def test_a_transition_between_open_states_is_no_end_and_only_a_new_lease_ends_a_wait():
    counters = VideoCounters()
    states = (JobState.QUEUED, JobState.LEASING, JobState.IN_PROGRESS, JobState.IN_PROGRESS, JobState.FINALIZING)
    for old, new in pairwise(states):
        counters.count_transition(replace(JOB, state=old), replace(JOB, state=new), 112.0)
    assert (sum(counters.ends.values()), sum(counters.queue_seconds.counts)) == (0, 1)


def test_failures_are_added_up_and_a_clock_that_was_set_back_counts_as_no_time():
    counters, running = VideoCounters(), replace(JOB, state=JobState.IN_PROGRESS)
    for _ in range(2):
        counters.count_transition(running, ended("worker_lost"), 150.0)
    counters.count_transition(replace(JOB, state=JobState.LEASING), running, JOB.created - 50.0)
    counters.count_transition(running, replace(ended(), started=160.0), 150.0)
    assert (counters.failures, counters.ends["failed"]) == ({"worker_lost": 2}, 2)
    assert [(sum(seconds.counts), seconds.total) for seconds in (counters.queue_seconds, counters.run_seconds)] == [
        (1, 0.0),
        (1, 0.0),
    ]


@pytest.mark.parametrize("end", ["completed", "failed", "cancelled"])
def test_series_of_videos_begin_with_a_model_a_job_or_an_end(end: str):
    assert take_video_snapshot(VideoCounters(), [], 0.0, offered=True).used
    assert take_video_snapshot(VideoCounters(), [ended()], 0.0, offered=False).used
    counters = VideoCounters()
    counters.ends[end] = 1
    assert take_video_snapshot(counters, [], 0.0, offered=False).used


def test_a_job_that_waits_for_a_node_shows_no_progress():
    jobs = [replace(JOB, state=JobState.LEASING, node="n", progress=40), JOB]
    assert take_video_snapshot(VideoCounters(), jobs, 160.0, offered=True).progress == {}

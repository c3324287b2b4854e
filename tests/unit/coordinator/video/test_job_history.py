"""Counts of the transitions of jobs and leases."""

import dataclasses
import itertools

from msgspec.structs import replace
from structlog.testing import capture_logs

from coordinator.video.job_history import JobHistory
from coordinator.video.state.job_table import JobTable, LeaseHold
from coordinator.video.state.jobs import JobState
from tests.unit.coordinator.video.state.test_job_table import a_job


def test_transitions_and_grants_are_counted_once():
    history = JobHistory(lambda: 130.0)
    queued, asked = a_job(1, created=100.0), LeaseHold("l", "a", 1, "video_1", 36, 120.0)
    leasing = replace(queued, state=JobState.LEASING, node="a")
    running = replace(leasing, state=JobState.IN_PROGRESS)
    granted = dataclasses.replace(asked, granted=True)
    tables = [
        JobTable(),
        JobTable(jobs={queued.id: queued}),
        JobTable(jobs={queued.id: leasing}, holds={"l": asked}),
        JobTable(jobs={queued.id: running}, holds={"l": granted}),
        JobTable(jobs={queued.id: running}, holds={"l": granted}),
    ]
    for before, after in itertools.pairwise(tables):
        history.record(before, after)
    grants, waits = history.counters.confirm_seconds, history.counters.queue_seconds
    assert (sum(grants.counts), grants.total) == (1, 10.0)
    assert (sum(waits.counts), waits.total) == (1, 30.0)


def test_only_the_deletion_of_an_open_job_is_an_end():
    history, running = JobHistory(lambda: 130.0), a_job(1, state=JobState.IN_PROGRESS, node="a", generation=1)
    ended = replace(running, id="video_2", state=JobState.COMPLETED)
    with capture_logs() as logs:
        history.record(JobTable(jobs={job.id: job for job in (running, ended)}), JobTable())
    assert history.counters.ends == {"completed": 0, "failed": 0, "cancelled": 1}
    assert [(entry["job"], entry["state"], entry["node"]) for entry in logs] == [("video_1", "deleted", "a")]


def test_the_last_refused_job_is_deleted_without_an_end():
    history = JobHistory(lambda: 130.0)
    for number in (1, 2):
        history.mark_refused(a_job(number).id)
    for number, cancelled in ((2, 0), (1, 1)):
        history.record(JobTable(jobs={f"video_{number}": a_job(number)}), JobTable())
        assert history.counters.ends["cancelled"] == cancelled


def test_a_job_that_stays_open_has_no_end():
    history, jobs = JobHistory(lambda: 130.0), {job.id: job for job in (a_job(1), a_job(2))}
    with capture_logs() as logs:
        history.record(JobTable(jobs={"video_1": a_job(1)}), JobTable(jobs=jobs))
    assert (logs, history.counters.ends["cancelled"]) == ([], 0)


def test_a_lease_that_stays_granted_is_counted_once():
    history, granted = JobHistory(lambda: 130.0), LeaseHold("l", "a", 1, "video_1", 36, 120.0, granted=True)
    history.record(JobTable(holds={"l": granted}), JobTable(holds={"l": dataclasses.replace(granted, misses=1)}))
    assert sum(history.counters.confirm_seconds.counts) == 0

"""Counts of the transitions of jobs and leases."""

import dataclasses
import itertools

from msgspec.structs import replace

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
        JobTable(),
    ]
    for before, after in itertools.pairwise(tables):
        history.record(before, after)
    grants, waits = history.counters.confirm_seconds, history.counters.queue_seconds
    assert (sum(grants.counts), grants.total) == (1, 10.0)
    assert (sum(waits.counts), waits.total) == (1, 30.0)

"""Which files and records of jobs the retention deletes, and which it never deletes."""

from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.video.state.events import DeleteJob, ExpireFiles
from coordinator.video.state.job_table import JobRules, JobTable
from coordinator.video.state.jobs import JobState, RequestedClip, StoredFile, VideoJob
from coordinator.video.state.retention import apply_retention, expire_old_files
from coordinator.video.state.table_draft import TableDraft

FILES = (StoredFile("video.mp4", 100, "ab"),)


def a_job(number: int, state: JobState, **changes: Any) -> VideoJob:
    wanted = RequestedClip("wan", "a fox", 384, 224, 49, 16, 20, 336)
    job = VideoJob(id=f"j{number}", sequence=number, key="k", created=0.0, wanted=wanted, size=36, state=state)
    return replace(job, **changes)


def begin(now: float, *jobs: VideoJob, **rules: Any) -> TableDraft:
    return TableDraft(JobTable(JobRules(**rules), {job.id: job for job in jobs}), now, now)


def test_records_of_open_jobs_and_of_jobs_with_files_are_never_deleted():
    jobs = (
        a_job(1, JobState.QUEUED),
        a_job(2, JobState.COMPLETED, files=FILES, ended=1.0),
        a_job(3, JobState.FAILED),
        a_job(4, JobState.COMPLETED, expired=True),
        a_job(5, JobState.FAILED),
    )
    turn = begin(10.0, *jobs, records=1)
    apply_retention(turn)
    assert list(turn.jobs) == ["j1", "j2", "j5"]
    assert turn.actions == [DeleteJob("j3"), DeleteJob("j4")]


@pytest.mark.parametrize(
    ("changes", "now", "is_overdue"),
    [
        ({"files": FILES, "expires": 10.0}, 9.9, False),
        ({"files": FILES, "expires": 10.0}, 10.0, True),
        ({"files": FILES, "expires": None}, 0.5, True),
        ({"files": (), "expires": 10.0}, 10.0, False),
    ],
)
def test_files_are_too_old_from_their_expiry_on(changes: dict[str, Any], now: float, is_overdue: bool):
    turn = begin(now, a_job(1, JobState.COMPLETED, **changes))
    expire_old_files(turn)
    assert (list(turn.overdue), turn.actions) == (["j1"] if is_overdue else [], [])


def test_expired_files_leave_their_job_and_the_disk():
    job = a_job(1, JobState.COMPLETED, files=FILES, expires=10.0)
    turn = begin(20.0, job, keep_seconds=0.0)
    expire_old_files(turn)
    assert turn.jobs["j1"] == replace(job, expired=True, files=())
    assert turn.actions[-1] == ExpireFiles("j1")

"""Retention of finished videos: deletes files by age, number and total size, and the oldest records of jobs."""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from coordinator.video.state.events import DeleteJob, ExpireFiles
from coordinator.video.state.job_table import JobRules
from coordinator.video.state.jobs import VideoJob
from coordinator.video.state.table_draft import TableDraft

CONFIRMING_SECONDS = 3600.0
"""Seconds for which every tick must find files too old before they expire, at most `JobRules.keep_seconds`.

A clock that is ahead for a short time therefore deletes nothing.
"""


def expire_old_files(turn: TableDraft) -> None:
    """Expire the files of jobs that every tick has found too old for `CONFIRMING_SECONDS`.

    If `JobRules.keep_seconds` is less, that time is sufficient.
    """
    old = [job for job in turn.jobs.values() if job.files and (job.expires or 0.0) <= turn.now]
    turn.set_overdue([job.id for job in old])
    wait = min(CONFIRMING_SECONDS, turn.rules.keep_seconds)
    _expire(turn, [job for job in old if turn.steady - turn.overdue[job.id] >= wait])


def apply_retention(turn: TableDraft) -> None:
    """Expire the files of the oldest jobs until the rest is within `JobRules.keep_count` and `JobRules.keep_bytes`.

    Then delete the oldest records of ended jobs without files, until at most `JobRules.records` of them remain.
    """
    _expire(turn, list(_find_excess(turn.jobs.values(), turn.rules)))
    ended = sorted((job for job in turn.jobs.values() if not job.open and not job.files), key=lambda job: job.sequence)
    for job in ended[: max(0, len(ended) - turn.rules.records)]:
        del turn.jobs[job.id]
        turn.actions.append(DeleteJob(job.id))


def _expire(turn: TableDraft, jobs: Iterable[VideoJob]) -> None:
    for job in jobs:
        turn.put_job(replace(job, expired=True, files=()))
        turn.actions.append(ExpireFiles(job.id))


def _find_excess(jobs: Iterable[VideoJob], rules: JobRules) -> Iterator[VideoJob]:
    """Yield the jobs whose files exceed the rules when the newest files are kept first."""
    newest_first = sorted((job for job in jobs if job.files), key=lambda job: (-(job.ended or 0.0), -job.sequence))
    size = 0
    for number, job in enumerate(newest_first, 1):
        size += job.bytes
        if number > rules.keep_count or size > rules.keep_bytes:
            yield job

"""Retention of finished videos: deletes files by age, number and total size, and the oldest records of jobs."""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from coordinator.video.state.events import DeleteJob, ExpireFiles
from coordinator.video.state.job_table import JobRules
from coordinator.video.state.jobs import VideoJob
from coordinator.video.state.transition import Transition


def apply_retention(turn: Transition) -> None:
    """Expire the files of jobs beyond `JobRules` in age, number of jobs or total size. The newest files are kept.

    Then delete the oldest records of ended jobs without files, until at most `JobRules.records` of them remain.
    """
    for job in list(_find_excess(turn.jobs.values(), turn.rules, turn.now)):
        turn.put_job(replace(job, expired=True, files=()))
        turn.actions.append(ExpireFiles(job.id))
    ended = sorted((job for job in turn.jobs.values() if not job.open and not job.files), key=lambda job: job.sequence)
    for job in ended[: max(0, len(ended) - turn.rules.records)]:
        del turn.jobs[job.id]
        turn.actions.append(DeleteJob(job.id))


def _find_excess(jobs: Iterable[VideoJob], rules: JobRules, now: float) -> Iterator[VideoJob]:
    """Yield the jobs whose files have expired at `now`, or exceed the rules when the newest files are kept first."""
    newest_first = sorted((job for job in jobs if job.files), key=lambda job: (-(job.ended or 0.0), -job.sequence))
    size = 0
    for number, job in enumerate(newest_first, 1):
        size += job.bytes
        if number > rules.keep_count or size > rules.keep_bytes or (job.expires or 0.0) <= now:
            yield job

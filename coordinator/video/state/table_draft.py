"""Working copy of the job table for one transition, with the actions to perform. Pure.

The methods of `TableDraft` are steps that several events share: fail a job, requeue a job, release a hold.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from coordinator.video.state.events import Action, ExpireFiles, ReleaseLease, SaveJob
from coordinator.video.state.job_table import JobTable
from coordinator.video.state.jobs import JobFault, JobState, VideoJob, change_state
from wire.video import ReleaseCause

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 60.0
"""Bounds of a node's pause in seconds, during which the node is not asked for a lease.

A pause starts when the node refuses, does not answer in time, or starts no worker. A refusal without a time counts as
the maximum.
"""


class TableDraft:
    """Working copy of the job table for one call of `job_transitions.advance`, with the actions to perform.

    `table` is the table before the call and is not changed. `now` is in Unix seconds, for points in time that are
    stored or shown. `steady` is in monotonic seconds, for waits, because a change of the system's clock must not end a
    wait.
    """

    def __init__(self, table: JobTable, now: float, steady: float) -> None:
        self.rules, self.now, self.steady = table.rules, now, steady
        self.jobs, self.holds, self.pauses = dict(table.jobs), dict(table.holds), dict(table.pauses)
        self.overdue = table.overdue
        self.actions: list[Action] = []

    def build_table(self) -> JobTable:
        """Return the working copy as a table."""
        return JobTable(self.rules, self.jobs, self.holds, self.pauses, self.overdue)

    def set_overdue(self, jobs: Sequence[str]) -> None:
        """Set the ids of the jobs whose files are too old. A job that was already set keeps its earlier time."""
        self.overdue = {job: self.overdue.get(job, self.steady) for job in jobs}

    def put_job(self, job: VideoJob, *, save: bool = True) -> VideoJob:
        """Add or replace a job in the table, and return it. With `save`, add the action to store it."""
        self.jobs[job.id] = job
        if save:
            self.actions.append(SaveJob(job))
        return job

    def find_job(self, node: str, lease: str, generation: int) -> VideoJob | None:
        """Return the job whose current lease has this node, id and generation; None if there is none.

        Return None also if the lease has no hold, for example for a job whose files are being fetched.
        """
        hold = self.holds.get(lease)
        job = None if hold is None or hold.node != node else self.jobs.get(hold.job)
        if job is None or job.lease != lease or job.generation != generation:
            return None
        return job

    def release_hold(self, lease: str, cause: ReleaseCause) -> None:
        """Request from its node that a lease is released. The hold remains until the node confirms.

        An unknown lease is ignored.
        """
        hold = self.holds.get(lease)
        if hold is not None:
            self.actions.append(ReleaseLease(hold.node, lease, hold.generation, cause))

    def fail_job(self, job: VideoJob, code: str, message: str) -> None:
        """Fail an open job with this code and message. Raise `IllegalTransitionError` if the job has ended.

        The generation of the job increases, so that a lease that its node still holds belongs to no job. Files that
        were being fetched are removed.
        """
        self.put_job(
            change_state(
                job,
                JobState.FAILED,
                generation=job.generation + 1,
                fault=JobFault(code, message),
                phase="failed",
                ended=self.now,
            )
        )
        if job.state == JobState.FINALIZING:
            self.actions.append(ExpireFiles(job.id))

    def requeue_job(self, job: VideoJob, phase: str) -> None:
        """Put a leasing or running job back at its position in the queue, with `phase` as the reason.

        The generation of the job increases, so that later messages about the old lease are ignored. Raise
        `IllegalTransitionError` in any other state.
        """
        self.put_job(
            change_state(
                job,
                JobState.QUEUED,
                generation=job.generation + 1,
                lease="",
                node="",
                progress=0,
                step=0,
                phase=phase,
                started=None,
            )
        )

    def compute_headroom_deadline(self, job: VideoJob) -> float:
        """Return the monotonic time in seconds at which a job fails if no node grants its lease.

        That is the deadline of the job (`room_by`), or `headroom_seconds` from now if the job has none yet.
        """
        return self.steady + self.rules.headroom_seconds if job.room_by is None else job.room_by

    def has_headroom_deadline_passed(self, job: VideoJob) -> bool:
        """Return whether the deadline of a job for the grant of a lease (`room_by`) has passed.

        Return False for a job without this deadline.
        """
        return job.room_by is not None and job.room_by <= self.steady

    def handle_loss(self, job: VideoJob, code: str, message: str) -> None:
        """Requeue or fail a job whose node or worker was lost, as `on_node_loss` and the limit of attempts require.

        `code` and `message` are the reason. Raise `IllegalTransitionError` if a job to requeue is neither leasing nor
        running, or if a job to fail has ended.
        """
        if self.rules.on_node_loss == "requeue" and job.attempts < self.rules.attempts:
            self.requeue_job(replace(job, attempts=job.attempts + 1), f"again, because {message}")
        else:
            self.fail_job(job, code, message)

    def retry_start(self, job: VideoJob, code: str, message: str) -> None:
        """Requeue a job whose worker never started, or fail it at the limit of attempts. Pause its node for 5 s.

        `code` and `message` are the reason. Raise `IllegalTransitionError` if a job to requeue is neither leasing nor
        running, or if a job to fail has ended.
        """
        self.pause_node(job.node, MIN_PAUSE_SECONDS * 5)
        if job.attempts < self.rules.attempts:
            self.requeue_job(replace(job, attempts=job.attempts + 1), f"again, because {message}")
        else:
            self.fail_job(job, code, message)

    def pause_node(self, node: str, seconds: float) -> None:
        """Stop asking a node for leases for `seconds`, at least `MIN_PAUSE_SECONDS` and at most `MAX_PAUSE_SECONDS`."""
        self.pauses[node] = self.steady + max(MIN_PAUSE_SECONDS, min(MAX_PAUSE_SECONDS, seconds))

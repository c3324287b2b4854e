"""One transition of the job table in progress: the new table and the actions. Pure.

It has the steps shared by several events: a job fails, is lost, or returns to the queue.
"""

from msgspec.structs import replace

from coordinator.video.state.events import Action, GiveBackLease, SaveJob
from coordinator.video.state.job_table import JobTable
from coordinator.video.state.jobs import JobFault, JobState, VideoJob, with_state

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 60.0
NOT_STARTED = "start_failed"
"""Code of a job whose worker never started, on both sides of the link."""


class Transition:
    """One call of `advance`."""

    def __init__(self, board: JobTable, now: float) -> None:
        self.rules, self.now = board.rules, now
        self.jobs, self.holds, self.pauses = dict(board.jobs), dict(board.holds), dict(board.pauses)
        self.actions: list[Action] = []

    def board(self) -> JobTable:
        """Return the current table."""
        return JobTable(self.rules, self.jobs, self.holds, self.pauses)

    def put(self, job: VideoJob, *, save: bool = True) -> VideoJob:
        """Set a job, and write it down unless it is mere progress."""
        self.jobs[job.id] = job
        if save:
            self.actions.append(SaveJob(job))
        return job

    def job_of(self, lease: str, generation: int) -> VideoJob | None:
        """Return the job whose newest lease this is."""
        hold = self.holds.get(lease)
        job = None if hold is None else self.jobs.get(hold.job)
        if job is None or job.lease != lease or job.generation != generation:
            return None
        return job

    def release_hold(self, lease: str, cause: str) -> None:
        """Request the release of a hold from its node. The hold remains until the node confirms."""
        hold = self.holds.get(lease)
        if hold is not None:
            self.actions.append(GiveBackLease(hold.node, lease, hold.generation, cause))

    def fail(self, job: VideoJob, code: str, message: str) -> None:
        """End a job."""
        self.put(with_state(job, JobState.FAILED, fault=JobFault(code, message), phase="failed", ended=self.now))

    def requeue(self, job: VideoJob, phase: str) -> None:
        """Return a job to its position in the queue. Its generation grows, and later messages about the old lease are
        ignored."""
        self.put(
            with_state(
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

    def no_headroom_deadline(self, job: VideoJob) -> float:
        """Return when this job fails for lack of room: `headroom_seconds` after it first found none."""
        return self.now + self.rules.headroom_seconds if job.room_by is None else job.room_by

    def no_headroom_timed_out(self, job: VideoJob) -> bool:
        """Return whether this job's time to find room is over."""
        return job.room_by is not None and job.room_by <= self.now

    def handle_loss(self, job: VideoJob, code: str, message: str) -> None:
        """A job that ran ended through no fault of its own: as the settings say."""
        if self.rules.on_node_loss == "requeue" and job.attempts < self.rules.attempts:
            self.requeue(replace(job, attempts=job.attempts + 1), f"again, because {message}")
        else:
            self.fail(job, code, message)

    def retry_start(self, job: VideoJob, code: str, message: str) -> None:
        """Retry a job whose worker never started, up to the limit of attempts."""
        self.pause(job.node, MIN_PAUSE_SECONDS * 5)
        if job.attempts < self.rules.attempts:
            self.requeue(replace(job, attempts=job.attempts + 1), f"again, because {message}")
        else:
            self.fail(job, code, message)

    def pause(self, node: str, seconds: float) -> None:
        """Do not ask a node for memory for `seconds`."""
        self.pauses[node] = self.now + max(MIN_PAUSE_SECONDS, min(MAX_PAUSE_SECONDS, seconds))

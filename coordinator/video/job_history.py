"""Counts and log entries of the transitions of jobs and leases."""

from collections.abc import Callable

import structlog

from coordinator.video.metrics import VideoCounters
from coordinator.video.state.job_table import JobTable

log = structlog.get_logger("coordinator.video")


class JobHistory:
    """Counters of video jobs for metrics, and log entries about the jobs. `wall` returns Unix seconds."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self.counters = VideoCounters()
        self._refused = ""
        """Id of the last job whose request was refused; empty before the first."""

    def mark_refused(self, job: str) -> None:
        """Exclude a job (id), whose request was refused, from the counts of ended jobs.

        The caller must delete the job next, because only the last refused job is known.
        """
        self._refused = job

    def record(self, before: JobTable, after: JobTable) -> None:
        """Count and log the transitions between two job tables.

        An open job that is missing in `after` was deleted. It counts as a cancelled job, unless its request was refused
        (`mark_refused`).
        """
        if before.jobs != after.jobs:
            self._record_transitions(before, after)
        if before.holds != after.holds:
            self._count_grants(before, after)

    def _record_transitions(self, before: JobTable, after: JobTable) -> None:
        for job in before.jobs.values():
            if job.open and job.id not in after.jobs:
                if job.id != self._refused:
                    self.counters.count_deletion()
                log.info("video", job=job.id, state="deleted", node=job.node, generation=job.generation)
        for job in after.jobs.values():
            old = before.jobs.get(job.id)
            if old is not None and old.state != job.state:
                self.counters.count_transition(old, job, self._wall())
                fault = {} if job.fault is None else {"code": job.fault.code, "message": job.fault.message}
                log.info("video", job=job.id, state=str(job.state), node=job.node, generation=job.generation, **fault)

    def _count_grants(self, before: JobTable, after: JobTable) -> None:
        for hold in after.holds.values():
            old = before.holds.get(hold.lease)
            if hold.granted and old is not None and not old.granted:
                self.counters.count_grant(self._wall() - hold.since)

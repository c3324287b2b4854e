"""Table of all video jobs and their memory. Pure; `coordinator.video.state.job_transitions` advances it.

The first queued job gets a lease on one node. From then on three parties act on the job. The node leases the memory and
watches the worker, Ray starts the worker, and a client may cancel. Messages cross, nodes disconnect and return, and
this process may restart. Two concepts handle this:

- The generation. Every lease of a job has the next number, and the job's number also increases when the job is
  requeued or fails. A message about an older generation does not change the job. A node that still holds a lease
  of an older generation must release it.
- The hold. Memory requested from a node counts as leased until the node ends or refuses the lease, no longer lists
  it, or is gone. If the job ends earlier, its hold remains, and no job is sent to that node.

Invariants
- Only the first queued job is placed, and only while no other job waits for a node's answer (FIFO).
- A node has at most one hold.
- An ended job has no further transitions.
- A lease that a node holds and this table does not know is released at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from coordinator.video.state.jobs import JobState, VideoJob


@dataclass(frozen=True, slots=True)
class JobRules:
    """Settings of the job table, from `VideoSettings.rules`. Fields named `*_seconds` are in seconds."""

    on_node_loss: Literal["fail", "requeue"] = "fail"
    """Whether a job fails or is restarted after its node or worker was lost."""
    attempts: int = 2
    """Maximum restarts of a job after a lost node, a lost worker, or a worker that did not start."""
    lease_seconds: float = 30.0
    """Maximum seconds until a node answers a lease request. After that, the job is queued again."""
    start_seconds: float = 90.0
    """Maximum seconds from the grant of a lease to the start of the worker.

    After that, the job is restarted, at most `attempts` times.
    """
    away_seconds: float = 60.0
    """Maximum seconds for which the node of a running job may be absent. After that, `on_node_loss` applies."""
    headroom_seconds: float = 3600.0
    """Maximum seconds for which the first queued job waits for memory. After that, it fails.

    The limit does not apply while the job waits only for running video jobs.
    """
    keep_seconds: float = 86400.0
    """Seconds after the end of a job until its files are too old (`retention.expire_old_files`).

    Also the maximum seconds from the end of the worker until the files are fetched.
    """
    keep_count: int = 50
    """Maximum number of jobs with files."""
    keep_bytes: int = 50 * 2**30
    """Maximum size of all files together, in bytes."""
    records: int = 1000
    """Maximum number of stored jobs that have ended and have no files."""


@dataclass(frozen=True, slots=True)
class LeaseHold:
    """Memory that was requested from a node and is not confirmed as released. `lease`, `node` and `job` are ids."""

    lease: str
    node: str
    generation: int
    job: str
    size: int
    """Size of the lease in bytes."""
    since: float
    """Unix time in seconds of the request; after a restart of the coordinator, that of the grant."""
    granted: bool = False
    """Whether the node has granted the lease."""
    misses: int = 0
    """Number of consecutive reports of the node without this lease.

    At `lease_transitions.MAX_MISSED_REPORTS`, the lease counts as lost.
    """


@dataclass(frozen=True, slots=True)
class JobTable:
    """Table of all jobs by id, and of all holds by lease.

    `pauses` has, by node, the monotonic time until which the node is not asked for a lease. `overdue` has, by job, the
    monotonic time since which every tick has found its files too old.
    """

    rules: JobRules = field(default_factory=JobRules)
    jobs: Mapping[str, VideoJob] = field(default_factory=dict[str, VideoJob])
    holds: Mapping[str, LeaseHold] = field(default_factory=dict[str, LeaseHold])
    pauses: Mapping[str, float] = field(default_factory=dict[str, float])
    overdue: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def waiting(self) -> list[VideoJob]:
        """Queued jobs in the order of their submission."""
        return sorted((job for job in self.jobs.values() if job.state == JobState.QUEUED), key=lambda job: job.sequence)

    @property
    def head(self) -> VideoJob | None:
        """Job that may be placed now; None if the queue is empty or a lease request is unanswered."""
        if any(job.state == JobState.LEASING for job in self.jobs.values()):
            return None
        return next(iter(self.waiting), None)

    def find_hold(self, node: str) -> LeaseHold | None:
        """Return the lease hold of a node; None if the node has none."""
        return next((hold for hold in self.holds.values() if hold.node == node), None)

"""Counters of video jobs, and their state in a metrics snapshot. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from coordinator.video.state.jobs import JobFaultCode, JobState, VideoJob
from wire.histogram import Histogram
from wire.identity import NodeId
from wire.video import LeaseEndCode

WAIT_BOUNDS = (1, 10, 60, 300, 900, 3600)
"""Upper bounds of the buckets of `VideoCounters.queue_seconds`, in seconds."""
TIME_BOUNDS = (60, 120, 300, 600, 1200, 1800, 3600)
"""Upper bounds of the buckets of `VideoCounters.run_seconds`, in seconds."""
CONFIRM_BOUNDS = (0.05, 0.1, 0.2, 0.5, 1, 5, 30)
"""Upper bounds of the buckets of `VideoCounters.confirm_seconds`, in seconds."""
COMPLETED, FAILED, CANCELLED, OTHER = "completed", "failed", "cancelled", "other"
ENDS = (COMPLETED, FAILED, CANCELLED)
"""Values of the metrics label for ended jobs."""
REASONS = (
    frozenset[str](LeaseEndCode) - {LeaseEndCode.COMPLETED}
    | frozenset[str](JobFaultCode) - {JobFaultCode.CANCELLED}
    | {OTHER}
)
"""Reasons of failed jobs, as values of a metrics label. Any other reason of a node counts as `OTHER`."""


@dataclass(slots=True)
class VideoCounters:
    """Counters of video jobs since the start of the coordinator."""

    ends: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    """Number of ended jobs by their end, one of `ENDS`. A job that was deleted while open counts as cancelled."""
    failures: dict[str, int] = field(default_factory=dict[str, int])
    """Number of failed jobs by reason, one of `REASONS`."""
    clip_seconds: float = 0.0
    """Total playing time of all completed clips, in seconds."""
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))
    """Seconds from the submission of a job to the grant of a lease, observed again after each restart of the job."""
    run_seconds: Histogram = field(default_factory=lambda: Histogram(TIME_BOUNDS))
    """Seconds from the grant of the lease to the end of the job, for completed jobs."""
    confirm_seconds: Histogram = field(default_factory=lambda: Histogram(CONFIRM_BOUNDS))
    """Seconds from the request of a lease to its grant."""

    def count_transition(self, old: VideoJob, job: VideoJob, now: float) -> None:
        """Count the transition of a job from its state in `old` to its state in `job`. `now` is in Unix seconds."""
        if old.state == JobState.LEASING and job.state == JobState.IN_PROGRESS:
            self.queue_seconds.observe(max(0.0, now - job.created))
        if not job.open and old.open:
            self._count_end(job)

    def count_deletion(self) -> None:
        """Count the deletion of an open job, as a cancelled job."""
        self.ends[CANCELLED] += 1

    def count_grant(self, seconds: float) -> None:
        """Count a lease that its node granted `seconds` after the request."""
        self.confirm_seconds.observe(max(0.0, seconds))

    def _count_end(self, job: VideoJob) -> None:
        if job.fault is None:
            self.ends[COMPLETED] += 1
            self.clip_seconds += job.wanted.frames / job.wanted.fps
            self.run_seconds.observe(max(0.0, (job.ended or job.created) - (job.started or job.created)))
        elif job.fault.code == JobFaultCode.CANCELLED:
            self.ends[CANCELLED] += 1
        else:
            self.ends[FAILED] += 1
            reason = job.fault.code if job.fault.code in REASONS else OTHER
            self.failures[reason] = self.failures.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class VideoSnapshot:
    """Video jobs at one moment, for metrics."""

    counters: VideoCounters = field(default_factory=VideoCounters)
    states: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of open jobs by state."""
    oldest_wait_seconds: float = 0.0
    """Longest wait of a queued job since its submission, in seconds; 0 if no job is queued."""
    stored_bytes: int = 0
    """Size of all stored files, in bytes."""
    progress: Mapping[NodeId, float] = field(default_factory=dict[NodeId, float])
    """Completed share (0 to 1) of the running job, by node."""
    used: bool = False
    """Whether a node offers video models, or any job exists or has ended."""


def take_video_snapshot(
    counters: VideoCounters, jobs: Iterable[VideoJob], now: float, *, offered: bool
) -> VideoSnapshot:
    """Return the metrics of `jobs` at `now` (Unix seconds), with these counters.

    `offered` is whether a node has a video model.
    """
    states = {str(state): 0 for state in JobState if state not in (JobState.COMPLETED, JobState.FAILED)}
    oldest, stored_bytes, used = 0.0, 0, offered or any(counters.ends.values())
    progress: dict[NodeId, float] = {}
    for job in jobs:
        used = True
        stored_bytes += job.bytes
        if not job.open:
            continue
        states[str(job.state)] += 1
        if job.state == JobState.QUEUED:
            oldest = max(oldest, now - job.created)
        elif job.state in (JobState.IN_PROGRESS, JobState.FINALIZING):
            progress[NodeId(job.node)] = job.progress / 100
    return VideoSnapshot(counters, states, oldest, stored_bytes, progress, used)

"""Events and actions of the video job table. Pure."""

from dataclasses import dataclass

from coordinator.video.state.jobs import JobFault, StoredFile, VideoJob
from wire.frames import LeaseEnded, LeaseGranted, LeaseRefused
from wire.video import Artifact, LeaseState

ACKNOWLEDGED = "acknowledged"
"""Cause for the return of a lease whose end was received."""

# -- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A client submitted a job."""

    job: VideoJob


@dataclass(frozen=True, slots=True)
class JobPlaced:
    """The first queued job shall ask this node for memory."""

    job: str
    node: str
    lease: str


@dataclass(frozen=True, slots=True)
class JobWaits:
    """The first queued job cannot be placed. `busy`: only because of running jobs, which is no reason to fail it."""

    job: str
    phase: str
    busy: bool


@dataclass(frozen=True, slots=True)
class LeaseAnswered:
    """A node answered about a lease."""

    node: str
    frame: LeaseGranted | LeaseRefused | LeaseEnded


@dataclass(frozen=True, slots=True)
class LeasesReported:
    """A node reported its leases."""

    node: str
    leases: tuple[LeaseState, ...]


@dataclass(frozen=True, slots=True)
class NodeAway:
    """A node's link ended."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeRemoved:
    """A node is no member any more."""

    node: str


@dataclass(frozen=True, slots=True)
class FilesFetched:
    """The files of a job are here, whole."""

    job: str
    generation: int
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, slots=True)
class FilesLost:
    """The files of a job will never be here."""

    job: str
    generation: int
    fault: JobFault


@dataclass(frozen=True, slots=True)
class JobCancelled:
    """A client cancelled a job."""

    job: str
    message: str = "it was cancelled"


@dataclass(frozen=True, slots=True)
class JobDeleted:
    """A client deleted a job and its data."""

    job: str


@dataclass(frozen=True, slots=True)
class CoordinatorRestarted:
    """This process began; the jobs are those of the one before."""


@dataclass(frozen=True, slots=True)
class JobTick:
    """Time has passed."""


Event = (
    JobSubmitted
    | JobPlaced
    | JobWaits
    | LeaseAnswered
    | LeasesReported
    | NodeAway
    | NodeRemoved
    | FilesFetched
    | FilesLost
    | JobCancelled
    | JobDeleted
    | CoordinatorRestarted
    | JobTick
)


# -- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskForLease:
    """Ask the job's node for its lease."""

    job: VideoJob


@dataclass(frozen=True, slots=True)
class GiveBackLease:
    """Order a node to release a lease, or acknowledge its end (`ACKNOWLEDGED`)."""

    node: str
    lease: str
    generation: int
    cause: str


@dataclass(frozen=True, slots=True)
class FetchFiles:
    """Get the files of the job from its node."""

    job: VideoJob
    artifacts: tuple[Artifact, ...]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Write a job down."""

    job: VideoJob


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """Forget a job, with its files."""

    job: str


@dataclass(frozen=True, slots=True)
class ExpireFiles:
    """Remove the files of a job."""

    job: str


@dataclass(frozen=True, slots=True)
class PeakMeasured:
    """A worker's peak was read (bytes)."""

    job: VideoJob
    peak: int


Action = AskForLease | GiveBackLease | FetchFiles | SaveJob | ForgetJob | ExpireFiles | PeakMeasured
Actions = tuple[Action, ...]

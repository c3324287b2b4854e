"""Events of the video job table (input of `job_transitions.advance`) and actions for the controller (its output). Pure.

The fields `job`, `node` and `lease` are ids, unless their type is a class.
"""

from dataclasses import dataclass

from coordinator.video.state.jobs import JobFault, StoredFile, VideoJob
from wire.frames import LeaseEnded, LeaseGranted, LeaseRefused
from wire.video import Artifact, LeaseState, ReleaseCause

# -- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """Event: a client submitted a job. The controller stores the job before it applies this event."""

    job: VideoJob


@dataclass(frozen=True, slots=True)
class JobPlaced:
    """Event: the first queued job was placed on `node`, which is to be asked for a lease with the new id `lease`."""

    job: str
    node: str
    lease: str


@dataclass(frozen=True, slots=True)
class JobWaited:
    """Event: the first queued job cannot be placed, for the reason in `phase`.

    `busy` is whether the best node only has to finish another video job. In that case, the deadline of the job does not
    apply.
    """

    job: str
    phase: str
    busy: bool


@dataclass(frozen=True, slots=True)
class LeaseAnswered:
    """Event: a node granted, refused or ended a lease."""

    node: str
    frame: LeaseGranted | LeaseRefused | LeaseEnded


@dataclass(frozen=True, slots=True)
class LeasesReported:
    """Event: a node reported its leases."""

    node: str
    leases: tuple[LeaseState, ...]


@dataclass(frozen=True, slots=True)
class NodeAway:
    """Event: the link of a node ended."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeRemoved:
    """Event: a node has left the pool."""

    node: str


@dataclass(frozen=True, slots=True)
class FilesFetched:
    """Event: all files of a job have been fetched and verified."""

    job: str
    generation: int
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, slots=True)
class FilesLost:
    """Event: the files of a job cannot be fetched or stored, because of `fault`."""

    job: str
    generation: int
    fault: JobFault


@dataclass(frozen=True, slots=True)
class JobCancelled:
    """Event: a client cancelled a job."""

    job: str
    message: str = "it was cancelled"


@dataclass(frozen=True, slots=True)
class JobDeleted:
    """Event: a client deleted a job and its data."""

    job: str


@dataclass(frozen=True, slots=True)
class CoordinatorRestarted:
    """Event: the coordinator has restarted with the jobs of its previous process."""


@dataclass(frozen=True, slots=True)
class JobTick:
    """Event: a timer of the controller has fired, and deadlines must be checked."""


Event = (
    JobSubmitted
    | JobPlaced
    | JobWaited
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
class RequestLease:
    """Action: ask the node of a job for the lease of the job."""

    job: VideoJob


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Action: order a node to release a lease, or acknowledge its end (`ReleaseCause.ACKNOWLEDGED`).

    An acknowledgement comes after the actions that store the result of the lease, because it waits for them.
    """

    node: str
    lease: str
    generation: int
    cause: ReleaseCause


@dataclass(frozen=True, slots=True)
class FetchFiles:
    """Action: fetch the files of a job from its node."""

    job: VideoJob
    artifacts: tuple[Artifact, ...]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Action: store a job in the database."""

    job: VideoJob


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Action: delete a job from the database, with its files."""

    job: str


@dataclass(frozen=True, slots=True)
class ExpireFiles:
    """Action: delete the files of a job, and keep its record."""

    job: str


@dataclass(frozen=True, slots=True)
class RecordPeak:
    """Action: add the peak footprint of a finished job, in bytes, to the memory profile of its package."""

    job: VideoJob
    peak: int


Action = RequestLease | ReleaseLease | FetchFiles | SaveJob | DeleteJob | ExpireFiles | RecordPeak
Actions = tuple[Action, ...]

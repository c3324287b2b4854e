"""Events and actions of the video job table. Pure."""

from dataclasses import dataclass

from coordinator.video.state.jobs import Fault, Job, Kept
from wire.frames import LeaseEnded, LeaseGranted, LeaseRefused
from wire.video import Artifact, LeaseState

ACKNOWLEDGED = "acknowledged"
"""Cause for the return of a lease whose end was received."""

# -- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """A client submitted a job."""

    job: Job


@dataclass(frozen=True, slots=True)
class Placed:
    """The first queued job shall ask this node for memory."""

    job: str
    node: str
    lease: str


@dataclass(frozen=True, slots=True)
class Waits:
    """The first queued job cannot be placed. `busy`: only because of running jobs, which is no reason to fail it."""

    job: str
    phase: str
    busy: bool


@dataclass(frozen=True, slots=True)
class Said:
    """A node answered about a lease."""

    node: str
    frame: LeaseGranted | LeaseRefused | LeaseEnded


@dataclass(frozen=True, slots=True)
class Reported:
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
class Fetched:
    """The files of a job are here, whole."""

    job: str
    generation: int
    files: tuple[Kept, ...]


@dataclass(frozen=True, slots=True)
class NotFetched:
    """The files of a job will never be here."""

    job: str
    generation: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A client cancelled a job."""

    job: str
    message: str = "it was cancelled"


@dataclass(frozen=True, slots=True)
class Deleted:
    """A client deleted a job and its data."""

    job: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """This process began; the jobs are those of the one before."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Submitted
    | Placed
    | Waits
    | Said
    | Reported
    | NodeAway
    | NodeRemoved
    | Fetched
    | NotFetched
    | Cancelled
    | Deleted
    | Restarted
    | Tick
)


# -- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the job's node for its lease."""

    job: Job


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Order a node to release a lease, or acknowledge its end (`ACKNOWLEDGED`)."""

    node: str
    lease: str
    generation: int
    cause: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the files of the job from its node."""

    job: Job
    artifacts: tuple[Artifact, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Write a job down."""

    job: Job


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a job, with its files."""

    job: str


@dataclass(frozen=True, slots=True)
class Expire:
    """Remove the files of a job."""

    job: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A worker's peak was read (bytes)."""

    job: Job
    peak: int


Action = Ask | GiveBack | Fetch | Save | Drop | Expire | Measured
Actions = tuple[Action, ...]

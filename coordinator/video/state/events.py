"""What happens to video jobs, and what is to be done about it: the words that the board takes and gives. Pure."""

from dataclasses import dataclass

from coordinator.video.state.jobs import Fault, Job, Kept
from wire.frames import LeaseEnded, LeaseGranted, LeaseRefused
from wire.video import Artifact, LeaseState

ACKNOWLEDGED = "acknowledged"
"""Why a lease is given back whose end was heard."""

# -- what happens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job was asked for."""

    job: Job


@dataclass(frozen=True, slots=True)
class Placed:
    """The head of the line shall ask this node."""

    job: str
    node: str
    lease: str


@dataclass(frozen=True, slots=True)
class Waits:
    """The head of the line cannot be placed, and why; `busy`: because others run, which is no reason to give up."""

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
    """A node told of its leases."""

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
    """Somebody does not want a job any more."""

    job: str
    message: str = "it was cancelled"


@dataclass(frozen=True, slots=True)
class Deleted:
    """Somebody wants a job, and what is known of it, gone."""

    job: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """This process began; the jobs are those of the one before."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went on."""


Event = (
    Submitted | Placed | Waits | Said | Reported | NodeAway | NodeRemoved | Fetched | NotFetched
    | Cancelled | Deleted | Restarted | Tick
)  # fmt: skip


# -- what is to be done ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the job's node for its lease."""

    job: Job


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Tell a node to give a lease back, or that its end was heard (`ACKNOWLEDGED`)."""

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

"""Video job: its data, its legal state transitions, and its representation in the API. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from wire.state_machine import IllegalEventError


class JobState(StrEnum):
    """State of a job."""

    QUEUED = "queued"
    LEASING = "leasing"
    """The coordinator has asked a node for a lease."""
    IN_PROGRESS = "in_progress"
    """A node has granted a lease."""
    FINALIZING = "finalizing"
    """The worker has finished, and the files are being fetched."""
    COMPLETED = "completed"
    """The files are stored on the coordinator."""
    FAILED = "failed"
    """The job failed or was cancelled."""


TRANSITIONS: Mapping[JobState, frozenset[JobState]] = MappingProxyType(
    {
        JobState.QUEUED: frozenset({JobState.LEASING, JobState.FAILED}),
        JobState.LEASING: frozenset({JobState.QUEUED, JobState.IN_PROGRESS, JobState.FAILED}),
        JobState.IN_PROGRESS: frozenset({JobState.QUEUED, JobState.FINALIZING, JobState.FAILED}),
        JobState.FINALIZING: frozenset({JobState.COMPLETED, JobState.FAILED}),
        JobState.COMPLETED: frozenset(),
        JobState.FAILED: frozenset(),
    }
)
"""Legal state transitions. An ended job has none."""
OPEN_STATES = frozenset({JobState.QUEUED, JobState.LEASING, JobState.IN_PROGRESS, JobState.FINALIZING})
"""States of a job that has not ended."""
API_STATUS: Mapping[JobState, str] = MappingProxyType({JobState.LEASING: "queued", JobState.FINALIZING: "in_progress"})
"""Status in the API for states that OpenAI's API does not have."""
FETCHING_PROGRESS = 99
"""Progress of a job in percent while its files are fetched."""


class IllegalTransitionError(IllegalEventError):
    """Raised for a state transition that is not in `TRANSITIONS`: a bug, or a node that contradicts itself."""


class JobFaultCode(StrEnum):
    """Machine-readable reason why a job failed, in addition to `wire.video.LeaseEndCode`."""

    CANCELLED = "cancelled"
    """A client cancelled or deleted the job."""
    NO_HEADROOM = "no_headroom"
    """No node granted memory until the deadline of the job (`VideoJob.room_by`)."""
    NODE_LOST = "node_lost"
    """The node was absent for too long or has left the pool, and the rules do not allow a restart of the job."""
    ARTIFACT_BROKEN = "artifact_broken"
    """A file differs from its reported size or checksum."""
    ARTIFACT_LOST = "artifact_lost"
    """The node returned without the files of the job, or did not return."""
    STORAGE_FULL = "storage_full"
    """The disk of the coordinator is full."""
    STORAGE_FAILED = "storage_failed"
    """The coordinator cannot store the files."""


class JobFault(msgspec.Struct, frozen=True):
    """Reason why a job failed."""

    code: str
    """`JobFaultCode`, `LeaseEndCode`, or a code of the node."""
    message: str
    """Description of the failure for people, as one sentence."""


class StoredFile(msgspec.Struct, frozen=True):
    """File of a finished job in the folder of the job, with its size in bytes and its SHA-256 as hex digits."""

    name: str
    size: int
    sha256: str


class RequestedClip(msgspec.Struct, frozen=True):
    """Requested clip with checked and rounded parameters.

    None means the default of the engine; for `seed`, it means 0.
    """

    model: str
    prompt: str
    width: int
    """Width in pixels."""
    height: int
    """Height in pixels."""
    frames: int
    fps: int
    """Frames per second."""
    steps: int
    """Denoising steps."""
    tokens: int
    """Number of spatial tokens of a frame (`memory_model`)."""
    negative_prompt: str = ""
    guidance: float | None = None
    """Strength with which the clip follows the prompt; None for the default of the engine."""
    guidance_2: float | None = None
    """Strength with which the second expert of the model follows the prompt; None for the default of the engine."""
    seed: int | None = None
    warnings: tuple[str, ...] = ()
    """Warnings for the client, for example about rounded sizes."""
    labels: tuple[str, ...] = ()
    """Labels that a node must have, because the API key is limited to them."""

    def encode_spec(self) -> bytes:
        """Return the clip as JSON for the worker (`wire.frames.LeaseRequest.spec`), without absent values."""
        spec: dict[str, Any] = {
            "prompt": self.prompt,
            "width": self.width,
            "height": self.height,
            "frames": self.frames,
            "fps": self.fps,
            "steps": self.steps,
            "negative_prompt": self.negative_prompt or None,
            "guidance": self.guidance,
            "guidance_2": self.guidance_2,
            "seed": self.seed,
        }
        return msgspec.json.encode({name: value for name, value in spec.items() if value is not None})


class VideoJob(msgspec.Struct, frozen=True):
    """Video job, as stored and as in the job table. Points in time are in Unix seconds, sizes in bytes.

    The deadlines `due` and `room_by` are in monotonic seconds of the process. A restart of the coordinator sets `due`
    again for running jobs and for jobs whose files are fetched, and clears `room_by`.
    """

    id: str
    sequence: int
    """Number of the submission, which orders the queue. A requeued job keeps its number."""
    key: str
    """Id of the API key that created the job, or the name of the local key."""
    created: float
    wanted: RequestedClip
    size: int
    """Size of the lease in bytes."""
    state: JobState = JobState.QUEUED
    idempotency: str = ""
    """Idempotency key of the request; empty if it has none."""
    digest: str = ""
    """SHA-256 (hex) of the request's body; empty without one."""
    node: str = ""
    """Id of the node; empty for a queued job, and after the node has left the pool."""
    lease: str = ""
    """Id of the lease; empty for a queued job."""
    generation: int = 0
    """Number that grows with each lease request, requeue and failure of the job.

    Messages about an older generation do not change the job.
    """
    attempts: int = 0
    """Number of restarts because the node or worker was lost or the worker did not start."""
    phase: str = "queued"
    """Current activity, or reason for the wait, as text for the client."""
    progress: int = 0
    """Progress in percent."""
    step: int = 0
    """Newest denoising step that the worker has reported; 0 before the first."""
    due: float | None = None
    """Monotonic time in seconds until which the job waits; None if there is no limit.

    The job waits for a lease, the start of the worker, the return of its node, or the fetch of its files.
    """
    away: bool = False
    """Whether the node of a running job is absent.

    The node has no link, or has not reported the lease since a restart of the coordinator.
    """
    started: float | None = None
    """Unix time in seconds of the grant of the current lease; None before it."""
    ended: float | None = None
    """Unix time in seconds of the end of the job; None for an open job."""
    expires: float | None = None
    """Unix time in seconds from which the files may be deleted; None unless the job has completed."""
    expired: bool = False
    """Whether the files were deleted."""
    fault: JobFault | None = None
    files: tuple[StoredFile, ...] = ()
    peak: int = 0
    """Highest footprint in bytes of the job's workers, including those before a restart of the job; 0 if unknown."""
    seconds: float = 0.0
    """Lifetime of the worker, in seconds; 0 before its end."""
    made: str = ""
    """Properties of the clip as JSON; empty before the end of the worker."""
    misses: int = 0
    """Number of consecutive reports of the node without the lease whose files are to be fetched."""
    room_by: float | None = None
    """Monotonic time in seconds at which the job fails if no node grants its lease; None if there is no such deadline.

    The deadline is set when a node is first asked, or when no node can be asked. It remains after refusals. A grant and
    a restart of the coordinator clear it, as does a wait that is only for other videos.
    """

    @property
    def open(self) -> bool:
        """Whether the job has not ended."""
        return self.state in OPEN_STATES

    @property
    def bytes(self) -> int:
        """Total size of the job's files in bytes."""
        return sum(file.size for file in self.files)


def change_state(job: VideoJob, state: JobState, **changes: object) -> VideoJob:
    """Return the job in another state, with the other fields in `changes`. `away` becomes False.

    Unless `changes` contains `due`, the job has no deadline. Raise `IllegalTransitionError` if `TRANSITIONS` does not
    allow the transition.
    """
    if state not in TRANSITIONS[job.state]:
        raise IllegalTransitionError(f"{job.id}: {state} does not follow {job.state}")
    return replace(job, state=state, due=changes.pop("due", None), away=False, **changes)


def to_row(job: VideoJob) -> dict[str, Any]:
    """Return a job as a JSON object of the API: OpenAI's fields, then fields of Macpool.

    Points in time are in Unix seconds, `progress` in percent, `seconds` in seconds as text, and `peak` in bytes.
    """
    wanted = job.wanted
    return {
        "id": job.id,
        "object": "video",
        "model": wanted.model,
        "status": API_STATUS.get(job.state, str(job.state)),
        "progress": 100 if job.state == JobState.COMPLETED else job.progress,
        "created_at": int(job.created),
        "completed_at": _unix_seconds(job.ended) if job.state == JobState.COMPLETED else None,
        "expires_at": _unix_seconds(job.expires),
        "error": None if job.fault is None else {"code": job.fault.code, "message": job.fault.message},
        "prompt": wanted.prompt,
        "remixed_from_video_id": None,
        "seconds": f"{wanted.frames / wanted.fps:.3f}".rstrip("0").rstrip("."),
        "size": f"{wanted.width}x{wanted.height}",
        "phase": job.phase,
        "frames": wanted.frames,
        "fps": wanted.fps,
        "steps": wanted.steps,
        "seed": wanted.seed,
        "warnings": list(wanted.warnings),
        "wall_seconds": round(job.seconds, 3) if job.seconds else None,
        "node": job.node or None,
        "peak": job.peak or None,
        "made": msgspec.json.decode(job.made) if job.made else None,
    }


def _unix_seconds(moment: float | None) -> int | None:
    return None if moment is None else int(moment)

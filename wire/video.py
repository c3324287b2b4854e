"""Video part of a report: readiness, installed packages and leases of a node.

Sizes are bytes, times are seconds. Fields are only appended, never reordered, as in `wire.report`.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from wire.bounds import MAX_ITEMS, MAX_MODELS, Blob, Estimate, Natural, Number, Size, Text, Word
from wire.report import WireStruct


class LeaseEndCode(StrEnum):
    """Machine-readable reason why a lease ended, in `LeaseEnded.code`."""

    COMPLETED = "completed"
    """The worker made the clip."""
    MEMORY_LEASE_EXCEEDED = "memory_lease_exceeded"
    """The footprint of the worker was above the size of the lease."""
    WORKER_STALLED = "worker_stalled"
    """The worker made no progress for too long."""
    JOB_TIMEOUT = "job_timeout"
    """The job was not finished in its time."""
    MONITOR_FAILED = "monitor_failed"
    """The footprint of the worker cannot be read, or the monitor of the worker failed."""
    WORKER_CRASHED = "worker_crashed"
    """The worker ended without a result, and no order had ended it."""
    WORKER_LOST = "worker_lost"
    """The parent process of the worker ended, or the node lost the worker by a restart."""
    START_FAILED = "start_failed"
    """No worker started for the lease."""
    OUTPUT_INVALID = "output_invalid"
    """The worker made no clip, or an invalid clip."""
    GENERATION_FAILED = "generation_failed"
    """The worker reported an error after the first transformer block, an invalid value, or an error of the GPU."""
    MODEL_INVALID = "model_invalid"
    """The worker reported an error before the first transformer block: the package is broken."""
    DISK_FULL = "disk_full"
    """The disk of the node is full."""
    NODE_PAUSED = "node_paused"
    """The node stopped sharing."""
    NODE_STOPPING = "node_stopping"


class LeaseRefusalCode(StrEnum):
    """Machine-readable reason of a refused lease, in `LeaseRefused.code`, besides `wire.refusals.RefusalCode`."""

    LEASE_HELD = "lease_held"
    """The node has granted another lease, or leases memory to a quantization."""
    LEASE_SUPERSEDED = "lease_superseded"
    """The node has received a newer lease of the job, or has deleted this lease."""
    LEASE_TOO_LARGE = "lease_too_large"
    """The lease exceeds the cap minus the margin and the footprint of the engine without models."""
    GUARD_OFF = "guard_off"
    """`memory.guard` is off on the node, so that no lease can be enforced."""
    VIDEO_NOT_READY = "video_not_ready"
    """The node cannot make videos now (`VideoState.cause`)."""
    ENGINE_SILENT = "engine_silent"
    """The engine has not confirmed the lower ceiling."""
    DISK_FULL = "disk_full"
    """The node cannot store the lease or its folder."""
    NODE_PAUSED = "node_paused"
    NODE_STOPPING = "node_stopping"


class ReleaseCause(StrEnum):
    """Cause for which the coordinator releases a lease, in `LeaseRelease.cause`. It becomes the code of the end."""

    ACKNOWLEDGED = "acknowledged"
    """The coordinator has processed the end of the lease."""
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    """The job has ended, or has another lease."""
    LEASE_TIMEOUT = "lease_timeout"
    """The node did not answer the request for the lease."""
    START_TIMEOUT = "start_timeout"
    """The worker did not start."""


class VideoPackage(WireStruct, frozen=True, array_like=True, gc=False):
    """A video model (diffusers package) on a node, with the inputs for a prediction of its peak memory."""

    name: Word
    fingerprint: Word = ""
    """Hash of the package. Nodes with the same fingerprint have the same package."""
    pipeline: Word = ""
    """Name of the pipeline class of diffusers."""
    engine: Word = ""
    """Version of the engine that runs the package; empty while its environment is missing."""
    bits: Natural = 0
    """Bits of a quantized weight; 0 without quantization."""
    weights: Estimate = 0
    """Bytes of all weights on disk."""
    expert: Estimate = 0
    """Bytes of the largest transformer. In low-RAM mode one transformer is in memory at a time."""
    experts: Natural = 1
    """Number of transformers of the package."""
    token_side: Natural = 16
    """Side of a spatial token in pixels; both sides of a picture are rounded up to a multiple."""
    token_frames: Natural = 4
    """Frames of a temporal token. A clip has one frame more than a multiple of this number."""
    fps: Natural = 16
    """Default frames per second of a clip."""
    steps: Natural = 40
    """Default number of denoising steps of a clip."""
    frames: Natural = 81
    """Default number of frames of a clip."""
    cause: Text = ""
    """Reason why the package cannot be used; empty if it can."""


class LeaseState(WireStruct, frozen=True, array_like=True, gc=False):
    """State of a memory lease for a video job on a node."""

    lease: Word
    """Id of the lease."""
    generation: Number
    """Sequence number of the lease among the leases of the job."""
    job: Word = ""
    """Id of the video job for which the memory is leased."""
    size: Size = 0
    """Bytes that the lease subtracts from the ceiling; 0 after its release."""
    phase: Word = ""
    """`granting`, `granted`, `starting`, `loading`, `denoising`, `decoding`, `saving`, `ending` or `ended`.

    A `granted` lease has no worker. In `ending`, the worker is being stopped. An `ended` lease is released, and is kept
    until the coordinator acknowledges it.
    """
    progress: Natural = 0
    """Completed percent of the job; 100 for an ended lease, also after a failure."""
    step: Natural = 0
    """Number of completed denoising steps; equal to `steps` for an ended lease."""
    steps: Natural = 0
    """Number of denoising steps; 0 if unknown."""
    footprint: Size = 0
    """Footprint of the worker's processes at the last check, in bytes; 0 without a worker."""
    peak: Size = 0
    """Highest footprint of the worker's processes so far, in bytes."""


class VideoState(WireStruct, frozen=True, array_like=True, gc=False):
    """State of video generation on a node."""

    ready: bool = False
    """Whether the node can accept a lease."""
    cause: Text = ""
    """Reason why the node is not ready; empty if it is ready."""
    ray: Word = ""
    """Id of the node's Ray cluster; empty while it does not run."""
    packages: Annotated[tuple[VideoPackage, ...], Meta(max_length=MAX_MODELS)] = ()
    leases: Annotated[tuple[LeaseState, ...], Meta(max_length=MAX_ITEMS)] = ()
    ray_cause: Text = ""
    """Reason why Ray does not run; empty if it runs or is not needed."""
    allowed: bool | None = None
    """Whether the coordinator allows the node to make videos; None from an older node without a Ray of its own."""


class Artifact(WireStruct, frozen=True, array_like=True, gc=False):
    """Output file of a video job. The node keeps the file until the coordinator acknowledges the end of the lease."""

    name: Word
    """Name of the file, by which a `FetchRequest` names it."""
    size: Size
    """Size of the file in bytes."""
    sha256: Blob
    """SHA-256 of the file's content, 32 bytes."""

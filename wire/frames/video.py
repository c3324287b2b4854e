"""Frames of memory leases for video jobs. The node decides about a lease."""

from typing import Annotated

from msgspec import Meta

from wire.bounds import (
    MAX_ITEMS,
    Blob,
    Difference,
    ErrorText,
    Number,
    Seconds,
    Size,
    Text,
    Word,
)
from wire.frames.frame import Frame
from wire.video import Artifact


class LeaseRequest(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: reserve memory for a video job.

    The answer is LeaseGranted or LeaseRefused. LeaseEnded follows every granted lease.
    """

    lease: Word
    generation: Number
    """Grows with every lease of a job; the node refuses the older of two."""
    job: Word
    model: Word
    size: Size
    """Bytes."""
    spec: Blob
    """JSON object for the worker: `prompt`, and optionally `negative_prompt`, `width`, `height`, `frames`, `fps`,
    `steps`, `guidance`, `guidance_2`, `seed`, `timeout` and `stall` (seconds; default: the settings of the node)."""


class LeaseRelease(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: end a lease and its worker."""

    lease: Word
    generation: Number
    cause: Text
    """Code of the end, such as `cancelled` or `worker_lost`. With `acknowledged` the node deletes the record and the
    files of an ended lease."""


class RayHead(Frame, frozen=True, array_like=True, gc=False):
    """Sent by coordinators of version 0.1 with a Ray cluster for the whole pool. Nodes ignore it."""

    address: Text


class AllowVideo(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: whether the node may make videos. A node starts without permission."""

    allowed: bool


class LeaseGranted(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: the ceiling is lowered and in force in the engine. The job can start."""

    lease: Word
    generation: Number
    folder: Text = ""
    """Argument with which the actor finds the lease."""


class LeaseRefused(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: the lease is refused."""

    lease: Word
    generation: Number
    code: Word
    """Code of `wire.refusals`, or `lease_held`, `lease_superseded`, `guard_off`, `video_not_ready`."""
    message: ErrorText
    need: Difference = 0
    """Bytes."""
    headroom: Difference | None = None
    """Bytes."""
    retry_after: Seconds = 0.0
    """Seconds; 0 if a retry has the same result."""
    waiting_for: Text = ""
    """Condition for a lease, as text for a person."""


class LeaseEnded(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: the worker has ended and the memory is free.

    Sent again on every new link until the coordinator acknowledges it.
    """

    lease: Word
    generation: Number
    code: Word
    """`completed`, `cancelled`, `worker_crashed`, `worker_stalled`, `job_timeout`, `memory_lease_exceeded`,
    `monitor_failed`, `output_invalid`, `worker_lost`, …"""
    message: ErrorText = ""
    artifacts: Annotated[tuple[Artifact, ...], Meta(max_length=MAX_ITEMS)] = ()
    peak: Size = 0
    """Highest footprint in bytes."""
    seconds: Seconds = 0.0
    """Lifetime of the worker."""
    made: Blob = b""
    """JSON object of the properties of the clip: width, height, frames, fps, seed, …"""

"""Frames of memory leases for video jobs, and of the permission for them.

The coordinator requests a lease, the node grants or refuses it.
"""

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
    """Id of the lease."""
    generation: Number
    """Sequence number of the lease, which grows with every lease of a job. The node refuses the older of two."""
    job: Word
    model: Word
    size: Size
    """Bytes to reserve for the worker."""
    spec: Blob
    """JSON object for the worker with the member `prompt`.

    Optional members are `negative_prompt`, `width`, `height`, `frames`, `fps`, `steps`, `guidance`, `guidance_2`,
    `seed`, `timeout` and `stall`. The last two are in seconds and default to the settings of the node.
    """


class LeaseRelease(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: end a lease and its worker."""

    lease: Word
    generation: Number
    cause: Text
    """A `wire.video.ReleaseCause`, which becomes the code of the end.

    With `acknowledged` the node deletes the record and the files of an ended lease.
    """


class RayHead(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: address of a Ray cluster for the pool. Sent only by version 0.1; nodes ignore the frame."""

    address: Text


class AllowVideo(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: allow or forbid the node to generate videos. A node starts without permission."""

    allowed: bool


class LeaseGranted(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: the lease is granted. Its memory is free, and the node starts the worker."""

    lease: Word
    generation: Number
    folder: Text = ""
    """Folder of the lease on the node, from which the Ray actor of the job reads the lease."""


class LeaseRefused(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: the lease is refused."""

    lease: Word
    generation: Number
    code: Word
    """A `wire.video.LeaseRefusalCode` or a `wire.refusals.RefusalCode`."""
    message: ErrorText
    need: Difference = 0
    """Bytes that the lease needs."""
    headroom: Difference | None = None
    """Headroom of the node in bytes; None if unknown."""
    retry_after: Seconds = 0.0
    """Seconds after which a retry can succeed; 0 if a retry has the same result."""
    waiting_for: Text = ""
    """Condition on which the node can grant the lease, as text for a person; empty without one."""


class LeaseEnded(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: the lease has ended, its worker runs no more, and its memory is free.

    The node sends the frame again on every new link until the coordinator acknowledges the end.
    """

    lease: Word
    generation: Number
    code: Word
    """A `wire.video.LeaseEndCode`, or the `wire.video.ReleaseCause` of an ordered end."""
    message: ErrorText = ""
    """Text for a person about the end; may be empty."""
    artifacts: Annotated[tuple[Artifact, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Files of the clip; empty if the job has not completed."""
    peak: Size = 0
    """Highest footprint of the worker in bytes; 0 without a reading."""
    seconds: Seconds = 0.0
    """Lifetime of the worker in seconds; 0 without a worker."""
    made: Blob = b""
    """JSON object of the properties of the clip: width, height, frames, fps, seed, …; empty without a clip."""

"""Video part of a report: readiness, installed packages and leases of a node.

Sizes are bytes, times are seconds. Fields are only appended, never reordered, as in `wire.report`.
"""

from typing import Annotated

from msgspec import Meta

from wire.bounds import MAX_ITEMS, MAX_MODELS, Blob, Estimate, Natural, Number, Size, Text, Word
from wire.report import WireStruct


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
    """Number of transformers."""
    token_side: Natural = 16
    """Side of a spatial token in pixels; both sides of a picture are rounded up to a multiple."""
    token_frames: Natural = 4
    """Frames of a temporal token; a clip has 1 + a multiple of it."""
    fps: Natural = 16
    """Default frames per second of the package."""
    steps: Natural = 40
    """Default denoising steps of the package."""
    frames: Natural = 81
    """Default frames of the package."""
    cause: Text = ""
    """Reason why the package cannot be used; empty if it can."""


class LeaseState(WireStruct, frozen=True, array_like=True, gc=False):
    """State of a memory lease for a video job on a node."""

    lease: Word
    """Id of the lease."""
    generation: Number
    """Sequence number of the lease among those of the job."""
    job: Word = ""
    """Id of the job."""
    size: Size = 0
    """Bytes that the lease subtracts from the ceiling; 0 after its release."""
    phase: Word = ""
    """`granting`, `granted` (no worker), `starting`, `loading`, `denoising`, `decoding`, `saving`, `ending` (the worker
    is being stopped) or `ended` (released; kept until the coordinator acknowledges it)."""
    progress: Natural = 0
    """Percent of the job."""
    step: Natural = 0
    """Current denoising step of `steps`."""
    steps: Natural = 0
    footprint: Size = 0
    """Footprint of the worker's processes, now."""
    peak: Size = 0
    """Highest footprint of the worker's processes that was read."""


class VideoState(WireStruct, frozen=True, array_like=True, gc=False):
    """State of video generation on a node."""

    ready: bool = False
    """Whether the node can accept a lease."""
    cause: Text = ""
    """Reason why the node is not ready, with the next step."""
    ray: Word = ""
    """Id of the node's Ray cluster; empty while it does not run."""
    packages: Annotated[tuple[VideoPackage, ...], Meta(max_length=MAX_MODELS)] = ()
    leases: Annotated[tuple[LeaseState, ...], Meta(max_length=MAX_ITEMS)] = ()
    ray_cause: Text = ""
    """Reason why Ray does not run."""
    allowed: bool | None = None
    """Whether the coordinator allows the node to make videos; None from an older node without a Ray of its own."""


class Artifact(WireStruct, frozen=True, array_like=True, gc=False):
    """Output file of a video job. The node keeps the file until the coordinator acknowledges the end of the lease."""

    name: Word
    """File name."""
    size: Size
    """Bytes."""
    sha256: Blob

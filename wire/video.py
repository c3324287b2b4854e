"""What a node says of its video: whether it can make any, of which packages, and how its leases stand.

All sizes are bytes, all times seconds. Every structure is appended to, never reordered, as in `wire.report`.
"""

from typing import Annotated

from msgspec import Meta

from wire.bounds import MAX_ITEMS, MAX_MODELS, Blob, Estimate, Natural, Number, Size, Text, Word
from wire.report import Part


class VideoPackage(Part, frozen=True, array_like=True, gc=False):
    """A diffusers package that this node holds, with what a prediction of its peak needs.

    `engine` is the version of the engine that would run it (empty while the environment is missing), `bits` what its
    weights are stored in (0: not quantized), `weights` all bytes on disk, `expert` those of its largest transformer:
    in low-RAM mode one is resident at a time. A spatial token covers `token_side` × `token_side` pixels, and both sides
    of a picture are rounded up to it; frames are 1 + a multiple of `token_frames`. `fps`, `steps` and `frames` are the
    package's own defaults. `cause`: why it cannot be used; empty when it can.
    """

    name: Word
    fingerprint: Word = ""
    pipeline: Word = ""
    engine: Word = ""
    bits: Natural = 0
    weights: Estimate = 0
    expert: Estimate = 0
    experts: Natural = 1
    token_side: Natural = 16
    token_frames: Natural = 4
    fps: Natural = 16
    steps: Natural = 40
    frames: Natural = 81
    cause: Text = ""


class LeaseState(Part, frozen=True, array_like=True, gc=False):
    """A lease on this node. `size` are the bytes that it takes off the ceiling now: 0 once it was given back.

    `phase`: `granting`, `granted` (no worker yet), `starting`, `loading`, `denoising`, `decoding`, `saving`, `ending`
    (its worker is being ended), `ended` (given back; kept until it is acknowledged). `progress` 0 to 100; `step` of
    `steps`; `footprint` is what its worker's processes take now, `peak` the most that was read."""

    lease: Word
    generation: Number
    job: Word = ""
    size: Size = 0
    phase: Word = ""
    progress: Natural = 0
    step: Natural = 0
    steps: Natural = 0
    footprint: Size = 0
    peak: Size = 0


class VideoState(Part, frozen=True, array_like=True, gc=False):
    """Whether this node can make video now; if not, `cause` says why, with the remedy. `ray` is the id of its Ray node
    once that is up (empty: none). `ray_cause` says why there is none. `allowed`: whether the coordinator allows it to
    make videos, as the node knows it; None from a node of a version that runs no Ray of its own."""

    ready: bool = False
    cause: Text = ""
    ray: Word = ""
    packages: Annotated[tuple[VideoPackage, ...], Meta(max_length=MAX_MODELS)] = ()
    leases: Annotated[tuple[LeaseState, ...], Meta(max_length=MAX_ITEMS)] = ()
    ray_cause: Text = ""
    allowed: bool | None = None


class Artifact(Part, frozen=True, array_like=True, gc=False):
    """A file that a job has made, fetched with `Ask("artifact:LEASE/NAME")` until it is acknowledged."""

    name: Word
    size: Size
    sha256: Blob

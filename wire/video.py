"""What a node says of its video: whether it can make any, of which packages, and how its leases stand.

All sizes are bytes, all times seconds. Every structure is appended to, never reordered, as in `wire.report`.
"""

from wire.report import Part


class VideoPackage(Part, frozen=True, array_like=True, gc=False):
    """A diffusers package that this node holds, with what a prediction of its peak needs.

    `engine` is the version of the engine that would run it (empty while the environment is missing), `bits` what its
    weights are stored in (0: not quantized), `weights` all bytes on disk, `expert` those of its largest transformer:
    in low-RAM mode one is resident at a time. A spatial token covers `token_side` × `token_side` pixels, and both sides
    of a picture are rounded up to it; frames are 1 + a multiple of `token_frames`. `fps`, `steps` and `frames` are the
    package's own defaults. `cause`: why it cannot be used; empty when it can.
    """

    name: str
    fingerprint: str = ""
    pipeline: str = ""
    engine: str = ""
    bits: int = 0
    weights: int = 0
    expert: int = 0
    experts: int = 1
    token_side: int = 16
    token_frames: int = 4
    fps: int = 16
    steps: int = 40
    frames: int = 81
    cause: str = ""


class LeaseState(Part, frozen=True, array_like=True, gc=False):
    """A lease on this node. `size` are the bytes that it takes off the ceiling now: 0 once it was given back.

    `phase`: `granting`, `granted` (no worker yet), `starting`, `loading`, `denoising`, `decoding`, `saving`, `ending`
    (its worker is being ended), `ended` (given back; kept until it is acknowledged). `progress` 0 to 100; `step` of
    `steps`; `footprint` is what its worker's processes take now, `peak` the most that was read."""

    lease: str
    generation: int
    job: str = ""
    size: int = 0
    phase: str = ""
    progress: int = 0
    step: int = 0
    steps: int = 0
    footprint: int = 0
    peak: int = 0


class VideoState(Part, frozen=True, array_like=True, gc=False):
    """Whether this node can make video now; if not, `cause` says why, with the remedy. `ray` is the id of its Ray node
    once that is up (empty: none). `ray_cause` says why there is none. `allowed`: whether the coordinator allows it to
    make videos, as the node knows it; None from a node of a version that runs no Ray of its own."""

    ready: bool = False
    cause: str = ""
    ray: str = ""
    packages: tuple[VideoPackage, ...] = ()
    leases: tuple[LeaseState, ...] = ()
    ray_cause: str = ""
    allowed: bool | None = None


class Artifact(Part, frozen=True, array_like=True, gc=False):
    """A file that a job has made, fetched with `Ask("artifact:LEASE/NAME")` until it is acknowledged."""

    name: str
    size: int
    sha256: bytes

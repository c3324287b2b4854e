"""Parse and check the video job in the `spec` of a lease, before any memory is leased. Pure functions.

The coordinator has checked the same fields against the pool's limits. The node checks them again, because it does not
trust a peer. Defaults of the package, the engine or the node's settings replace fields that are not set.
"""

from typing import Annotated, cast

import msgspec
from msgspec import Meta, Struct

from wire.video import VideoPackage

MAX_PIXELS = 2**24
"""Maximum pixels of a frame. A job with larger frames is invalid."""
Side = Annotated[int, Meta(ge=16, le=8192)]
Text = Annotated[str, Meta(max_length=100_000)]
Guidance = Annotated[float, Meta(ge=0, le=100)]
Seconds = Annotated[float, Meta(gt=0, le=10**6)]


class JobSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Video job in the `spec` of a lease. `width` and `height` are in pixels.

    None selects a default: that of the package for `frames`, `fps` and `steps`, that of the engine for the other
    parameters of the clip.
    """

    prompt: Text
    width: Side
    height: Side
    negative_prompt: Text | None = None
    frames: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    fps: Annotated[int, Meta(ge=1, le=240)] | None = None
    steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance: Guidance | None = None
    """Scale of classifier-free guidance."""
    guidance_2: Guidance | None = None
    """Scale of classifier-free guidance of the second expert, in a package that has two."""
    seed: Annotated[int, Meta(ge=0, le=2**53)] = 0
    timeout: Seconds | None = None
    """Maximum seconds from the start of the worker to its end; None for the node's setting."""
    stall: Seconds | None = None
    """Maximum seconds without progress; None for the node's setting."""

    def to_worker_input(self, package: VideoPackage) -> dict[str, object]:
        """Return the job as the worker's input, without `timeout` and `stall`.

        `frames`, `fps` and `steps` that are None get the defaults of `package`. Other fields that are None are left
        out.
        """
        fields = cast("dict[str, object]", msgspec.to_builtins(self))
        known = {
            name: value for name, value in fields.items() if value is not None and name not in ("timeout", "stall")
        }
        return {"frames": package.frames, "fps": package.fps, "steps": package.steps, **known}


def parse_spec(raw: bytes) -> JobSpec | str:
    """Return the job that the `spec` of a lease describes, or a sentence for a person if the job is invalid."""
    try:
        spec = msgspec.json.decode(raw, type=JobSpec)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"the job is invalid: {error}"
    if spec.width * spec.height > MAX_PIXELS:
        return f"a picture of {spec.width} × {spec.height} has more than {MAX_PIXELS} pixels"
    return spec

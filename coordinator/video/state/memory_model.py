"""Memory model of video jobs: rounds a clip as the engine does, predicts its peak in bytes, checks the limits. Pure.

The denoiser's weights and the runtime are constant. One part grows with the pixels of a frame: the slices that the
decoder works on. Measured on a 14-billion-parameter pair of experts at 8 bits in low-memory mode, with one expert
loaded: `peak = 17.5 + 0.0029 × spatial tokens` GiB. A token is a square of 16 × 16 pixels (8 of the decoder times 2 of
a patch). The margin is 6 GiB. Frames and steps had no effect up to 121 and 50. Other influences are bounded by the
limits below, and by the worker's watchdog, which ends a job that exceeds its lease.

Of the 17.5 GiB, 14.35 are the loaded expert. A package of another size therefore has `its expert + 3.15 GiB` as its
base. An engine from 0.18.17 on keeps an expert that is stored at 8 bits in memory at 16 bits, almost twice the size.
Every combination of package, engine version and quantization has its own profile, which is uncalibrated until a job was
measured. A measured peak above the prediction raises the base; nothing lowers it.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from wire.units import GIB, show_size
from wire.video import VideoPackage

EXPERT_BYTES = int(14.35 * GIB)
"""Bytes of the loaded expert in the first measured package, and of an expert whose size is unknown."""
RUNTIME_BYTES = int(3.15 * GIB)
"""Bytes of a worker without the expert and without the part that grows with the frame."""
BYTES_PER_SPATIAL_TOKEN = 0.0029 * GIB
"""Growth of the peak with each spatial token of a frame, in bytes."""
MARGIN_BYTES = 6 * GIB
"""Bytes that are reserved in addition to a predicted peak."""
WIDENED_FROM = (0, 18, 17)
"""First engine version that keeps weights stored at 8 bits in memory at 16 bits.

Source: the code of the engine, and loads with this version and an earlier one.
"""
WIDENED_BITS = 8
"""Bits of stored weights that an engine from version `WIDENED_FROM` on keeps in memory at 16 bits."""
WIDENED_FACTOR = 16 / 8.5
"""Growth factor of weights stored at 8 bits in an engine from version `WIDENED_FROM` on.

The weights grow from 8 bits, plus half a bit for their scales, to 16 bits.
"""
MIN_FPS, MAX_FPS = 4, 60
"""Bounds of the frame rate, in frames per second."""
MIN_SIDE, MAX_SIDE = 32, 4096
"""Bounds of width and height, in pixels."""
DEFAULT_SIZE = (480, 272)
"""Width and height, in pixels, of a clip for which the request names no size."""
DEFAULT_SECONDS = 3
"""Playing time, in seconds, of a clip for which the request names no length."""
MAX_TRAINED_FRAMES = 81
"""Frames of the model's training clips. The end of a longer clip may run back and forth."""


class VideoProfileKey(NamedTuple):
    """Key of a memory profile: name of the package, version of the engine, and bits of the quantization."""

    package: str
    engine: str
    bits: int


def get_profile_key(package: VideoPackage) -> VideoProfileKey:
    """Return the key of the memory profile of a node's package."""
    return VideoProfileKey(package.name, package.engine, package.bits)


@dataclass(frozen=True, slots=True)
class VideoMemoryProfile:
    """Predicted memory of a package: the peak in bytes is `base + slope × spatial tokens of a frame`."""

    base: int
    """Peak without the part that grows with the frame, in bytes."""
    slope: float
    """Bytes of the peak for each spatial token of a frame."""
    margin: int = MARGIN_BYTES
    """Bytes that are reserved in addition to the predicted peak."""
    measured: int = 0
    """Number of jobs whose measured peak was compared with the prediction."""

    @property
    def calibrated(self) -> bool:
        """Whether the peak of a job was measured for this profile."""
        return self.measured > 0

    def predict_peak(self, tokens: int) -> int:
        """Return the predicted peak in bytes for a frame of `tokens` spatial tokens."""
        return math.ceil(self.base + self.slope * tokens)

    def compute_need(self, tokens: int) -> int:
        """Return the minimum size of a lease in bytes for frames of `tokens` spatial tokens.

        That is the predicted peak plus the margin.
        """
        return self.predict_peak(tokens) + self.margin

    def add_measurement(self, tokens: int, peak: int) -> "VideoMemoryProfile":
        """Return the profile after a job whose measured peak was `peak` bytes, for frames of `tokens` spatial tokens.

        A peak above the prediction raises the base.
        """
        return replace(self, base=self.base + max(0, peak - self.predict_peak(tokens)), measured=self.measured + 1)


FIRST_MEASURED_PROFILE = VideoMemoryProfile(EXPERT_BYTES + RUNTIME_BYTES, BYTES_PER_SPATIAL_TOKEN)
"""Profile of the first measured package: 14 billion parameters per expert at 8 bits."""


def parse_engine_version(engine: str) -> tuple[int, ...]:
    """Return the first three parts of an engine version as numbers.

    An invalid version counts as the newest, `(1000000,)`, because newer engines need more memory.
    """
    parts = engine.split(".")[:3]
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else (10**6,)


def predict_profile(package: VideoPackage) -> VideoMemoryProfile:
    """Return the predicted profile of a package. An unknown expert size counts as `EXPERT_BYTES`.

    If the engine keeps the expert in 16 bits instead of 8, the size counts with `WIDENED_FACTOR`.
    """
    stored = package.expert or EXPERT_BYTES
    widened = package.bits == WIDENED_BITS and parse_engine_version(package.engine) >= WIDENED_FROM
    return VideoMemoryProfile(
        RUNTIME_BYTES + (math.ceil(stored * WIDENED_FACTOR) if widened else stored), BYTES_PER_SPATIAL_TOKEN
    )


@dataclass(frozen=True, slots=True)
class ClipLimits:
    """Maximum frames, denoising steps, and pixels of a frame of a clip."""

    frames: int = 121
    steps: int = 50
    pixels: int = 1280 * 720


@dataclass(frozen=True, slots=True)
class ClipRequest:
    """Clip parameters of a request. None means an absent parameter. `size` is width and height in pixels."""

    size: tuple[int, int] | None = None
    seconds: int | None = None
    frames: int | None = None
    fps: int | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Clip:
    """Clip to generate, with warnings for the client. Width and height are in pixels.

    `tokens` is the number of spatial tokens of a frame. `fps` is in frames per second. `steps` are denoising steps.
    """

    width: int
    height: int
    frames: int
    fps: int
    steps: int
    tokens: int
    warnings: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Playing time in seconds."""
        return self.frames / self.fps


@dataclass(frozen=True, slots=True)
class ClipRefusal:
    """Reason why a clip is refused: the parameter to change, and a message with the numbers."""

    param: str
    message: str


def round_side(pixels: int, token: int) -> int:
    """Return a side in pixels, rounded up to whole tokens of `token` pixels, as the engine does."""
    return -(-pixels // token) * token


def round_frames(frames: int, step: int) -> int:
    """Return the smallest number of frames, at least `frames`, that the decoder can produce.

    The decoder produces one frame more than a multiple of `step`: with a step of 4, it produces 5, 9, 13 frames.
    """
    return max(step, step * math.ceil((frames - 1) / step)) + 1


def round_max_frames(max_frames: int, step: int) -> int:
    """Return the largest number of frames, at most `max_frames`, that the decoder can produce (`round_frames`)."""
    return (max_frames - 1) // step * step + 1


def find_fitting_fps(seconds: int, max_frames: int, step: int) -> int | None:
    """Return the highest frame rate (frames per second) at which a clip of `seconds` has at most `max_frames` frames.

    `step` is that of `round_frames`. Return None if the rate would be below `MIN_FPS`.
    """
    fps = round_max_frames(max_frames, step) // seconds
    return fps if fps >= MIN_FPS else None


def plan_clip(
    request: ClipRequest, limits: ClipLimits, package: VideoPackage, default_steps: int
) -> Clip | ClipRefusal:
    """Return the requested clip, rounded as the package's engine does, or the reason why it is refused.

    `default_steps` applies if the request has no denoising steps.
    """
    fps = package.fps if request.fps is None else request.fps
    if not MIN_FPS <= fps <= MAX_FPS:
        return ClipRefusal("fps", f"fps must be {MIN_FPS} to {MAX_FPS}, not {fps}")
    default_steps = default_steps if request.steps is None else request.steps
    if not 1 <= default_steps <= limits.steps:
        return ClipRefusal("steps", f"steps must be 1 to {limits.steps}, not {default_steps}")
    frame = _plan_frame(*(request.size or DEFAULT_SIZE), limits, package.token_side)
    if isinstance(frame, ClipRefusal):
        return frame
    frames = _plan_frames(request, fps, limits, package.token_frames)
    if isinstance(frames, ClipRefusal):
        return frames
    width, height = frame
    tokens = (width // package.token_side) * (height // package.token_side)
    return Clip(width, height, frames, fps, default_steps, tokens, tuple(_list_warnings(request, frame, frames)))


def _plan_frame(width: int, height: int, limits: ClipLimits, token: int) -> tuple[int, int] | ClipRefusal:
    if not (MIN_SIDE <= width <= MAX_SIDE and MIN_SIDE <= height <= MAX_SIDE):
        return ClipRefusal("size", f"size: each side must have {MIN_SIDE} to {MAX_SIDE} pixels, not {width}x{height}")
    wide, high = round_side(width, token), round_side(height, token)
    if wide * high > limits.pixels:
        return ClipRefusal(
            "size",
            f"size: a frame may have {limits.pixels} pixels (1280x720 has 921600), and {wide}x{high} has {wide * high}",
        )
    return wide, high


def _plan_frames(request: ClipRequest, fps: int, limits: ClipLimits, step: int) -> int | ClipRefusal:
    most = round_max_frames(limits.frames, step)
    if request.frames is not None:
        if request.seconds is not None:
            return ClipRefusal("frames", "frames and seconds say the same in two ways: give one of them")
        frames = round_frames(request.frames, step)
        if request.frames < 1 or frames > most:
            return ClipRefusal("frames", f"frames must be 1 to {most}, not {request.frames}")
        return frames
    seconds = DEFAULT_SECONDS if request.seconds is None else request.seconds
    if seconds < 1:
        return ClipRefusal("seconds", f"seconds must be 1 or more, not {seconds}")
    frames = round_frames(seconds * fps, step)
    if frames <= most:
        return frames
    fitting = find_fitting_fps(seconds, limits.frames, step)
    rather = f"fps {fitting} would fit" if fitting else f"{most // MIN_FPS} s are possible at most"
    return ClipRefusal(
        "seconds",
        f"seconds: {seconds} s at {fps} fps are {frames} frames, and a clip may have {most}: {rather}",
    )


def _list_warnings(request: ClipRequest, frame: tuple[int, int], frames: int) -> list[str]:
    warnings: list[str] = []
    if request.size is not None and frame != request.size:
        warnings.append(
            f"size {request.size[0]}x{request.size[1]} is made as {frame[0]}x{frame[1]}: sides are whole tokens"
        )
    if request.frames is not None and frames != request.frames:
        warnings.append(f"{request.frames} frames are made as {frames}: the decoder makes groups, and one")
    if frames > MAX_TRAINED_FRAMES:
        warnings.append(
            f"{frames} frames are more than the {MAX_TRAINED_FRAMES} that the model was trained on: the end may drift"
        )
    return warnings


def explain_too_large(profile: VideoMemoryProfile, clip: Clip, lease: int) -> str | None:
    """Return a message with the numbers if a clip's predicted peak and margin exceed `lease` bytes, else None."""
    need = profile.compute_need(clip.tokens)
    if need <= lease:
        return None
    known = f"measured on {profile.measured} jobs" if profile.calibrated else "uncalibrated"
    return (
        f"{clip.width}x{clip.height} is predicted to take {show_size(profile.predict_peak(clip.tokens))} ({known}) and "
        f"{show_size(profile.margin)} are kept as margin, together {show_size(need)}: more than "
        f"the lease of {show_size(lease)}; ask for a smaller size"
    )

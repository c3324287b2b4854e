"""Plan of a clip: round its size and its length as the engine of its package does, check the limits, and list warnings.
Pure.

A refusal names the parameter, and a value that would be accepted where there is one.
"""

import math
from dataclasses import dataclass

from wire.video import VideoPackage

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

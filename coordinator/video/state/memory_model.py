"""What a video takes: its clip rounded as the engine rounds it, its peak in bytes, and the limits. Pure.

Theory. The denoiser's weights and the runtime around them stay, and one thing grows: the slices that the decoder works
on, with the pixels of a frame. Measured on a 14-billion-parameter pair of experts at 8 bits in low-memory mode, one of
the two resident (the project's first case): `peak = 17.5 + 0.0029 × spatial tokens` GiB, where a token is a square of
16 × 16 pixels (8 of the decoder times 2 of a patch), with 6 GiB kept as margin. Frames and steps did not matter up to
121 and 50. What is not in that formula is bounded by the limits below, and by the worker's watchdog, which ends a job
that leaves its lease.

Of the 17.5 GiB, 14.35 are the resident expert. So a package of another size has `its expert + 3.15 GiB` as its base,
and an engine from 0.18.17 on holds an expert that is stored at 8 bits in 16 (it says so when it loads): almost twice.
Every pair of package, engine version and quantization has a profile of its own; until a job was measured there it is
called uncalibrated. A measured peak above the line moves it up, and nothing moves it down.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from wire.units import GIB, show_size
from wire.video import VideoPackage

EXPERT = int(14.35 * GIB)
RUNTIME = int(3.15 * GIB)
SLOPE = 0.0029 * GIB
MARGIN = 6 * GIB
WIDENED_FROM = (0, 18, 17)
"""The first engine that holds weights stored at 8 bits in 16 (read in its sources, and seen by loading both)."""
WIDENED_BITS = 8
WIDENED = 16 / 8.5
"""By how much such weights grow: 8 bits and half a bit of scales to 16."""
LEAST_FPS, MOST_FPS = 4, 60
LEAST_SIDE, MOST_SIDE = 32, 4096
USUAL_SIZE = (480, 272)
USUAL_SECONDS = 3
DRIFTS_FROM = 81
"""Frames on which the model was trained; a longer clip may run back and forth at its end."""


class ProfileKey(NamedTuple):
    """What a profile belongs to."""

    package: str
    engine: str
    bits: int


def key_of(package: VideoPackage) -> ProfileKey:
    """Give the key of a node's package."""
    return ProfileKey(package.name, package.engine, package.bits)


@dataclass(frozen=True, slots=True)
class Profile:
    """`base + slope × tokens` is the expected peak in bytes, `margin` what is kept beside it. `measured` counts the
    jobs whose peaks were compared with it."""

    base: int
    slope: float
    margin: int = MARGIN
    measured: int = 0

    @property
    def calibrated(self) -> bool:
        """Whether a job was ever measured."""
        return self.measured > 0

    def peak(self, tokens: int) -> int:
        """Give the expected peak of a frame of so many tokens."""
        return math.ceil(self.base + self.slope * tokens)

    def need(self, tokens: int) -> int:
        """Give the peak with its margin: what has to fit into a lease."""
        return self.peak(tokens) + self.margin

    def after(self, tokens: int, peak: int) -> "Profile":
        """Take in the measured peak of a job: a higher one than expected moves the line up."""
        return replace(self, base=self.base + max(0, peak - self.peak(tokens)), measured=self.measured + 1)


SEED = Profile(EXPERT + RUNTIME, SLOPE)
"""The first profile: the project's first case."""


def version_of(engine: str) -> tuple[int, ...]:
    """Read a version's numbers; what cannot be read counts as new, for new engines take more."""
    parts = engine.split(".")[:3]
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else (10**6,)


def first_profile(package: VideoPackage) -> Profile:
    """Give the profile of a package that nobody measured; one that does not say how large its expert is, is taken for
    the project's first case."""
    stored = package.expert or EXPERT
    widened = package.bits == WIDENED_BITS and version_of(package.engine) >= WIDENED_FROM
    return Profile(RUNTIME + (math.ceil(stored * WIDENED) if widened else stored), SLOPE)


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a clip may be: frames, denoising steps, pixels of a frame."""

    frames: int = 121
    steps: int = 50
    pixels: int = 1280 * 720


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request says of its clip; None where it says nothing. Sides in pixels."""

    size: tuple[int, int] | None = None
    seconds: int | None = None
    frames: int | None = None
    fps: int | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Clip:
    """What will really be made, and what is to be told of it; `tokens` are the spatial tokens of a frame."""

    width: int
    height: int
    frames: int
    fps: int
    steps: int
    tokens: int
    warnings: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.frames / self.fps


@dataclass(frozen=True, slots=True)
class Impossible:
    """Why a clip cannot be: the parameter to change, and a sentence with the numbers."""

    param: str
    message: str


def rounded_side(pixels: int, token: int) -> int:
    """Round a side up to whole tokens, as the engine does."""
    return -(-pixels // token) * token


def rounded_frames(frames: int, step: int) -> int:
    """Round up to one frame more than a multiple of `step`, which is what the decoder can make."""
    return max(step, step * math.ceil((frames - 1) / step)) + 1


def fitting_fps(seconds: int, most: int, step: int) -> int | None:
    """Give the highest rate at which so many seconds have at most `most` frames; None where none does."""
    fps = ((most - 1) // step * step + 1) // seconds
    return fps if fps >= LEAST_FPS else None


def plan(wish: Wish, limits: Limits, package: VideoPackage, steps: int) -> Clip | Impossible:
    """Round a wish as the package does and hold it against the limits; `steps` where it names none."""
    fps = package.fps if wish.fps is None else wish.fps
    if not LEAST_FPS <= fps <= MOST_FPS:
        return Impossible("fps", f"fps must be {LEAST_FPS} to {MOST_FPS}, not {fps}")
    steps = steps if wish.steps is None else wish.steps
    if not 1 <= steps <= limits.steps:
        return Impossible("steps", f"steps must be 1 to {limits.steps}, not {steps}")
    frame = _frame(*(wish.size or USUAL_SIZE), limits, package.token_side)
    if isinstance(frame, Impossible):
        return frame
    frames = _frames(wish, fps, limits, package.token_frames)
    if isinstance(frames, Impossible):
        return frames
    width, height = frame
    tokens = (width // package.token_side) * (height // package.token_side)
    return Clip(width, height, frames, fps, steps, tokens, tuple(_warnings(wish, frame, frames)))


def _frame(width: int, height: int, limits: Limits, token: int) -> tuple[int, int] | Impossible:
    if not (LEAST_SIDE <= width <= MOST_SIDE and LEAST_SIDE <= height <= MOST_SIDE):
        return Impossible("size", f"size: each side must have {LEAST_SIDE} to {MOST_SIDE} pixels, not {width}x{height}")
    wide, high = rounded_side(width, token), rounded_side(height, token)
    if wide * high > limits.pixels:
        return Impossible(
            "size", f"size: a frame may have {limits.pixels} pixels (1280x720 has 921600), and {wide}x{high} has "
            f"{wide * high}",
        )  # fmt: skip
    return wide, high


def _frames(wish: Wish, fps: int, limits: Limits, step: int) -> int | Impossible:
    if wish.frames is not None:
        if wish.seconds is not None:
            return Impossible("frames", "frames and seconds say the same in two ways: give one of them")
        frames = rounded_frames(wish.frames, step)
        if wish.frames < 1 or frames > limits.frames:
            return Impossible("frames", f"frames must be 1 to {limits.frames}, not {wish.frames}")
        return frames
    seconds = USUAL_SECONDS if wish.seconds is None else wish.seconds
    if seconds < 1:
        return Impossible("seconds", f"seconds must be 1 or more, not {seconds}")
    frames = rounded_frames(seconds * fps, step)
    if frames <= limits.frames:
        return frames
    fitting = fitting_fps(seconds, limits.frames, step)
    rather = f"fps {fitting} would fit" if fitting else f"{limits.frames // LEAST_FPS} s are possible at most"
    return Impossible(
        "seconds", f"seconds: {seconds} s at {fps} fps are {frames} frames, and a clip may have {limits.frames}: "
        f"{rather}",
    )  # fmt: skip


def _warnings(wish: Wish, frame: tuple[int, int], frames: int) -> list[str]:
    found: list[str] = []
    if wish.size is not None and frame != wish.size:
        found.append(f"size {wish.size[0]}x{wish.size[1]} is made as {frame[0]}x{frame[1]}: sides are whole tokens")
    if wish.frames is not None and frames != wish.frames:
        found.append(f"{wish.frames} frames are made as {frames}: the decoder makes groups, and one")
    if frames > DRIFTS_FROM:
        found.append(
            f"{frames} frames are more than the {DRIFTS_FROM} that the model was trained on: the end may drift"
        )
    return found


def too_large(profile: Profile, clip: Clip, lease: int) -> str | None:
    """Say with all numbers that a clip's predicted peak is above the lease; None when it fits."""
    if profile.need(clip.tokens) <= lease:
        return None
    known = f"measured on {profile.measured} jobs" if profile.calibrated else "uncalibrated"
    return (
        f"{clip.width}x{clip.height} is predicted to take {show_size(profile.peak(clip.tokens))} ({known}) and "
        f"{show_size(profile.margin)} are kept as margin, together {show_size(profile.need(clip.tokens))}: more than "
        f"the lease of {show_size(lease)}; ask for a smaller size"
    )

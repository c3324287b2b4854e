"""Memory model of video jobs: predicts the peak of a clip in bytes, and learns from measured peaks. Pure.

The denoiser's weights and the runtime are constant. One part grows with the pixels of a frame: the slices that the
decoder works on. Measured on a 14-billion-parameter pair of experts at 8 bits in low-memory mode, with one expert
loaded: `peak = 17.5 + 0.0029 × spatial tokens` GiB. A token is a square of 16 × 16 pixels (8 of the decoder times 2 of
a patch). The margin is 6 GiB. Frames and steps had no effect up to 121 and 50. Other influences are bounded by the
limits of a clip (`clip_plan`), and by the worker's watchdog, which ends a job that exceeds its lease.

Of the 17.5 GiB, 14.35 are the loaded expert. A package of another size therefore has `its expert + 3.15 GiB` as its
base. An engine from 0.18.17 on keeps an expert that is stored at 8 bits in memory at 16 bits, almost twice the size.
Every combination of package, engine version and quantization has its own profile, which is uncalibrated until a job was
measured. A measured peak above the prediction raises the base; nothing lowers it.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from coordinator.video.state.clip_plan import Clip
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

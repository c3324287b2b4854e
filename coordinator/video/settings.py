"""The `video` section of the coordinator's settings."""

from typing import Annotated, Literal

from msgspec import Meta

from coordinator.video.state.job_table import JobRules
from coordinator.video.state.memory_model import ClipLimits
from host.settings_loader import Section
from wire.units import parse_size

Size = Annotated[str, Meta(pattern=r"^\s*\d+(\.\d+)?\s*[A-Za-z]*\s*$")]


class VideoSettings(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of video jobs: limits of requests, leases and retention."""

    enabled: Annotated[
        bool, Meta(description="Make videos on nodes that can. Without such nodes nothing of it runs, on or off.")
    ] = True
    lease: Annotated[
        Size, Meta(description="Memory that a job borrows of one node: the most that its worker may take, all in all.")
    ] = "36GiB"
    queue: Annotated[int, Meta(ge=1, le=1000, description="Jobs that may wait; one more is refused with 429.")] = 4
    steps: Annotated[int, Meta(ge=1, le=1000, description="Denoising steps of a job that names none.")] = 20
    max_steps: Annotated[int, Meta(ge=1, le=1000, description="Most denoising steps of a job.")] = 50
    max_frames: Annotated[int, Meta(ge=5, le=10_000, description="Most frames of a clip.")] = 121
    max_pixels: Annotated[int, Meta(ge=1024, description="Most pixels of a frame; 1280x720 has 921600.")] = 921_600
    on_node_loss: Annotated[
        Literal["fail", "requeue"],
        Meta(description="A job whose node or worker is lost: fail it, or make it again from the beginning."),
    ] = "fail"
    away_seconds: Annotated[
        float, Meta(gt=0, description="How long a node with a running job may be away before the job counts as lost.")
    ] = 60.0
    lease_seconds: Annotated[
        float, Meta(gt=0, description="How long a node may take to answer whether it lends memory.")
    ] = 30.0
    start_seconds: Annotated[
        float, Meta(gt=0, description="How long a worker may take to start once memory is lent.")
    ] = 90.0
    room_seconds: Annotated[
        float, Meta(gt=0, description="How long the first in line may wait for room while no other video is made.")
    ] = 3600.0
    keep_hours: Annotated[float, Meta(gt=0, description="How long a clip is kept.")] = 24.0
    keep_count: Annotated[int, Meta(ge=1, description="Most clips that are kept; the oldest go first.")] = 50
    keep_bytes: Annotated[Size, Meta(description="Most bytes of clips that are kept; the oldest go first.")] = "50GiB"
    poll_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="How often clients are told to ask (openai-poll-after-ms).")
    ] = 2.0

    @property
    def lease_bytes(self) -> int:
        """The size of a lease."""
        return parse_size(self.lease)

    @property
    def limits(self) -> ClipLimits:
        """The most that a clip may be."""
        return ClipLimits(self.max_frames, self.max_steps, self.max_pixels)

    @property
    def rules(self) -> JobRules:
        """Limits of the job table."""
        return JobRules(
            self.on_node_loss,
            lease_seconds=self.lease_seconds,
            start_seconds=self.start_seconds,
            away_seconds=self.away_seconds,
            room_seconds=self.room_seconds,
            keep_seconds=self.keep_hours * 3600,
            keep_count=self.keep_count,
            keep_bytes=parse_size(self.keep_bytes),
        )

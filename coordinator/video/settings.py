"""Section `video` of the coordinator's settings."""

from typing import Annotated, Literal

from msgspec import Meta

from coordinator.video.state.clip_plan import ClipLimits
from coordinator.video.state.job_table import JobRules
from host.settings_loader import Section
from wire.units import parse_size

Size = Annotated[str, Meta(pattern=r"^\s*\d+(\.\d+)?\s*(([KMGTkmgt][Ii]?)?[Bb])?\s*$")]


class VideoSettings(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of video jobs: limits of requests, leases and retention."""

    enabled: Annotated[
        bool, Meta(description="Accept video jobs on capable nodes. Without such nodes no video process runs.")
    ] = True
    lease: Annotated[
        Size, Meta(description="Memory of one job on a node: the maximum for its worker process in all.")
    ] = "36GiB"
    queue_limit: Annotated[
        int, Meta(ge=1, le=1000, description="Maximum queued jobs. Further jobs are refused with 429.")
    ] = 4
    default_steps: Annotated[
        int, Meta(ge=1, le=1000, description="Denoising steps of a job that requests no number.")
    ] = 20
    max_steps: Annotated[int, Meta(ge=1, le=1000, description="Maximum denoising steps of a job.")] = 50
    max_frames: Annotated[int, Meta(ge=5, le=10_000, description="Maximum frames of a clip.")] = 121
    max_pixels: Annotated[int, Meta(ge=1024, description="Maximum pixels of a frame; 1280x720 has 921600.")] = 921_600
    on_node_loss: Annotated[
        Literal["fail", "requeue"],
        Meta(description="Action for a job whose node or worker is lost: fail, or restart it from the beginning."),
    ] = "fail"
    node_loss_timeout_seconds: Annotated[
        float, Meta(gt=0, description="Maximum absence of a node with a running job. After it the job counts as lost.")
    ] = 60.0
    lease_ack_timeout_seconds: Annotated[
        float, Meta(gt=0, description="Maximum wait for the answer of a node to a lease request.")
    ] = 30.0
    start_timeout_seconds: Annotated[
        float, Meta(gt=0, description="Maximum time from the lease to the start of the worker.")
    ] = 90.0
    queue_timeout_seconds: Annotated[
        float,
        Meta(
            gt=0, description="Maximum wait of the first queued job for memory, unless it waits only for other videos."
        ),
    ] = 3600.0
    keep_hours: Annotated[float, Meta(gt=0, description="Hours for which a clip is kept.")] = 24.0
    keep_count: Annotated[int, Meta(ge=1, description="Maximum clips that are kept. The oldest is deleted first.")] = 50
    keep_bytes: Annotated[
        Size, Meta(description="Maximum bytes of the clips that are kept. The oldest is deleted first.")
    ] = "50GiB"
    poll_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="Poll interval that clients are asked to use (openai-poll-after-ms).")
    ] = 2.0

    @property
    def lease_bytes(self) -> int:
        """Size of a lease in bytes."""
        return parse_size(self.lease)

    @property
    def limits(self) -> ClipLimits:
        """Maximum frames, denoising steps, and pixels of a frame of a clip."""
        return ClipLimits(self.max_frames, self.max_steps, self.max_pixels)

    @property
    def rules(self) -> JobRules:
        """Settings that the job table needs, with sizes in bytes and times in seconds."""
        return JobRules(
            self.on_node_loss,
            lease_seconds=self.lease_ack_timeout_seconds,
            start_seconds=self.start_timeout_seconds,
            away_seconds=self.node_loss_timeout_seconds,
            headroom_seconds=self.queue_timeout_seconds,
            keep_seconds=self.keep_hours * 3600,
            keep_count=self.keep_count,
            keep_bytes=parse_size(self.keep_bytes),
        )

"""Statistics and users of a loaded model: speeds of its forwards, its memory profile, and the holds of its users."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from node.engine.scheduling.rules.chunk_policy import ChunkPace, PrefillSpeed, update_mean
from wire.report import ROW_COST

if TYPE_CHECKING:
    from node.engine.models.profile import MemoryProfile

MIN_MEASURED_TOKENS = 64
"""Minimum prompt tokens from which bytes per token are measured."""
FIRST_PREFILL_TOKENS_PER_SECOND = 50.0
"""Tokens per second that `estimate_prefill_seconds` assumes before the first measured prefill."""


@dataclass(slots=True, eq=False)
class ModelStats:
    """Measurements of a loaded model. Only its own methods change them."""

    prefill_speed: PrefillSpeed = field(default_factory=PrefillSpeed)
    """Speed of prefills, in tokens per second."""
    decode_speed: PrefillSpeed = field(default_factory=PrefillSpeed)
    """Speed of a row that decodes alone, in tokens per second, computed from steps of any number of rows
    (`record_step`)."""
    step_seconds: float = 0.0
    """Running mean of the seconds of a decode step over all rows of a batch. For an encoder: seconds of a forward in
    its warm-up."""
    pace: ChunkPace = field(default_factory=ChunkPace)
    """Pace of prefill chunks, from which their durations follow."""
    load_seconds: float = 0.0
    """Duration of the model's load, in seconds."""
    bytes_per_token: float = 0.0
    """Running mean of text bytes per prompt token; 0.0: not measured."""
    profile: "MemoryProfile | None" = None
    """Memory profile, stored or measured; None before that."""

    def estimate_prefill_seconds(self, tokens: int) -> float:
        """Return the expected seconds of a prefill forward of `tokens` tokens, from the speed of earlier prefills."""
        return tokens / (self.prefill_speed.late or FIRST_PREFILL_TOKENS_PER_SECOND)

    def record_prefill(self, tokens: int, seconds: float, back: float) -> None:
        """Record a prefill forward of `tokens` tokens that took `seconds`. `back` is the mean number of earlier tokens
        to which each token attended."""
        self.prefill_speed.learn(tokens / max(seconds, 1e-6))
        self.pace.learn(tokens, back, seconds)

    def record_step(self, seconds: float, rows: int) -> None:
        """Record a decode step of `rows` rows that took `seconds`, and derive the speed of a single row.

        Both values are running means, because the load of the machine varies from step to step.
        """
        self.step_seconds = update_mean(self.step_seconds, seconds)
        self.decode_speed.learn((1 + ROW_COST * (rows - 1)) / max(seconds, 1e-6))

    def record_text(self, size: int, tokens: int) -> None:
        """Update the mean bytes per token from a prompt of `size` bytes and `tokens` tokens. Ignore short prompts,
        which are mostly template."""
        if tokens >= MIN_MEASURED_TOKENS and size:
            self.bytes_per_token = update_mean(self.bytes_per_token, size / tokens)

    def record_load(self, seconds: float) -> None:
        """Record the duration of the model's load, in seconds."""
        self.load_seconds = seconds

    def record_profile(self, profile: "MemoryProfile") -> None:
        """Set the memory profile, stored or newly measured. It replaces an earlier profile."""
        self.profile = profile


def create_warmed_stats(prefill_speed: float, step_seconds: float) -> ModelStats:
    """Return the statistics after a warm-up with these measurements: tokens per second of a prefill, and seconds of a
    decode step."""
    stats = ModelStats(step_seconds=step_seconds, pace=ChunkPace(step_seconds, 1 / prefill_speed))
    stats.prefill_speed.learn(prefill_speed)
    stats.decode_speed.learn(1 / step_seconds)
    return stats


class ModelUsage:
    """Users of a loaded model: requests, sweeps and tokenizations. A model in use is unloaded only at the end of
    the process."""

    def __init__(self) -> None:
        self._holds: set[ModelHold] = set()
        self.used_at = 0.0
        """Monotonic time of the last use, or of the end of the load before the first use."""

    @property
    def users(self) -> int:
        """Number of users."""
        return len(self._holds)

    def hold(self) -> "ModelHold":
        """Add a user, and return its hold, which must be released at the end of the use."""
        hold = ModelHold(self._holds)
        self._holds.add(hold)
        return hold

    def mark_used(self, now: float) -> None:
        """Record that the model was in use until the monotonic time `now`."""
        self.used_at = max(self.used_at, now)

    def compute_idle_seconds(self, now: float) -> float:
        """Return the seconds since the last use at the monotonic time `now`; 0.0 while the model is in use."""
        return 0.0 if self._holds else now - self.used_at


class ModelHold:
    """Hold of one user on a loaded model, which keeps the model in memory (`ModelUsage.hold`). A second `release` does
    nothing. As a context manager, a hold releases itself at the end of the block."""

    __slots__ = ("_holds",)

    def __init__(self, holds: "set[ModelHold]") -> None:
        self._holds = holds

    def release(self) -> None:
        """Remove this user of the model."""
        self._holds.discard(self)

    def __enter__(self) -> None:
        """Keep the model in memory until the context ends."""

    def __exit__(self, *_: object) -> None:
        self.release()

"""Frames between agent and engine only."""

from typing import Annotated

from msgspec import Meta

from wire.bounds import (
    MAX_MESSAGES,
    Difference,
    Natural,
    Number,
    Seconds,
    Size,
    Text,
    Word,
)
from wire.frames.frame import Frame
from wire.histogram import GateMeasures
from wire.report import (
    CacheState,
    EngineCounters,
    Memory,
    MemoryLevel,
    Model,
    WireStruct,
)


class MemoryLimits(Frame, frozen=True, array_like=True, gc=False):
    """Agent → engine: the memory limits in force."""

    cap: Size
    ceiling: Size
    margin: Size
    bound_by: Word
    guard: bool = True
    leases: Size = 0
    number: Number = 0
    """Grows with every frame; the engine reports the one in force."""
    margin_auto: bool = False
    """Whether the margin is a default, which a profile of the loaded models may replace."""


class ReduceMemory(Frame, frozen=True, array_like=True, gc=False):
    """Agent → engine: the engine is above a limit.

    OVER_SOFT: free unused memory (free buffers, reusable cache, idle models). OVER_HARD: also end the newest request
    if that frees less than `excess` bytes.
    """

    poll: Number
    level: MemoryLevel
    excess: Difference = 0


class ReclaimMemory(Frame, frozen=True, array_like=True, gc=False):
    """Agent → engine: free memory until `size` bytes fit.

    The engine frees buffers, reusable cache and idle models that are not pinned. It frees nothing if that would not
    suffice.
    """

    number: Number
    """Grows with every frame."""
    size: Size


class ModelBan(WireStruct, frozen=True, array_like=True, gc=False):
    """A model that must not be loaded for a time."""

    model: Word
    seconds: Seconds
    """Remaining time."""
    cause: Text
    """Reason."""


class RestoreModels(Frame, frozen=True, array_like=True, gc=False):
    """Agent → new engine: load models again, and do not load banned ones."""

    models: Annotated[tuple[Word, ...], Meta(max_length=MAX_MESSAGES)] = ()
    bans: Annotated[tuple[ModelBan, ...], Meta(max_length=MAX_MESSAGES)] = ()


class StopEngine(Frame, frozen=True, array_like=True, gc=False):
    """Agent → engine: end the process after the native call in progress, with all memory freed. Last frame."""

    seconds: Seconds
    """Time limit."""


class EngineReport(Frame, frozen=True, array_like=True, gc=False):
    """Engine → agent: state published by the inference thread."""

    memory: Memory
    """Judged by the limits of number `limits_number`."""
    models: Annotated[tuple[Model, ...], Meta(max_length=MAX_MESSAGES)]
    running: Natural
    waiting: Natural
    queued_tokens: Natural = 0
    acked_seq: Number = 0
    counts: EngineCounters = EngineCounters()
    cache: CacheState = CacheState()
    limits_number: Number = 0
    """Number of the Limits in force."""
    enforced: Number = 0
    """Number of the last Enforce that was applied."""
    unreturned: Difference = 0
    """Bytes that stayed allocated after the last model was unloaded."""
    measures: GateMeasures = GateMeasures()
    """Answer to `FetchRequest('metrics')`."""
    freed_order: Number = 0
    """Number of the last `ReclaimMemory` that was applied."""
    metal_limit: Size = 0
    """Memory that the Metal device recommends at most; 0 if unknown."""
    wired: Size = 0
    """Bytes that MLX may keep wired."""

"""Frames between agent and engine that the coordinator never sees: limits, memory orders, and reports of the engine."""

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
    """Agent → engine: the memory limits to apply from now on, in bytes (see `wire.report.Memory`)."""

    cap: Size
    ceiling: Size
    margin: Size
    bound_by: Word
    """Name of the term that sets the ceiling, as in `wire.report.Memory.bound_by`."""
    guard: bool = True
    """Whether requests are refused for lack of memory."""
    leases: Size = 0
    """Bytes leased to a video job or a quantization."""
    number: Number = 0
    """Sequence number, which grows with every frame. `EngineReport.limits_number` has the number in force."""
    margin_auto: bool = False
    """Whether the margin is a default, which a profile of the loaded models may replace."""


class ReduceMemory(Frame, frozen=True, array_like=True, gc=False):
    """Agent → engine: reduce the memory of the engine, because the engine is above a limit.

    OVER_SOFT: free unused memory (free buffers, reusable cache, idle models). OVER_HARD: if that frees less than
    `excess` bytes, also abort a load in progress. If that is still not enough, end the newest request.
    """

    poll: Number
    """Sequence number of the agent's memory poll, which the engine repeats in `EngineReport.enforced`."""
    level: MemoryLevel
    """Limit that the engine exceeds: OVER_SOFT or OVER_HARD."""
    excess: Difference = 0
    """Bytes above cap − leases, with OVER_HARD; 0 with OVER_SOFT."""


class ReclaimMemory(Frame, frozen=True, array_like=True, gc=False):
    """Agent → engine: free memory until `size` bytes fit.

    The engine frees buffers, reusable cache, idle models that are not pinned, and a load for which no request waits. If
    all of these would not suffice, the engine frees only buffers.
    """

    number: Number
    """Sequence number, which the engine repeats in `EngineReport.freed_order`."""
    size: Size
    """Bytes that must fit."""


class ModelBan(WireStruct, frozen=True, array_like=True, gc=False):
    """Quarantine of a model that crashed the engine: the engine refuses to load this model for a time."""

    model: Word
    seconds: Seconds
    """Seconds until the quarantine ends."""
    cause: Text
    """Reason of the quarantine, as text for users."""


class RestoreModels(Frame, frozen=True, array_like=True, gc=False):
    """Agent → new engine: load the models of the previous engine again, except those in quarantine."""

    models: Annotated[tuple[Word, ...], Meta(max_length=MAX_MESSAGES)] = ()
    bans: Annotated[tuple[ModelBan, ...], Meta(max_length=MAX_MESSAGES)] = ()


class StopEngine(Frame, frozen=True, array_like=True, gc=False):
    """Agent → engine: free all memory and end the process after the native call in progress.

    The agent sends no frame after this one.
    """

    seconds: Seconds
    """Seconds after which the engine exits in any state."""


class RescanModels(Frame, frozen=True, array_like=True, gc=False):
    """Agent → engine: search for models now, because files of a model were added or removed."""


class EngineReport(Frame, frozen=True, array_like=True, gc=False):
    """Engine → agent: state of the engine, published by its inference thread."""

    memory: Memory
    """Memory of the engine under the limits with the sequence number `limits_number`."""
    models: Annotated[tuple[Model, ...], Meta(max_length=MAX_MESSAGES)]
    running: Natural
    """Number of requests that run in the engine."""
    waiting: Natural
    """Number of requests that wait in the queue of the engine."""
    queued_tokens: Natural = 0
    """Prompt tokens of the engine's requests that are not prefilled yet."""
    acked_seq: Number = 0
    """Highest `seq` of a Generate or Embed that the engine has admitted, queued or refused; 0 before the first.

    `memory.reserved` counts the admitted ones.
    """
    counts: EngineCounters = EngineCounters()
    cache: CacheState = CacheState()
    limits_number: Number = 0
    """Sequence number of the limits in force (`MemoryLimits.number`); 0 before the first."""
    enforced: Number = 0
    """`poll` of the last ReduceMemory that was applied; 0 before the first."""
    unreturned: Difference = 0
    """Bytes that stayed allocated after the last model was unloaded; 0 within a tolerance, or after the next load."""
    measures: GateMeasures = GateMeasures()
    """Counts of the gate, with which the agent answers `FetchRequest("metrics")`."""
    freed_order: Number = 0
    """Sequence number of the last ReclaimMemory that was applied; 0 before the first."""
    metal_limit: Size = 0
    """Metal limit: the most memory in bytes that the Metal device recommends to use; 0 if unknown."""
    wired: Size = 0
    """Bytes that MLX may keep wired; 0 for none."""

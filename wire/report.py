"""Report of a node, sent twice a second while the node is busy: input of placement and of the tables.

Sizes are bytes, speeds are tokens per second, times are seconds. Fields are only appended, never reordered. A reader
uses defaults for fields that an older node does not send, and ignores unknown fields.
"""

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from wire.bounds import (
    MAX_GROUPS,
    MAX_ITEMS,
    Blob,
    Difference,
    Estimate,
    Natural,
    Real,
    Seconds,
    Size,
    Text,
    Tokens,
    Word,
)
from wire.units import MIB

CACHE_STEP_TOKENS = 256
"""Tokens by which the KV caches of mlx-lm grow (`KVCache.step`)."""
MAX_WASTE_BYTES = 256 * MIB
"""Bytes of padding below which a second batch does not pay, unless memory is short."""


class WireStruct(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of every struct inside a frame."""


class MemoryLevel(IntEnum):
    """Memory level of a node (`wire.capacity.arithmetic.level`); UNKNOWN if its footprint cannot be read."""

    UNKNOWN = 0
    OK = 1
    OVER_SOFT = 2
    OVER_HARD = 3


class Hardware(WireStruct, frozen=True, array_like=True, gc=False):
    """Hardware and system of a machine, sent once in `Hello`."""

    chip: Text = ""
    memory: Size = 0
    cores: Natural = 0
    system: Text = ""
    python: Text = ""


class Memory(WireStruct, frozen=True, array_like=True, gc=False):
    """A consistent memory reading of an engine, and the limits in force at that moment (docs/memory.md).

    If `phys` is None, `headroom` is None and the node receives no new request.
    """

    cap: Size = 0
    ceiling: Size = 0
    margin: Size = 0
    phys: Size | None = None
    """Footprint of the engine's process; None if it could not be read."""
    active: Size = 0
    """Active memory of MLX."""
    recent: Size = 0
    """Highest reading of the last seconds."""
    current: Size | None = None
    """Maximum of `active`, `phys` and `recent`."""
    reserved: Size = 0
    headroom: Difference | None = None
    leases: Size = 0
    bound_by: Word = ""
    """Name of the term that sets the ceiling."""
    guard: bool = True
    armed: bool = False
    source: Word = ""
    """Source of `phys`: `statm`, `phys_footprint` or `scripted`."""
    age: Seconds = 0.0
    """Age of the reading when the report was written."""
    total: Size = 0
    """Memory of the machine."""
    base: Size = 0
    """Footprint of the engine before any model is loaded. Requests cannot use these bytes."""
    reusable: Size = 0
    """Bytes of `current` that the engine frees before it refuses a request: prefix cache and canary. Set in reports
    only. Placement counts these bytes as free; the gate does not until they are freed."""
    cache: Size = 0
    """Free buffers that MLX keeps. For display."""
    peak: Size = 0
    """Highest active memory of MLX since its last reset. For display."""
    reserve: Size = 0
    """Last reserve, part of `current`; freed before anything else."""


class BatchGroup(WireStruct, frozen=True, array_like=True, gc=False):
    """A padded decode batch. Its memory is that of `rows` rows of `longest` tokens."""

    rows: Natural = 0
    longest: Tokens = 0
    """Tokens of the longest row."""
    tokens: Natural = 0
    """Tokens of all rows without padding."""


class TransientModel(WireStruct, frozen=True, array_like=True, gc=False):
    """Fitted model of the transient memory of a forward, without the KV that it writes.

    All values are bytes, except `window` and `floor`. Formulas: `wire.capacity.arithmetic.prefill_transient` and
    `wire.capacity.arithmetic.step_transient`.
    """

    fixed: Real = 0.0
    """Prefill: constant."""
    token: Real = 0.0
    """Prefill: for each token."""
    pair: Real = 0.0
    """Prefill: for each pair of a token and a token that it attends to."""
    seen: Real = 0.0
    """For each attended token when a cache grows, because caches are copied layer by layer."""
    least: Real = 0.0
    """Prefill: minimum for each token, for models whose layers without attention need more."""
    logits: Real = 0.0
    """Prefill: for each token of a forward that computes logits."""
    step_fixed: Real = 0.0
    """Decode step: constant."""
    step_row: Real = 0.0
    """Decode step: for each row."""
    step_seen: Real = 0.0
    """Decode step: for each row and each token of the longest row."""
    window: Natural = 0
    """Most tokens that a token attends to, if all layers have a sliding window; else 0."""
    floor: Tokens = 0
    """Smallest prefill chunk when memory is short, in tokens."""


ROW_COST = 0.1
"""Share by which each further row lengthens a decode step: 0.06 measured on a CPU; not measured on a Mac."""


class Model(WireStruct, frozen=True, array_like=True, gc=False):
    """A model that the node can serve."""

    name: Word
    fingerprint: Word = ""
    loaded: bool = False
    weights: Estimate = 0
    """Bytes of the weights."""
    kv_per_token: Estimate = 0
    """Bytes of a row for each of its tokens. See `wire.capacity.arithmetic.row_bytes` for all fields of a row."""
    transient: Estimate = 0
    """Transient bytes of the smallest prefill chunk at the start of a prompt. `forward` covers every forward."""
    context: Natural = 0
    """Context length in tokens."""
    load_seconds: Real = 0.0
    prefill_speed: Real = 0.0
    decode_speed: Real = 0.0
    """Tokens per second of a row that decodes alone; see `ROW_COST`."""
    bytes_per_token: Real = 4.0
    """Measured bytes of request text per prompt token."""
    features: Annotated[tuple[Word, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Features of requests beyond plain sampling that the model supports."""
    groups: Annotated[tuple[BatchGroup, ...], Meta(max_length=MAX_GROUPS)] = ()
    expected_output: Natural = 256
    """Tokens of a usual answer."""
    kv_step: Natural = 1
    """Tokens by which the cache of a row grows."""
    kv_fixed: Estimate = 0
    """Bytes of a row of any length."""
    kv_window: Natural = 0
    """Tokens of the sliding window; 0 without one."""
    kv_window_per_token: Estimate = 0
    """Bytes of a row for each of the last `kv_window` tokens."""
    loading: bool = False
    cause: Text = ""
    """Reason why the model cannot be loaded; empty if it can."""
    forward: TransientModel = TransientModel()
    profiled: bool = False
    """Whether the model was measured on this machine."""
    max_context: Natural = 0
    """Tokens of the longest row that fits on the idle node."""
    max_batch: Natural = 0
    """Rows of usual length that fit on the idle node."""
    observed: Estimate = 0
    """Highest transient that was measured, in bytes."""
    kv_waste: Size = MAX_WASTE_BYTES
    """Bytes of padding that a batch may always have."""
    progress: Real = 0.0
    """Share of the weights that a load in progress has read, 0 to 1; 0 without one."""
    residual: Estimate = 0
    """Most bytes by which a forward exceeded its estimate."""
    covered: Natural = 0
    """Tokens of the largest prefill chunk that was measured."""
    covered_rows: Natural = 0
    """Rows of the widest decode step that was measured."""
    uncovered: Estimate = 0
    """Bytes charged to a wider step, because the margin was narrowed for measured forwards only; 0 if the margin in
    force covers all widths."""
    pinned: bool = False
    """Whether the model is preloaded and never unloaded for another one."""

    @property
    def kv(self) -> "KvParameters":
        """Memory parameters of a row."""
        return KvParameters(
            self.kv_per_token, self.kv_step, self.kv_fixed, self.kv_window, self.kv_window_per_token, self.kv_waste
        )


class KvParameters(msgspec.Struct, frozen=True, gc=False):
    """Memory parameters of a row; `waste` are the bytes of padding that a batch may always have. See `Model`."""

    per_token: int
    step: int = 1
    fixed: int = 0
    window: int = 0
    window_per_token: int = 0
    waste: int = MAX_WASTE_BYTES


class EngineCounters(WireStruct, frozen=True, gc=False):
    """Counts since the engine's process started."""

    checks: Natural = 0
    """Checks of the gate."""
    refusals: Natural = 0
    """Refusals of the gate."""
    forwards: Natural = 0
    """Prefills and joins, each of which follows a check."""
    steps: Natural = 0
    """Decode steps."""
    failures: Natural = 0
    """Requests that ended because of an error in the engine."""
    sheds: Natural = 0
    """Requests that the engine ended because the agent found it above its cap."""
    evictions: Natural = 0
    """Idle models that were unloaded for memory."""
    shrinks: Natural = 0
    """Prefill chunks that were reduced to fit."""
    preemptions: Natural = 0
    """Requests that were preempted and continued later."""
    overs: Natural = 0
    """Forwards after which the engine found itself above its cap."""
    departures: Natural = 0
    """Models that were unloaded because they were idle for long."""


class CacheState(WireStruct, frozen=True, gc=False):
    """State of the prefix cache, with counts since the engine's process started."""

    nbytes: Size = 0
    entries: Natural = 0
    hits: Natural = 0
    hit_tokens: Natural = 0
    """Prompt tokens that were found in the cache."""
    stores: Natural = 0
    evictions: Natural = 0
    evicted: Annotated[tuple[Blob, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Prompt hashes (`Admitted.prompt_hash`) of the newest evictions; the last has the number `evictions`."""


class EngineState(WireStruct, frozen=True, array_like=True, gc=False):
    """State of the engine's process, as its agent sees it."""

    kind: Word = ""
    state: Word = "starting"
    """`starting`, `ready`, `hung`, `restarting` or `failed`."""
    cause: Text = ""
    """Reason of the state."""
    restarts: Natural = 0
    """Number of times that the process died."""
    running: Natural = 0
    waiting: Natural = 0
    queued_tokens: Natural = 0
    counts: EngineCounters = EngineCounters()
    cache: CacheState = CacheState()
    recycles: Natural = 0
    """Number of times that a healthy process was replaced, because unloaded models did not release their memory."""
    rows: Natural = 0
    """Maximum number of rows that decode at once; 0 if unknown."""
    wired: Size = 0
    """Bytes that MLX may keep wired; 0 for none."""
    leaked: Difference = 0
    """Wired bytes that ended engines left behind. Only a restart of the machine frees them."""


class SystemMemory(WireStruct, frozen=True, array_like=True, gc=False):
    """Memory of the machine, as the agent reads it."""

    available: Size | None = None
    """Bytes that can be allocated without displacing other programs; None if unknown."""
    pressure: Word = ""
    """Memory pressure of the system: `normal`, `warn`, `critical`, or empty if unknown."""
    source: Word = ""
    """Source of both values."""
    age: Seconds = 0.0
    """Age of both values when the report was written."""
    worker: Size = 0
    """Footprint of the node's video worker."""


class Sharing(WireStruct, frozen=True, array_like=True, gc=False):
    """Sharing rule of the Mac's owner, and whether the node is paused."""

    when: Word = ""
    """Rule: `always`, `plugged-in`, `idle` or `hours`; empty from a node that cannot be paused."""
    paused: bool = False
    why: Text = ""
    """Reason of the pause."""
    until: Real | None = None
    """Unix time at which the pause ends, by the node's clock; None if unknown."""
    by_hand: bool = False
    """Whether a person paused the node."""


class Enforcement(WireStruct, frozen=True, array_like=True, gc=False):
    """Readings and counts of the agent's enforcer. Counts survive a restart of the engine."""

    level: Natural = MemoryLevel.UNKNOWN
    phys: Size | None = None
    """Footprint of the engine, read by the agent."""
    highest: Size | None = None
    """High-water mark of the footprint by the kernel, for display."""
    interval: Size | None = None
    """High-water mark since its last reset, for display."""
    cap_bound_by: Word = ""
    """Name of the term that sets the cap."""
    remedy: Text = ""
    """Advice about the term that limits the node now."""
    tier: Word = ""
    warnings: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Reasons why this node is less safe than possible."""
    polls: Natural = 0
    over_caps: Natural = 0
    """Number of times that the engine was above its cap."""
    kills: Natural = 0
    """Number of times that the engine was killed for that."""

"""Parts of a node's report: memory, models, engine and sharing. `wire.frames.Report` carries them.

A node reports every `report_busy_seconds` while busy, about every `report_idle_seconds` while idle, and after changes.
Sizes are bytes, speeds are tokens per second, times are seconds. Fields are only appended, never reordered. A reader
uses defaults for fields that an older node does not send, and ignores unknown fields.
"""

from enum import IntEnum
from functools import cached_property
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
from wire.models.version import ModelVersion
from wire.units import MIB

CACHE_STEP_TOKENS = 256
"""Tokens by which the KV caches of mlx-lm grow (`KVCache.step`)."""
MAX_WASTE_BYTES = 256 * MIB
"""Maximum of `KvParameters.waste`, in bytes: less padding costs less than a second decode batch."""


class WireStruct(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all frames and of every struct inside a frame: immutable, and encoded as an array."""


class MemoryLevel(IntEnum):
    """Memory level of a node (`wire.capacity.arithmetic.compute_level`); UNKNOWN if the level cannot be computed."""

    UNKNOWN = 0
    OK = 1
    OVER_SOFT = 2
    """The headroom is negative; unused memory is freed."""
    OVER_HARD = 3
    """The engine is above cap − leases; requests are ended."""


class Hardware(WireStruct, frozen=True, array_like=True, gc=False):
    """Hardware and system of a machine, sent once in `Enroll` and in `Hello`."""

    chip: Text = ""
    """Name of the processor, such as "Apple M5 Max"."""
    memory: Size = 0
    """RAM in bytes, or the limit of the container if that is less; 0 if unreadable."""
    cores: Natural = 0
    """Number of logical processors; 0 if unknown."""
    system: Text = ""
    """Operating system with version, such as "macOS 26.1"."""
    python: Text = ""
    """Version of Python that the agent runs on; empty if unknown."""


class Memory(WireStruct, frozen=True, array_like=True, gc=False):
    """Consistent memory reading of an engine, and the limits in force at that moment, in bytes (docs/memory.md)."""

    cap: Size = 0
    """Bytes that the engine may use; 0 in an engine that has received no limits."""
    ceiling: Size = 0
    """Bytes that the engine may use at this moment: the cap, or less while leases or other programs use memory."""
    margin: Size = 0
    """Bytes of the cap that are kept free for buffers of forwards."""
    phys: Size | None = None
    """Footprint of the engine's process in bytes; None if unreadable. With `guard`, the node gets no request then."""
    active: Size = 0
    """Active memory of MLX in bytes."""
    recent: Size = 0
    """Recent peak: highest number of bytes in use in the last seconds."""
    current: Size | None = None
    """Bytes in use: the maximum of `active`, `phys` and `recent`; None if `phys` is None."""
    reserved: Size = 0
    """Bytes committed to admitted requests and to loads, and not yet in use."""
    headroom: Difference | None = None
    """Bytes for new requests (`compute_headroom`); negative above a limit, None if `phys` is None."""
    leases: Size = 0
    """Bytes leased to a video job or a quantization."""
    bound_by: Word = ""
    """Term that sets the ceiling: `leases`, `dynamic` (other programs), `unreadable`, or the term that sets the cap."""
    guard: bool = True
    """Whether requests are refused for lack of memory (setting `memory.guard`)."""
    armed: bool = False
    """Whether the gate refuses requests that do not fit: the cap is above 0, the guard is on, the reading is live."""
    source: Word = ""
    """Source of `phys`: `statm`, `phys_footprint`, `scripted` or `modelled` (simulation); empty before a reading."""
    age: Seconds = 0.0
    """Age of the reading when the report was written, in seconds. In a node's report: of the engine's newest report."""
    total: Size = 0
    """RAM of the machine in bytes, or the limit of its container if that is less; 0 if unreadable."""
    base: Size = 0
    """Footprint of the engine in bytes before any model is loaded. No request can use these bytes."""
    reusable: Size = 0
    """Bytes of `current` that the engine frees before it refuses a request: prefix cache and emergency reserve. Set in
    reports only. Placement counts these bytes as free; the gate does not until they are freed."""
    cache: Size = 0
    """Bytes of the free buffers that MLX keeps. For display."""
    peak: Size = 0
    """Highest active memory of MLX in bytes since its last reset. For display."""
    reserve: Size = 0
    """Bytes of the emergency reserve, a part of `current` that the engine frees before any other memory."""


class BatchGroup(WireStruct, frozen=True, array_like=True, gc=False):
    """A decode batch of `rows` sequences of a model. Padded, it takes the memory of `rows` rows of `longest` tokens."""

    rows: Natural = 0
    longest: Tokens = 0
    """Tokens of the longest row of the batch."""
    tokens: Natural = 0
    """Tokens of all rows of the batch, without padding; 0 if no other row may join the batch."""


class TransientModel(WireStruct, frozen=True, array_like=True, gc=False):
    """Fitted model of the transient bytes of a forward, without the KV that it writes. Coefficients are in bytes.
    Formulas: `estimate_prefill_transient` and `estimate_step_transient` of `wire.capacity.arithmetic`."""

    fixed: Real = 0.0
    """Prefill: constant bytes."""
    token: Real = 0.0
    """Prefill: bytes for each token."""
    pair: Real = 0.0
    """Prefill: bytes for each pair of a token and a token that it attends to."""
    seen: Real = 0.0
    """Bytes for each attended token when a cache grows, because caches are copied layer by layer."""
    least: Real = 0.0
    """Prefill: minimum bytes for each token, for models whose layers without attention need more than attention."""
    logits: Real = 0.0
    """Prefill that computes logits: minimum bytes for each token, if all terms but `fixed` yield less."""
    step_fixed: Real = 0.0
    """Decode step: constant bytes."""
    step_row: Real = 0.0
    """Decode step: bytes for each row."""
    step_seen: Real = 0.0
    """Decode step: bytes for each token of the longest row, at most `window` if that is not 0, in each row."""
    window: Natural = 0
    """Maximum tokens that a token attends to, if all layers have a sliding window; else 0."""
    floor: Tokens = 0
    """Smallest prefill chunk when memory is short, in tokens."""


ROW_COST = 0.1
"""Share by which each further row lengthens a decode step: 0.06 measured on a CPU; not measured on a Mac."""


class Model(WireStruct, frozen=True, array_like=True, gc=True, dict=True):  # for cached values
    """A model in the catalogue of a node, with its state and the measurements that placement needs."""

    name: Word
    fingerprint: Word = ""
    """Hash of the configuration, and of headers and samples of the weights (`version`); empty if unknown."""
    loaded: bool = False
    weights: Estimate = 0
    """Bytes of the weights in memory, also before they are loaded."""
    kv_per_token: Estimate = 0
    """Bytes of a row for each of its tokens. See `wire.capacity.batches.compute_row_bytes` for all fields of a row."""
    transient: Estimate = 0
    """Transient bytes of the smallest prefill chunk at the start of a prompt. `forward` covers every forward."""
    context: Natural = 0
    """Context length in tokens; 0 if unknown."""
    load_seconds: Real = 0.0
    """Duration of a load in seconds: measured for a loaded model, else expected."""
    prefill_speed: Real = 0.0
    """Prompt tokens per second; 0 before the first measurement, and for a model that is not loaded."""
    decode_speed: Real = 0.0
    """Tokens per second of a row that decodes alone; see `ROW_COST`. 0 has the same meaning as in `prefill_speed`."""
    bytes_per_token: Real = 4.0
    """Measured bytes of request text per prompt token; a default before the first measurement."""
    features: Annotated[tuple[Word, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Features that requests may use, such as `tools`. A model for embeddings or scores has only its kind here."""
    groups: Annotated[tuple[BatchGroup, ...], Meta(max_length=MAX_GROUPS)] = ()
    """Current decode batches of the model."""
    expected_output: Natural = 256
    """Usual length of an answer in tokens, for predictions of memory and time."""
    kv_step: Natural = 1
    """Tokens by which the cache of a row grows."""
    kv_fixed: Estimate = 0
    """Bytes that every row with a token takes, in addition to the bytes for its tokens."""
    kv_window: Natural = 0
    """Tokens of the sliding window; 0 without one."""
    kv_window_per_token: Estimate = 0
    """Bytes of a row for each of the last `kv_window` tokens."""
    loading: bool = False
    """Whether a load is in progress or queued."""
    cause: Text = ""
    """Reason why the model cannot be loaded; empty if it can."""
    forward: TransientModel = TransientModel()
    """Model of the transient memory of every forward."""
    profiled: bool = False
    """Whether the model was measured on this machine."""
    max_context: Natural = 0
    """Tokens of the longest row that fits on the idle node; 0 for a model that is not loaded."""
    max_batch: Natural = 0
    """Rows of 2,048 tokens that fit on the idle node, at most the batch limit; 0 for a model that is not loaded."""
    observed: Estimate = 0
    """Highest transient that was measured, in bytes; 0 before."""
    kv_waste: Size = MAX_WASTE_BYTES
    """Bytes of padding that a batch may always have."""
    progress: Real = 0.0
    """Share of the weights that a load in progress has read, 0 to 1; 0 without one."""
    residual: Estimate = 0
    """Maximum bytes by which a measured forward exceeded its estimate."""
    covered: Natural = 0
    """Tokens of the largest prefill chunk that was measured; 0 if `profiled` is False."""
    covered_rows: Natural = 0
    """Rows of the widest decode step that was measured; 0 for none."""
    uncovered: Estimate = 0
    """Bytes charged to a decode step of more than `covered_rows` rows; 0 if the margin in force covers all steps."""
    pinned: bool = False
    """Whether the model is preloaded and never unloaded for another one."""
    content: Word = ""
    """Hash of the content of the model's files that change answers; empty until they are hashed."""
    quantization: Word = ""
    """Quantization of the weights: `4-bit`, a method such as `fp8`, or `16-bit floats`; empty from an older node."""
    stored: Size = 0
    """Bytes of the model's files on the disk."""
    used: Seconds = 0.0
    """Unix time in seconds of the last request for this model on this node; 0 if unknown."""
    removable: bool = False
    """Whether the node can delete the files: they are in the Hugging Face cache or in a model folder."""
    written: Seconds = 0.0
    """Unix time in seconds of the newest change of the files, such as their download; 0 if unknown."""

    @cached_property
    def version(self) -> ModelVersion:
        """Identity of the model's files."""
        return ModelVersion(self.fingerprint, self.content)

    @cached_property
    def kv(self) -> "KvParameters":
        """Fields of this model from which `wire.capacity.batches.compute_row_bytes` computes the memory of a row."""
        return KvParameters(
            self.kv_per_token, self.kv_step, self.kv_fixed, self.kv_window, self.kv_window_per_token, self.kv_waste
        )


class KvParameters(msgspec.Struct, frozen=True, gc=False):
    """Parameters of the KV memory of a row: the fields `kv_…` of `Model` without their prefix."""

    per_token: int
    step: int = 1
    fixed: int = 0
    window: int = 0
    window_per_token: int = 0
    waste: int = MAX_WASTE_BYTES


class EngineCounters(WireStruct, frozen=True, gc=False):
    """Counts of an engine since its process started."""

    checks: Natural = 0
    """Number of checks by the memory gate since the engine's process started."""
    refusals: Natural = 0
    """Number of refusals by the memory gate since the engine's process started."""
    forwards: Natural = 0
    """Forwards that each follow a check of the gate: prefills, joins, and parts of forwards for embeddings."""
    steps: Natural = 0
    """Number of decode steps since the engine's process started."""
    failures: Natural = 0
    """Requests that ended because of an error in the engine."""
    sheds: Natural = 0
    """Requests that the engine ended because the engine or the agent found it above cap − leases."""
    evictions: Natural = 0
    """Number of idle models that were unloaded to free memory."""
    shrinks: Natural = 0
    """Times that a prefill, or a forward for embeddings, was made smaller to fit: fewer tokens or fewer texts."""
    preemptions: Natural = 0
    """Number of preemptions. A preempted request continues when memory or rows are free."""
    overs: Natural = 0
    """Forwards after which the engine found itself above cap − leases."""
    departures: Natural = 0
    """Number of models that were unloaded because no request used them for long."""
    prefill_tokens: Natural = 0
    """Prompt tokens that forwards have computed. Tokens from the prefix cache are not among them."""
    returned_tokens: Natural = 0
    """Tokens of rows that returned to a batch after a preemption or after their batch broke."""
    recomputed_tokens: Natural = 0
    """Tokens of `returned_tokens` that forwards have computed again. The rest came from the prefix cache."""


class ModelCache(WireStruct, frozen=True, gc=False):
    """Cached prefixes of a model, in memory and on the disk. Hits count since the engine process started."""

    model: Word = ""
    """Name of the model, or the fingerprint of a deleted model whose files remain in the cache."""
    nbytes: Size = 0
    """Bytes of the model's cached prefixes in memory."""
    entries: Natural = 0
    """Number of the model's cached prefixes in memory."""
    hits: Natural = 0
    """Number of requests that reused a prefix of the model in memory."""
    disk_bytes: Size = 0
    """Bytes of the files on the disk. Files of several models with equal content count for the first name only."""
    disk_files: Natural = 0
    disk_hits: Natural = 0
    """Number of prompts of the model that were restored from the disk."""


class CacheState(WireStruct, frozen=True, gc=False):
    """State of an engine's prefix cache, with counts since its process started."""

    nbytes: Size = 0
    """Bytes of all cached prefixes in memory."""
    entries: Natural = 0
    """Number of cached prefixes in memory."""
    hits: Natural = 0
    """Number of requests that reused a cached prefix in memory."""
    hit_tokens: Natural = 0
    """Prompt tokens that the requests of `hits` reused from memory."""
    stores: Natural = 0
    """Number of prefixes that were stored."""
    evictions: Natural = 0
    """Number of prefixes that are no longer cached, neither in memory nor on the disk."""
    evicted: Annotated[tuple[Blob, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Prompt hashes (`Admitted.prompt_hash`) of the newest of all `evictions`, oldest first."""
    disk_bytes: Size = 0
    """Bytes of all files of the disk cache; 0 without one."""
    disk_files: Natural = 0
    disk_hits: Natural = 0
    """Number of prompts that were restored from the disk."""
    disk_hit_tokens: Natural = 0
    """Prompt tokens that were restored from the disk."""
    disk_read_bytes: Natural = 0
    """Bytes that were read from the disk for the restored prompts."""
    disk_saves: Natural = 0
    """Number of parts of prefixes that were passed to the writer of the disk cache."""
    disk_persisted: Natural = 0
    """Number of parts that were written completely."""
    disk_drops: Natural = 0
    """Number of parts dropped unwritten: no memory, quota or write budget, a failed write, or a cleared cache."""
    disk_errors: Natural = 0
    """Number of parts that could not be written or read."""
    disk_evictions: Natural = 0
    """Number of files that were deleted for newer ones."""
    store: Word = ""
    """Identity of the folder of the disk cache, which outlives the engine process; empty without a disk cache."""
    disk_waiting: Natural = 0
    """Number of prefixes, and of parts of prefixes, that wait to be written."""
    disk_quota: Size = 0
    """Bytes that the files may have now (setting `engine.mlx.disk_cache_size`)."""
    disk_budget: Size = 0
    """Bytes that may be written now: a share of the disk per day. Unused bytes add up to at most one day."""
    models: Annotated[tuple[ModelCache, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Cached prefixes by model."""


class EngineState(WireStruct, frozen=True, array_like=True, gc=False):
    """State of the engine's process, as its agent sees it."""

    kind: Word = ""
    """Kind of engine: `mlx` or `scripted`; `modelled` on a simulated node."""
    state: Word = "starting"
    """Stage of the engine's process (`EngineStage`): `starting`, `ready`, `hung`, `restarting` or `failed`."""
    cause: Text = ""
    """Reason of the last end, hang or replacement of a process; empty before the first."""
    restarts: Natural = 0
    """Number of times that the process died or could not be started. Replacements count in `recycles`."""
    running: Natural = 0
    """Number of requests that run in the engine."""
    waiting: Natural = 0
    """Number of requests that wait in the queue of the engine."""
    queued_tokens: Natural = 0
    """Prompt tokens of the engine's requests that are not prefilled yet."""
    counts: EngineCounters = EngineCounters()
    cache: CacheState = CacheState()
    recycles: Natural = 0
    """Number of times that a healthy process was replaced, to release memory or because sharing stopped or resumed."""
    rows: Natural = 0
    """Maximum number of rows that decode at once; 0 if unknown."""
    wired: Size = 0
    """Bytes that MLX may keep wired; 0 for none."""
    leaked: Difference = 0
    """Wired bytes that ended engines left behind. Often only a restart of the machine frees them."""


class Sharing(WireStruct, frozen=True, array_like=True, gc=False):
    """Whether a node accepts work, by the sharing rule of the Mac's owner or a pause."""

    when: Word = ""
    """Rule: `always`, `plugged-in`, `idle` or `hours`; empty from a node that cannot be paused."""
    paused: bool = False
    """Whether the node accepts no work, by the rule or by a pause."""
    why: Text = ""
    """Reason why the node accepts no work; empty if it accepts work."""
    until: Real | None = None
    """Unix time in seconds, by the node's clock, at which the pause ends; None if unknown, or without such a time."""
    by_hand: bool = False
    """Whether a person paused the node."""

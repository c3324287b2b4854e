"""Sanitize the report of a node, whose values may be wrong.

`build_node_view` converts a report into values that the placement arithmetic can use: no NaN, no infinity, no negative
size, count or time. An impossible value never increases the headroom of a node. An impossible footprint counts as
unreadable, and the router then places no requests on the node. A model with an impossible size is omitted. The node's
own gate still decides which requests run. Texts are bounded and printable, because people read them in terminals.
"""

import math
import re

import msgspec
from msgspec.structs import replace

from router.placement.cluster_view import NodeView
from wire.enforcer_report import Enforcement
from wire.frames import Report
from wire.identity import NodeId, is_valid_model, is_valid_name
from wire.machine import Disk, SystemMemory
from wire.report import (
    BatchGroup,
    CacheState,
    EngineCounters,
    EngineState,
    Memory,
    MemoryLevel,
    Model,
    ModelCache,
    Sharing,
)
from wire.video import LeaseState, VideoPackage, VideoState

UNMEASURED_PREFILL = 200.0
"""Prefill speed of a node without a measurement, in tokens per second; low, so that measured nodes are preferred."""
UNMEASURED_DECODE = 20.0
"""Decode speed of a node without a measurement, in tokens per second."""
MIN_SPEED = 0.001
"""Minimum of a measured speed, in tokens per second. A lower speed counts as unmeasured."""
UNMEASURED_RATIO = 4.0
"""Bytes of request text per prompt token until the node has measured the ratio: English prose."""
MAX_CONTEXT = 100_000_000
"""Maximum context of a model, in tokens."""
MAX_LOAD_SECONDS = 600.0
"""Maximum load time of a model and maximum age of a reading, in seconds. An impossible value counts as this maximum."""
MAX_UNIX_SECONDS = 2.0**33
"""Maximum end of a pause and maximum time of the last use of a model, in Unix seconds: the year 2242."""
MAX_EXPECTED_OUTPUT = 32_768
"""Maximum expected output of a model, in tokens."""
MAX_MODELS = 512
"""Maximum number of models read from one report."""
MAX_TEXT_CHARS = 300
"""Maximum characters of a text in a report."""
MAX_BYTES = 2**60
"""Maximum of each size of a model or a video package, in bytes: a sum of a few sizes must stay a 64-bit integer."""
MAX_QUANTIZATION_CHARS = 20
"""Maximum characters of the name of a quantization."""
MAX_EVICTIONS, MAX_HASH_BYTES = 64, 32
"""Maximum evictions of a node's prefix cache read from one report, and maximum bytes of each hash."""
MAX_WARNINGS = 8
"""Maximum warnings read from one report."""
MAX_KV_STEP = 65_536
"""Maximum tokens by which the cache of a row grows (`Model.kv_step`)."""
MAX_PACKAGES, MAX_LEASES = 64, 16
"""Maximum video packages and leases read from one report."""
MAX_SIDE, MAX_FRAMES, MAX_FPS = 1024, 64, 1000
"""Maximum pixels per side and frames of one token of a video package, and maximum frames per second."""
_LEASE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_RATIOS = (0.25, 64.0)
"""Minimum and maximum of a plausible ratio of text bytes to prompt tokens."""


def build_node_view(
    report: Report,
    *,
    node: NodeId,
    name: str,
    state: str,
    reported_at: float,
    cordoned: bool = False,
    epoch: int = 0,
    labels: frozenset[str] = frozenset(),
    video_allowed: bool = False,
    frames: frozenset[int] = frozenset(),
    awaited: bool = False,
) -> NodeView:
    """Build the view of a node from its report and its membership. Impossible values are corrected or omitted.

    `NodeView` describes the other arguments at its fields with their names.
    """
    return NodeView(
        id=node,
        name=name if is_valid_name(name) else str(node),
        state=state,
        cordoned=cordoned,
        reported_at=reported_at,
        epoch=epoch,
        memory=sanitize_memory(report.memory),
        engine=_sanitize_engine(report.engine),
        models=_sanitize_models(report.models),
        acked_seq=max(0, report.acked_seq),
        draining=report.draining,
        system=_sanitize_system(report.system),
        enforcement=_sanitize_enforcement(report.enforcement),
        labels=labels,
        video_allowed=video_allowed,
        video=sanitize_video(report.video),
        sharing=_sanitize_sharing(report.sharing),
        illegal_events=report.illegal_events,
        disk=Disk(report.disk.free, report.disk.total, _make_printable(report.disk.folder)),
        frames=frames,
        awaited=awaited,
    )


def sanitize_video(video: VideoState) -> VideoState:
    """Return a node's video state with corrected values, without impossible packages and leases."""
    packages = tuple(
        _sanitize_package(package) for package in video.packages[:MAX_PACKAGES] if _is_possible_package(package)
    )
    leases = tuple(_sanitize_lease(lease) for lease in video.leases[:MAX_LEASES] if _LEASE_NAME.fullmatch(lease.lease))
    ray = video.ray if _LEASE_NAME.fullmatch(video.ray) else ""
    return VideoState(
        video.ready,
        _make_printable(video.cause),
        ray,
        packages,
        leases,
        _make_printable(video.ray_cause),
        video.allowed,
    )


def _is_possible_package(package: VideoPackage) -> bool:
    return (
        is_valid_model(package.name)
        and 8 <= package.token_side <= MAX_SIDE
        and 1 <= package.token_frames <= MAX_FRAMES
        and 1 <= package.fps <= MAX_FPS
        and all(0 <= size <= MAX_BYTES for size in (package.weights, package.expert))
    )


def _sanitize_package(package: VideoPackage) -> VideoPackage:
    return replace(
        package,
        engine=_make_printable(package.engine)[:40],
        pipeline=_make_printable(package.pipeline),
        fingerprint=_make_printable(package.fingerprint),
        cause=_make_printable(package.cause),
        bits=max(0, package.bits),
    )


def _sanitize_lease(lease: LeaseState) -> LeaseState:
    return replace(
        lease,
        job=_make_printable(lease.job),
        phase=_make_printable(lease.phase)[:40],
        size=max(0, lease.size),
        progress=min(100, max(0, lease.progress)),
        step=max(0, lease.step),
        steps=max(0, lease.steps),
        footprint=max(0, lease.footprint),
        peak=max(0, min(lease.peak, MAX_BYTES)),
    )


def sanitize_memory(memory: Memory) -> Memory:
    """Return a memory reading with impossible numbers corrected. A negative footprint becomes None (unreadable)."""
    phys = memory.phys
    return replace(
        memory,
        cap=max(0, memory.cap),
        ceiling=max(0, memory.ceiling),
        margin=max(0, memory.margin),
        phys=None if phys is None or phys < 0 else phys,
        active=max(0, memory.active),
        recent=max(0, memory.recent),
        reserved=max(0, memory.reserved),
        leases=max(0, memory.leases),
        age=_limit_seconds(memory.age),
        total=max(0, memory.total),
        base=max(0, memory.base),
        reusable=max(0, min(memory.reusable, memory.active)),
        cache=max(0, memory.cache),
        peak=max(0, memory.peak),
        current=_sanitize_size(memory.current),
        reserve=max(0, memory.reserve),
        bound_by=_make_printable(memory.bound_by),
        source=_make_printable(memory.source),
    )


def _sanitize_engine(engine: EngineState) -> EngineState:
    return replace(
        engine,
        kind=_make_printable(engine.kind),
        state=_make_printable(engine.state),
        cause=_make_printable(engine.cause),
        restarts=max(0, engine.restarts),
        recycles=max(0, engine.recycles),
        leaked=max(0, engine.leaked),
        running=max(0, engine.running),
        waiting=max(0, engine.waiting),
        queued_tokens=max(0, engine.queued_tokens),
        rows=max(0, engine.rows),
        wired=max(0, engine.wired),
        counts=EngineCounters(*(max(0, count) for count in msgspec.structs.astuple(engine.counts))),
        cache=_sanitize_cache(engine.cache),
    )


def _sanitize_model_cache(entry: ModelCache) -> ModelCache:
    name, *counts = msgspec.structs.astuple(entry)
    return ModelCache(_make_printable(name), *(max(0, count) for count in counts))


def _sanitize_cache(cache: CacheState) -> CacheState:
    evicted = tuple(prompt_hash[:MAX_HASH_BYTES] for prompt_hash in cache.evicted[-MAX_EVICTIONS:])
    return CacheState(
        nbytes=max(0, cache.nbytes),
        entries=max(0, cache.entries),
        hits=max(0, cache.hits),
        hit_tokens=max(0, cache.hit_tokens),
        stores=max(0, cache.stores),
        evictions=max(0, cache.evictions),
        evicted=evicted,
        disk_bytes=max(0, cache.disk_bytes),
        disk_files=max(0, cache.disk_files),
        disk_hits=max(0, cache.disk_hits),
        disk_hit_tokens=max(0, cache.disk_hit_tokens),
        disk_read_bytes=max(0, cache.disk_read_bytes),
        disk_saves=max(0, cache.disk_saves),
        disk_persisted=max(0, cache.disk_persisted),
        disk_drops=max(0, cache.disk_drops),
        disk_errors=max(0, cache.disk_errors),
        disk_evictions=max(0, cache.disk_evictions),
        store=_make_printable(cache.store),
        disk_waiting=max(0, cache.disk_waiting),
        disk_quota=max(0, cache.disk_quota),
        disk_budget=max(0, cache.disk_budget),
        models=tuple(_sanitize_model_cache(entry) for entry in cache.models),
    )


def _sanitize_system(system: SystemMemory) -> SystemMemory:
    return SystemMemory(
        _sanitize_size(system.available),
        _make_printable(system.pressure),
        _make_printable(system.source),
        _limit_seconds(system.age),
        max(0, system.worker),
    )


def _sanitize_enforcement(enforcement: Enforcement) -> Enforcement:
    return Enforcement(
        enforcement.level if enforcement.level in tuple(MemoryLevel) else MemoryLevel.UNKNOWN,
        _sanitize_size(enforcement.phys),
        _sanitize_size(enforcement.highest),
        _sanitize_size(enforcement.interval),
        _make_printable(enforcement.cap_bound_by),
        _make_printable(enforcement.remedy),
        _make_printable(enforcement.tier),
        tuple(_make_printable(text) for text in enforcement.warnings[:MAX_WARNINGS]),
        max(0, enforcement.polls),
        max(0, enforcement.over_caps),
        max(0, enforcement.kills),
    )


def _sanitize_sharing(sharing: Sharing) -> Sharing:
    until = None if sharing.until is None else _replace_out_of_range(sharing.until, 0.0, MAX_UNIX_SECONDS, 0.0)
    return Sharing(
        _make_printable(sharing.when)[:20], sharing.paused, _make_printable(sharing.why), until or None, sharing.by_hand
    )


def _sanitize_size(size: int | None) -> int | None:
    return None if size is None or size < 0 else size


def _make_printable(text: str) -> str:
    """Return the first `MAX_TEXT_CHARS` characters of a node's text, with `?` for each unprintable one."""
    text = text[:MAX_TEXT_CHARS]
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def _sanitize_models(models: tuple[Model, ...]) -> dict[str, Model]:
    return {model.name: _sanitize_model(model) for model in reversed(models[:MAX_MODELS]) if _is_possible_model(model)}


def _is_possible_model(model: Model) -> bool:
    sizes = (
        model.weights,
        model.kv_per_token,
        model.transient,
        model.kv_fixed,
        model.kv_window,
        model.kv_waste,
        model.kv_window_per_token,
        *msgspec.structs.astuple(model.forward),
    )
    possible = all(0 <= size <= MAX_BYTES for size in sizes)
    return is_valid_model(model.name) and possible and 1 <= model.kv_step <= MAX_KV_STEP


def _sanitize_model(model: Model) -> Model:
    return replace(
        model,
        context=min(max(0, model.context), MAX_CONTEXT),
        load_seconds=_limit_seconds(model.load_seconds),
        prefill_speed=_sanitize_speed(model.prefill_speed, UNMEASURED_PREFILL),
        decode_speed=_sanitize_speed(model.decode_speed, UNMEASURED_DECODE),
        bytes_per_token=_replace_out_of_range(model.bytes_per_token, *_RATIOS, UNMEASURED_RATIO),
        groups=tuple(group for group in model.groups if _is_possible_group(group)),
        expected_output=min(model.expected_output, MAX_EXPECTED_OUTPUT) if model.expected_output > 0 else 256,
        loading=model.loading and not model.loaded,
        progress=_replace_out_of_range(model.progress, 0.0, 1.0, 0.0) if model.loading and not model.loaded else 0.0,
        cause="" if model.loaded else _make_printable(model.cause),
        fingerprint=_make_printable(model.fingerprint),
        content=_make_printable(model.content),
        quantization=_make_printable(model.quantization)[:MAX_QUANTIZATION_CHARS],
        used=_replace_out_of_range(model.used, 0.0, MAX_UNIX_SECONDS, 0.0),
        written=_replace_out_of_range(model.written, 0.0, MAX_UNIX_SECONDS, 0.0),
    )


def _is_possible_group(group: BatchGroup) -> bool:
    return group.rows > 0 and group.longest >= 0


def _sanitize_speed(speed: float, unmeasured: float) -> float:
    return speed if math.isfinite(speed) and speed >= MIN_SPEED else unmeasured


def _limit_seconds(seconds: float) -> float:
    """Return a load time or the age of a reading.

    A negative, too large or undefined value is `MAX_LOAD_SECONDS`, because 0 would mean a loaded model or a new
    reading.
    """
    return _replace_out_of_range(seconds, 0.0, MAX_LOAD_SECONDS, MAX_LOAD_SECONDS)


def _replace_out_of_range(value: float, least: float, most: float, replacement: float) -> float:
    return value if least <= value <= most else replacement

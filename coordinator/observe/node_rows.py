"""Rows of the API for nodes and their models, and warnings about nodes. Sizes are in bytes."""

from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict

from coordinator.cluster.member_state import Member
from coordinator.state.rows import MemberRow
from coordinator.video.rows import build_video_row
from router.placement.cluster_view import NodeView
from wire.capacity.arithmetic import compute_most_bytes
from wire.enforcer_report import Enforcement
from wire.node_state import NodeState
from wire.report import EngineState, Memory, MemoryLevel, Model, Sharing
from wire.units import show_size


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts about a node that are not in its report."""

    reported: bool
    """Whether the node has sent a report since the coordinator started."""
    version: str
    """Version of Macpool that the node runs; empty if unknown."""
    protocol: int
    """Protocol version of the node; 0 if unknown."""
    in_flight: int
    """Number of requests on the node, counted by the coordinator."""
    reported_seconds_ago: float | None
    """Seconds since the newest report; None before the first."""


def build_node_row(view: NodeView, member: Member, row: MemberRow, facts: NodeFacts) -> dict[str, Any]:
    """Return a node as a row of the API, with sizes in bytes. None means unknown."""
    return {
        **_build_member_fields(member, row, facts, view.sharing),
        **_build_memory_fields(view.memory, reported=facts.reported),
        **_build_enforcement_fields(view),
        "in_flight": facts.in_flight,
        "running": view.engine.running,
        "waiting": view.engine.waiting,
        "heard_seconds": facts.reported_seconds_ago,
        "joined": row.joined,
        "engine": _build_engine_row(view.engine, reported=facts.reported),
        "models": [_build_model_row(model) for model in view.models.values()],
        "video": build_video_row(view.video, allowed=view.video_allowed),
        "disk": asdict(view.disk),
    }


def _build_member_fields(member: Member, row: MemberRow, facts: NodeFacts, sharing: Sharing) -> dict[str, Any]:
    return {
        "id": row.node,
        "name": row.name,
        "state": member.state.value,
        "reason": member.reason,
        "cordoned": member.cordoned,
        "sharing": asdict(sharing),
        "labels": list(row.labels),
        "chip": row.hardware.chip,
        "memory": row.hardware.memory,
        "system": row.hardware.system,
        "version": facts.version,
        "protocol": facts.protocol,
    }


def _build_memory_fields(memory: Memory, *, reported: bool) -> dict[str, Any]:
    return {
        "cap": memory.cap,
        "ceiling": memory.ceiling,
        "margin": memory.margin,
        "phys": memory.phys if reported else None,
        "active": memory.active,
        "recent": memory.recent,
        "current": memory.current if reported else None,
        "reserved": memory.reserved,
        "headroom": memory.headroom if reported else None,
        "reusable": memory.reusable,
        "leases": memory.leases,
        "bound_by": memory.bound_by,
        "gate_armed": memory.armed and memory.guard,
        "guard": memory.guard,
        "source": memory.source,
        "age": memory.age,
        "base": memory.base,
        "cache": memory.cache,
        "peak": memory.peak,
        "reserve": memory.reserve,
    }


def _build_enforcement_fields(view: NodeView) -> dict[str, Any]:
    return {
        "cap_bound_by": view.enforcement.cap_bound_by,
        "remedy": view.enforcement.remedy,
        "tier": view.enforcement.tier,
        "system_memory": asdict(view.system),
        "enforcement": build_enforcement_row(view.enforcement),
    }


def build_enforcement_row(enforcement: Enforcement) -> dict[str, Any]:
    """Return the readings and actions of a node's memory enforcer as a row of the API."""
    return {
        "level": MemoryLevel(enforcement.level).name.lower(),
        "phys": enforcement.phys,
        "highest": enforcement.highest,
        "interval": enforcement.interval,
        "polls": enforcement.polls,
        "over_caps": enforcement.over_caps,
        "kills": enforcement.kills,
        "warnings": list(enforcement.warnings),
    }


def _build_engine_row(engine: EngineState, *, reported: bool) -> dict[str, Any]:
    return {
        "kind": engine.kind,
        "state": engine.state if reported else "",
        "cause": engine.cause,
        "restarts": engine.restarts,
        "rows": engine.rows,
        "recycles": engine.recycles,
        "wired": engine.wired,
        "leaked": engine.leaked,
        "counts": asdict(engine.counts),
        "cache": {
            **asdict(engine.cache),
            "evicted": [eviction.hex() for eviction in engine.cache.evicted],
            "models": [asdict(model) for model in engine.cache.models],
        },
    }


def _build_model_row(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "loaded": model.loaded,
        **get_model_state(model),
        "weights": model.weights,
        "context": model.context,
        **get_speeds(model),
        "measured": get_measured_memory(model),
    }


def get_model_state(model: Model) -> dict[str, Any]:
    """Return the state of a model on a node as a row: loaded, loading, known or failed.

    A known model loads at its first request. `progress` is 0 to 1; `cause` is set for a failed model.
    """
    if model.loaded:
        return {"model": "loaded", "cause": "", "progress": 1.0}
    if model.loading:
        return {"model": "loading", "cause": "", "progress": model.progress}
    return {"model": "failed" if model.cause else "known", "cause": model.cause, "progress": 0.0}


def get_speeds(model: Model) -> dict[str, float]:
    """Return the prefill and decode speeds of a model that placement uses, in tokens per second.

    The decode speed is that of a single request. Values are recent measurements, or estimates before the first
    measurement.
    """
    return {"prefill_speed": round(model.prefill_speed, 1), "decode_speed": round(model.decode_speed, 1)}


def get_measured_memory(model: Model) -> dict[str, object] | None:
    """Return the measured memory of a model in bytes, and its limits in tokens and rows; None before a measurement."""
    if not model.profiled:
        return None
    return {
        "max_context": model.max_context,
        "max_batch": model.max_batch,
        "kv_per_token": model.kv_per_token,
        "transient": model.observed,
        "residual": model.residual,
        "covered": model.covered,
    }


def can_answer(view: NodeView) -> bool:
    """Return whether a node can answer a request now. A cordoned node can.

    Its state is ready, its engine is ready, its gate is armed or off, and at least one of its models can be loaded.
    """
    armed = view.memory.armed or not view.memory.guard
    served = any(not model.cause for model in view.models.values())
    return view.state == NodeState.READY and view.engine.state == "ready" and armed and served


def list_warnings(view: NodeView) -> list[str]:
    """Return texts about conditions of a node that prevent requests. They concern its gate, memory or engine."""
    memory, engine, warnings = view.memory, view.engine, list[str]()
    if memory.guard and not memory.armed and view.state == NodeState.READY and engine.state != "starting":
        warnings.append(f"its gate is not armed: it refuses every request ({engine.state})")
    if memory.guard and memory.cap and compute_most_bytes(memory) <= 0:
        warnings.append(
            f"its cap of {show_size(memory.cap)} leaves no memory after the engine itself and the margin of "
            f"{show_size(memory.margin)}: raise memory.cap or lower memory.margin"
        )
    if engine.state in ("failed", "restarting", "hung"):
        warnings.append(f"its engine is {engine.state}: {engine.cause}")
    return warnings


def list_dangers(view: NodeView) -> list[str]:
    """Return texts about reduced memory protection of a node, and about memory usage above its cap.

    The node's own warnings come first. Texts about a guard that is off and a margin of 0 are added unless a warning
    names them.
    """
    memory, dangers = view.memory, list(view.enforcement.warnings)
    if not memory.guard and not any("memory.guard is off" in text for text in dangers):
        dangers.append("memory.guard is off: its memory can exceed the cap")
    if memory.cap and not memory.margin and not any("memory.margin is 0" in text for text in dangers):
        dangers.append("memory.margin is 0: no memory is kept for short-lived buffers")
    if view.enforcement.level == MemoryLevel.OVER_HARD:
        dangers.append(f"it is over its cap of {show_size(memory.cap)} minus leases")
    return dangers

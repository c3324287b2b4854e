"""Rows of the API for video models, memory profiles and leases. Sizes are in bytes."""

from typing import Any

from msgspec.structs import asdict

from coordinator.video.state.job_table import JobTable, LeaseHold
from coordinator.video.state.jobs import VideoJob
from coordinator.video.state.lease_placement import Profiles, explain_denial, get_profile
from coordinator.video.state.memory_model import VideoMemoryProfile
from router.placement.cluster_view import ClusterView, NodeView
from wire.identity import NodeId
from wire.video import LeaseState, VideoPackage, VideoState


def build_package_rows(view: ClusterView, profiles: Profiles) -> list[dict[str, Any]]:
    """Return a row for each video model, sorted by name, with its state and memory profile on each node."""
    rows: dict[str, dict[str, Any]] = {}
    for node in view.nodes:
        for package in node.video.packages:
            row = rows.setdefault(package.name, {"name": package.name, "kind": "video", "nodes": []})
            row["nodes"].append(_build_package_row(node, package, get_profile(package, profiles)))
    return [rows[name] for name in sorted(rows)]


def _build_package_row(node: NodeView, package: VideoPackage, profile: VideoMemoryProfile) -> dict[str, Any]:
    return {
        "id": node.id,
        "name": node.name,
        "state": str(node.state),
        "ready": node.video_allowed and node.video.ready and bool(node.video.ray),
        "cause": package.cause or node.video.cause or explain_denial(node) or node.video.ray_cause,
        "weights": package.weights,
        "engine": package.engine,
        "bits": package.bits,
        "profile": _build_profile_fields(profile),
    }


def build_profile_rows(profiles: Profiles) -> list[dict[str, Any]]:
    """Return a row for each stored memory profile, sorted by package, engine and bits.

    `slope` is in bytes per spatial token of a frame.
    """
    return [{**key._asdict(), **_build_profile_fields(profile)} for key, profile in sorted(profiles.items())]


def _build_profile_fields(profile: VideoMemoryProfile) -> dict[str, Any]:
    return {
        "base": profile.base,
        "slope": round(profile.slope),
        "margin": profile.margin,
        "measured": profile.measured,
        "calibrated": profile.calibrated,
    }


def build_lease_row(hold: LeaseHold, table: JobTable, view: ClusterView) -> dict[str, Any]:
    """Return a lease as a row of the API, with phase, progress and footprint from the report of its node.

    `since` is in Unix seconds, `progress` in percent. `orphan` is true if no job uses the lease.
    """
    node, job = view.find_node(NodeId(hold.node)), table.jobs.get(hold.job)
    state = _find_reported_state(hold, node.video) if node is not None else LeaseState(hold.lease, hold.generation)
    return {
        "id": hold.lease,
        "node": hold.node,
        "name": hold.node if node is None else node.name,
        "job": hold.job,
        "generation": hold.generation,
        "size": hold.size,
        "since": hold.since,
        "granted": hold.granted,
        "phase": state.phase or ("granted" if hold.granted else "asked"),
        "progress": state.progress,
        "footprint": state.footprint,
        "peak": state.peak,
        "orphan": not _is_running(hold, job),
    }


def _find_reported_state(hold: LeaseHold, video: VideoState) -> LeaseState:
    return next((lease for lease in video.leases if lease.lease == hold.lease), LeaseState(hold.lease, hold.generation))


def _is_running(hold: LeaseHold, job: VideoJob | None) -> bool:
    return job is not None and job.lease == hold.lease and job.generation == hold.generation


def build_video_row(video: VideoState, *, allowed: bool) -> dict[str, Any]:
    """Return a node's video state as a row of the API. `allowed` is whether the node has permission for video jobs."""
    return {
        "ready": video.ready,
        "allowed": allowed,
        "cause": video.cause,
        "ray": video.ray,
        "ray_cause": video.ray_cause,
        "packages": [asdict(package) for package in video.packages],
        "leases": [asdict(lease) for lease in video.leases],
    }

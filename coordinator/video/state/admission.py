"""Admission of video requests: checks the body against models, limits, the pool's memory and the queue. Pure.

A reason for a refusal that is known before the job is queued is returned at once, with the numbers.
"""

import difflib

from coordinator.video.settings import VideoSettings
from coordinator.video.state.clip_plan import Clip, ClipRefusal, ClipRequest, plan_clip
from coordinator.video.state.job_table import JobTable
from coordinator.video.state.jobs import RequestedClip
from coordinator.video.state.lease_placement import (
    Profiles,
    explain_denial,
    find_nearest_misfit,
    find_packages,
    get_profile,
    is_guard_off,
    list_video_models,
)
from coordinator.video.state.memory_model import explain_too_large
from router.admission.key_scope import filter_view
from router.admission.rate_limits import NO_LIMITS, KeyLimits, refuse_model
from router.dialects.openai.video_schema import VideoBody
from router.errors import Problem, build_invalid, from_refused
from router.placement.cluster_view import ClusterView, NodeView
from wire.node_state import NodeState
from wire.refusals import MemoryNumbers, RefusalCode
from wire.units import show_size
from wire.video import LeaseRefusalCode, VideoPackage

FULL_RETRY_SECONDS = 30.0
"""Seconds in `Retry-After` if the queue is full."""


def admit_clip(
    body: VideoBody,
    view: ClusterView,
    table: JobTable,
    profiles: Profiles,
    settings: VideoSettings,
    limits: KeyLimits | None = None,
) -> RequestedClip | Problem:
    """Check a video request, and return the clip to generate, or the problem with the request.

    `limits` are those of the API key; None: no limits. The problem has status 400 for an invalid or missing parameter,
    403 for a model that is not allowed, and 404 for an unknown model. It has status 413 for a clip that would not fit
    on any idle node, and 429 for a full queue. It has status 503 if videos are off, or if all nodes with the model are
    `READY` and none can make videos now.
    """
    if not settings.enabled:
        return Problem(503, "video_disabled", "videos are switched off here: video.enabled is false")
    limits, view = limits or NO_LIMITS, filter_view(view, limits)
    if body.model is not None and not limits.allows(body.model):
        return from_refused(refuse_model(body.model, limits))
    package = _find_package(body, view)
    if isinstance(package, Problem):
        return package
    clip = plan_clip(_to_clip_request(body), settings.limits, package, settings.default_steps)
    if isinstance(clip, ClipRefusal):
        return build_invalid(clip.message, clip.param)
    return (
        _check_size(view, package, clip, profiles, settings)
        or _check_ready(view, package.name)
        or _check_queue(table, settings)
        or _build_clip(body, package, clip, limits)
    )


def _find_package(body: VideoBody, view: ClusterView) -> VideoPackage | Problem:
    known = list_video_models(view)
    if body.model is None:
        if len(known) == 1:
            return next(iter(known.values()))
        which = f"one of {', '.join(sorted(known)[:10])}" if known else "none is in the pool yet"
        return build_invalid(f"model: name the model ({which})", "model")
    if body.model in known:
        return known[body.model]
    if body.model in view.get_models():
        return build_invalid(f"the model {body.model!r} makes no videos: ask it at /v1/chat/completions", "model")
    causes = [
        f"{node.name}: {package.cause}"
        for node in view.nodes
        for package in node.video.packages
        if package.name == body.model and package.cause
    ]
    near = difflib.get_close_matches(body.model, known, 3, 0.4) or sorted(known)[:3]
    hint = "; ".join(causes[:3]) or (f"the nearest names are {', '.join(near)}" if near else "no node has any")
    return Problem(404, RefusalCode.NO_MODEL, f"no node makes videos with {body.model[:256]!r}: {hint}", "model")


def _to_clip_request(body: VideoBody) -> ClipRequest:
    size = None
    if body.size is not None:
        width, _, height = body.size.partition("x")
        size = int(width), int(height)
    return ClipRequest(size, body.seconds, body.frames, body.fps, body.steps)


def _check_size(
    view: ClusterView, package: VideoPackage, clip: Clip, profiles: Profiles, settings: VideoSettings
) -> Problem | None:
    """Return a 413 problem if the job fits on no known node, even without other load; else None. Absent nodes count."""
    size = settings.lease_bytes
    misfit = find_nearest_misfit(view, package.name, clip.tokens, size, profiles)
    if misfit is None:
        return None
    nearest, why = misfit
    profile = get_profile(nearest, profiles)
    need = profile.compute_need(clip.tokens)
    text = explain_too_large(profile, clip, size) or (
        f"no node could ever lend {show_size(size)}, which video.lease says a job takes ({why})"
    )
    numbers = MemoryNumbers(
        need, size, None, 0, profile.predict_peak(clip.tokens), profile.margin, size, size - need, "video.lease"
    )
    return Problem(413, "video_memory_exceeded", text, "size", numbers)


def _check_ready(view: ClusterView, model: str) -> Problem | None:
    """Return a 503 problem if all nodes with the model are `READY` and none can make videos now.

    Return None if a node with the model is in another state, because that node may return.
    """
    nodes = [node for node, _ in find_packages(view, model)]
    here = [node for node in nodes if node.state == NodeState.READY]
    if len(here) < len(nodes):
        return None
    if is_guard_off(here):
        return Problem(
            503,
            LeaseRefusalCode.GUARD_OFF,
            "memory.guard is off on every node that could make this: no memory is lent without it",
        )
    causes = [_describe_cause(node) for node in here if not node.video.ready or explain_denial(node)]
    if len(causes) < len(here):
        return None
    return Problem(503, LeaseRefusalCode.VIDEO_NOT_READY, f"no node can make videos now: {'; '.join(causes[:5])}")


def _describe_cause(node: NodeView) -> str:
    return f"{node.name}: {node.video.cause or explain_denial(node) or 'it is not ready for videos'}"


def _check_queue(table: JobTable, settings: VideoSettings) -> Problem | None:
    waiting = len(table.waiting)
    if waiting < settings.queue_limit:
        return None
    text = f"{waiting} videos wait already, and video.queue_limit allows {settings.queue_limit}: retry later"
    return Problem(429, RefusalCode.QUEUE_FULL, text, retry_after=FULL_RETRY_SECONDS)


def _build_clip(body: VideoBody, package: VideoPackage, clip: Clip, limits: KeyLimits) -> RequestedClip:
    return RequestedClip(
        package.name,
        body.prompt,
        clip.width,
        clip.height,
        clip.frames,
        clip.fps,
        clip.steps,
        clip.tokens,
        body.negative_prompt or "",
        body.guidance,
        body.guidance_2,
        body.seed,
        clip.warnings,
        limits.labels,
    )

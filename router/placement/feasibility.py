"""Decide whether a node can take a request, regardless of memory."""

from router.placement.candidate import FIRST, AttemptHistory, ResourceDemand
from router.placement.cluster_view import MAX_REPORT_AGE_SECONDS, NodeView, ServedModel
from wire.models.version import ModelVersion
from wire.node_state import NodeState
from wire.refusals import RefusalCode
from wire.report import Model

_FIT: tuple[str, RefusalCode | None] = ("", None)
_READY, _PAUSED = NodeState.READY, NodeState.PAUSED
"""Constants of this module, because Python 3.11 takes 0.1 µs to look up a member of an enumeration."""


def find_infeasible_reason(
    node: NodeView, served: ServedModel, request: ResourceDemand, now: float, trials: AttemptHistory
) -> tuple[str, RefusalCode | None]:
    """Return the reason and the code why a node cannot take a request, regardless of memory.

    The reason is empty and the code None if the node can take the request. `now` is in monotonic seconds. `trials` are
    the earlier attempts of the request.
    """
    if not node.takes_requests or now - node.reported_at > MAX_REPORT_AGE_SECONDS:
        return find_unavailable_reason(node, now)
    model = served.model
    if model.cause:
        return f"cannot load {model.name}: {model.cause}", RefusalCode.LOAD_FAILED
    if served.kind is not request.kind:
        return f"has {model.name} for {served.kind} requests only", RefusalCode.UNSUPPORTED
    if request.features and not request.features.issubset(model.features):
        return f"has {model.name} without {', '.join(sorted(request.features.difference(model.features)))}", (
            RefusalCode.UNSUPPORTED
        )
    if request.prompt_tokens is not None and exceeds_context(model, request):
        return f"has a context of {model.context} tokens, the prompt has {request.prompt_tokens}", RefusalCode.CONTEXT
    return _FIT if trials is FIRST else _find_attempt_reason(node, model, trials)


def find_unavailable_reason(node: NodeView, now: float) -> tuple[str, RefusalCode | None]:
    """Return the reason and the code why a node takes no requests at all at `now` (monotonic seconds).

    The reason is empty and the code None if the node takes requests.
    """
    if node.state == _PAUSED:
        return f"is paused: {node.sharing.why}", RefusalCode.DRAINING
    if node.state != _READY:
        return f"is {node.state}", RefusalCode.NOT_READY
    if node.cordoned:
        return "is cordoned", RefusalCode.NOT_READY
    if node.draining:
        return "is draining", RefusalCode.DRAINING
    if now - node.reported_at > MAX_REPORT_AGE_SECONDS:
        return f"sent its last report {now - node.reported_at:.1f} s ago", RefusalCode.NOT_READY
    engine = node.engine
    if engine.state != "ready":
        return f"has an engine that is {engine.state}" + (
            f": {engine.cause}" if engine.cause else ""
        ), RefusalCode.NOT_READY
    return _FIT


def _find_attempt_reason(node: NodeView, model: Model, trials: AttemptHistory) -> tuple[str, RefusalCode | None]:
    if trials.version is not None and not trials.version.is_same(model.version):
        own, other = _format_version(model.version), _format_version(trials.version)
        return f"has another model {model.name}: {own}, not {other}", RefusalCode.NOT_READY
    if node.id in trials.lost:
        return "was lost with this request", RefusalCode.NOT_READY
    if node.id in trials.never:
        return f"refused this request permanently: {trials.never[node.id].message}", trials.never[node.id].code
    if trials.refused.get(node.id) == node.reported_at:
        return "refused this request and has not reported since", RefusalCode.NO_ROOM
    return _FIT


def _format_version(version: ModelVersion) -> str:
    content = f" and content {version.content[:8]}" if version.content else ""
    return f"fingerprint {version.fingerprint[:8] or 'unknown'}{content}"


def exceeds_context(model: Model, request: ResourceDemand) -> bool:
    """Return whether the prompt leaves no room for an answer in the context of a model.

    Return False if no exact token count or no context length is known.
    """
    return bool(model.context) and request.prompt_tokens is not None and request.prompt_tokens >= model.context

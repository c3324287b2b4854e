"""Build the refusals of placement, which explain why no node takes a request.

A refusal that a request can never fit requires an exact count of the prompt, or a final refusal by every node with the
model. It also requires that no member could hold the request, including sleeping and lost members.
"""

import difflib
import math
from collections.abc import Mapping

from msgspec.structs import replace

from router.placement.candidate import (
    GRAMMAR,
    SAMPLING,
    AttemptHistory,
    Candidate,
    NoPlacement,
    ResourceDemand,
)
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.feasibility import exceeds_context
from router.placement.unload_choice import choose_unloading_node
from router.placement.weights import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, UNKNOWN_RETRY_SECONDS
from wire.capacity.arithmetic import can_ever_fit, estimate_alone_bytes
from wire.identity import NodeId
from wire.models.kind import explain_other_kind, get_kind
from wire.refusals import RefusalCode, Refused
from wire.units import show_size

_MEANT = {SAMPLING: "top_k, min_p, penalties or logit_bias", GRAMMAR: "formats, strict tools or forced calls"}
_MEMORY = frozenset({RefusalCode.NO_ROOM, RefusalCode.UNREADABLE})


def build_refusal(
    view: ClusterView,
    request: ResourceDemand,
    candidates: tuple[Candidate, ...],
    trials: AttemptHistory,
    rates: Mapping[str, float],
) -> NoPlacement:
    """Build the refusal of a request for which none of `candidates` is feasible, and choose `NoPlacement.candidate`.

    `candidates` are all nodes of the view. `trials` are the earlier attempts of the request. `rates` are the expected
    requests per second of each model.
    """
    all_known = [node for node in view.nodes if request.model in node.models]
    if not all_known:
        return NoPlacement(refuse_unknown_model(view, request.model), candidates)
    if request.node:
        all_known = [node for node in all_known if node.id == request.node]
        if not all_known:
            return NoPlacement(_refuse_named_node(view, request), candidates)
    known = [node for node in all_known if request.labels <= node.labels]
    if not known:
        text = f"no node with the labels that this API key is bound to ({', '.join(sorted(request.labels))}) serves"
        return NoPlacement(Refused(RefusalCode.NOT_ALLOWED, f"{text} {request.model}"), candidates)
    causes = {node.id: cause for node in known if (cause := _find_load_failure(node, request, trials))}
    serving = [node for node in known if node.id not in causes]
    if not serving:
        return NoPlacement(_refuse_load_failed(known, request, causes), candidates)
    offers = [candidate for candidate in candidates if candidate.model is not None and candidate.node not in causes]
    kinds = {get_kind(node.models[request.model].features) for node in serving}
    if request.kind not in kinds:
        text = explain_other_kind(request.model, kinds.pop())
        return NoPlacement(Refused(RefusalCode.UNSUPPORTED, text), candidates)
    missing = _name_missing_features(serving, request)
    if missing:
        return NoPlacement(
            Refused(RefusalCode.UNSUPPORTED, f"no node supports {missing} with {request.model}"), candidates
        )
    if request.prompt_tokens is not None or all(node.id in trials.never for node in serving):
        final = _refuse_permanently(serving, request, offers, trials)
        if final is not None:
            return NoPlacement(final, candidates)
    decider = _choose_counting_node(serving, request, offers, trials) or choose_unloading_node(
        view, request, serving, offers, trials, rates
    )
    return NoPlacement(_refuse_for_now(request, offers), candidates, decider)


def _find_load_failure(node: NodeView, request: ResourceDemand, trials: AttemptHistory) -> str:
    """Return why a node cannot load the model, by its report or its answer to this request; empty if it can."""
    failure = trials.never.get(node.id)
    if failure is not None and failure.code is RefusalCode.LOAD_FAILED:
        return failure.message.removeprefix(f"{request.model} cannot be loaded: ")
    return node.models[request.model].cause


def _join(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more}"


def _refuse_load_failed(known: list[NodeView], request: ResourceDemand, causes: Mapping[NodeId, str]) -> Refused:
    details = "; ".join(f"{node.name}: {causes[node.id]}" for node in known[:4])
    more = f"; and {len(known) - 4} more" if len(known) > 4 else ""
    text = f"no node can load {request.model}: {details}{more}"
    return Refused(RefusalCode.LOAD_FAILED, text, None, None, known[0].name if len(known) == 1 else "")


def _name_missing_features(serving: list[NodeView], request: ResourceDemand) -> str:
    """Name the requested features that no member offers with this model, in any state.

    Name all of them if no member offers all together. Return an empty text if a member does.
    """
    offered = [frozenset(node.models[request.model].features) for node in serving]
    if any(request.features <= features for features in offered):
        return ""
    missing = request.features.difference(*offered) or request.features
    return " and ".join(_MEANT.get(feature, feature) for feature in sorted(missing))


def refuse_unknown_model(view: ClusterView, model: str) -> Refused:
    """Return the refusal of a request for a model that no node has reported.

    The refusal is not final while no node has reported a model, or the first report of a node is awaited. For a video
    model, the message names its route; otherwise it names the models with similar names.
    """
    if any(package.name == model for node in view.nodes for package in node.video.packages):
        return Refused(RefusalCode.INVALID, f"the model {model!r} generates videos, not text: use POST /v1/videos")
    known = view.get_models()
    if not known:
        return Refused(
            RefusalCode.NOT_READY,
            "no node has reported a model yet: `cluster nodes` lists the nodes, `cluster join` adds a machine",
            None,
            UNKNOWN_RETRY_SECONDS,
        )
    awaited = [node.name for node in view.nodes if node.awaited]
    if awaited:
        return Refused(
            RefusalCode.NOT_READY,
            f"no node has reported the model {model[:256]!r} yet; awaited are the reports of {_join(awaited)}",
            None,
            UNKNOWN_RETRY_SECONDS,
        )
    near = difflib.get_close_matches(model[:256], known, 3, 0.4) or sorted(known)[:3]
    return Refused(
        RefusalCode.NO_MODEL,
        f"no node serves the model {model[:256]!r}; the nearest names are {', '.join(near)}",
    )


def _refuse_named_node(view: ClusterView, request: ResourceDemand) -> Refused:
    name = next((node.name for node in view.nodes if node.id == request.node), request.node)
    return Refused(RefusalCode.NO_MODEL, f"{name} does not serve {request.model!r}: `cluster models` lists its models")


def _refuse_permanently(
    serving: list[NodeView], request: ResourceDemand, offers: list[Candidate], trials: AttemptHistory
) -> Refused | None:
    """Return the refusal if no member could ever hold the request; None as long as one could."""
    if any(_can_ever_hold(node, request, trials) for node in serving):
        return None
    longest = max(node.models[request.model].context for node in serving)
    failures = [trials.never[node.id] for node in serving if node.id in trials.never]
    failures = [refused for refused in failures if refused.code is not RefusalCode.TOO_LARGE]
    if request.prompt_tokens is not None and longest and request.prompt_tokens >= longest:
        return Refused(
            RefusalCode.CONTEXT,
            f"the prompt has {request.prompt_tokens} tokens, the longest context of "
            f"{request.model} in this cluster is {longest}: shorten the prompt",
        )
    if len(failures) == len(serving):
        return failures[0]
    best = max(offers, key=lambda candidate: candidate.most_bytes)
    need, final = _compute_idle_need(best, request), trials.never.get(best.node)
    if final is not None and need <= best.most_bytes:  # the node also counts memory for a load and for tokenization
        return replace(final, message=f"{best.name}: {final.message}", node=best.name)
    return Refused(
        RefusalCode.TOO_LARGE,
        f"needs {show_size(need)} on an idle node, the largest node can give "
        f"{show_size(best.most_bytes)} ({best.name}): shorten the prompt, lower max_tokens or use a smaller "
        f"variant of {request.model}",
        best.build_memory_numbers(),
        None,
        best.name,
    )


def _can_ever_hold(node: NodeView, request: ResourceDemand, trials: AttemptHistory) -> bool:
    model = node.models[request.model]
    if node.id in trials.never or exceeds_context(model, request):
        return False
    tokens = request.estimate_prompt_tokens(model)
    return can_ever_fit(node.memory, model, tokens, request.estimate_output_tokens(model, tokens), request.choices)


def _compute_idle_need(candidate: Candidate, request: ResourceDemand) -> int:
    model = candidate.model
    assert model is not None  # noqa: S101  offers are candidates that serve the model
    return estimate_alone_bytes(model, candidate.prompt_tokens, candidate.output_tokens, request.choices)


def _choose_counting_node(
    serving: list[NodeView], request: ResourceDemand, offers: list[Candidate], trials: AttemptHistory
) -> Candidate | None:
    """Choose the roomiest node to count a prompt that, by the estimate, fits on no member even when all are idle."""
    if any(_can_ever_hold(node, request, trials) for node in serving):
        return None
    able = [
        candidate
        for candidate in offers
        if candidate.code is RefusalCode.NO_ROOM and candidate.node not in trials.refused
    ]
    return max(able, key=lambda candidate: candidate.most_bytes, default=None)


def _refuse_for_now(request: ResourceDemand, offers: list[Candidate]) -> Refused:
    short = [candidate for candidate in offers if candidate.code in _MEMORY]
    if not short:
        return _refuse_none_serving(request, offers)
    best = max(
        short, key=lambda candidate: -math.inf if candidate.headroom is None else candidate.headroom - candidate.need
    )
    count = "" if request.prompt_tokens is not None else " by estimate"
    if best.code is RefusalCode.UNREADABLE:
        text = f"the memory of {best.name} cannot be read; it starts no requests until then: retry"
        return Refused(RefusalCode.UNREADABLE, text, best.build_memory_numbers(), UNKNOWN_RETRY_SECONDS, best.name)
    text = (
        f"needs {show_size(best.need)}{count}, best node {best.name} has {show_size(best.headroom)}: retry, shorten "
        f"the prompt, lower max_tokens or use a smaller variant of {request.model}"
    )
    return Refused(RefusalCode.NO_ROOM, text, best.build_memory_numbers(), estimate_retry_seconds(best), best.name)


def _refuse_none_serving(request: ResourceDemand, offers: list[Candidate]) -> Refused:
    draining = all(candidate.code is RefusalCode.DRAINING for candidate in offers)
    reasons = "; ".join(f"{candidate.name} {candidate.why}" for candidate in offers[:4])
    return Refused(
        RefusalCode.DRAINING if draining else RefusalCode.NOT_READY,
        f"no node can serve {request.model} now: {reasons}",
        None,
        UNKNOWN_RETRY_SECONDS,
    )


def estimate_retry_seconds(candidate: Candidate) -> float:
    """Return the expected seconds until a request on a full node ends and makes room, from 1 s to 60 s.

    Return `UNKNOWN_RETRY_SECONDS` if the node does not have the model, or no request of this router.
    """
    model = candidate.model
    if model is None or candidate.in_flight == 0:
        return UNKNOWN_RETRY_SECONDS
    answer = model.expected_output / model.decode_speed
    return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, answer / candidate.in_flight))

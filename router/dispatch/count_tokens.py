"""Exact prompt token counts by a node that has the model's tokenizer. Nothing is generated, reserved or loaded.

All limits of an API key apply to its counts: models, labels, requests and tokens per minute, and concurrency. The
tokens of a count are charged while it runs and refunded at its end, because nothing is generated.
"""

import asyncio

from msgspec.structs import replace

from router.admission.key_scope import filter_view
from router.admission.model_names import ModelTarget
from router.admission.rate_limits import KeyLimits
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.node_commands import CommandResult
from router.dispatch.resource_demand import compute_demand
from router.errors import Problem, from_failure, from_refused
from router.placement.cluster_view import NodeView
from router.placement.refusals import refuse_unknown_model
from wire.capacity.fairness import WeightedKey
from wire.frames import CountTokens, Finished, GenerationParams
from wire.models.kind import ModelKind, explain_other_kind, get_kind
from wire.refusals import FINAL, RefusalCode, Refused

COUNT_TIMEOUT_SECONDS = 30.0
"""Timeout of a node's count in seconds. A tokenizer processes some megabytes of text per second."""
_ELSEWHERE = frozenset({RefusalCode.NO_MODEL, RefusalCode.LOAD_FAILED})


async def count_prompt_tokens(dispatcher: Dispatcher, request: CountTokens, key: str) -> int | Problem:
    """Return the number of tokens of a prompt, counted by a node within the limits of the key, or the problem.

    The nodes with the model are asked one after another, beginning with those that have loaded the model. The first
    count, the first failure, or the first refusal that other nodes would repeat is the result. If there is none, the
    result is a refusal that applies to a single node. A node that does not answer within `COUNT_TIMEOUT_SECONDS` is
    skipped. A cancellation ends the count on the node.
    """
    quotas = dispatcher.quotas
    limits = quotas.get_limits(key)
    target = dispatcher.intake.resolve_model_name(request.model, limits)
    if isinstance(target, Refused):
        return from_refused(target)
    model = _choose_model(dispatcher, target, limits)
    request = dispatcher.intake.apply_profile_to_count(replace(request, model=model), target)
    demand = compute_demand(target.permitted, request.messages, GenerationParams(), request.tools)
    demand = replace(demand, choices=0)
    charged = quotas.admit(key, demand, dispatcher.get_time())
    if isinstance(charged, Refused):
        return from_refused(charged)
    try:
        node_limits = replace(limits, models=()) if target.alias else limits
        owned = replace(request, weighted_key=WeightedKey(key, limits.weight))
        return await _ask_nodes(dispatcher, owned, node_limits, names_others=not limits.models)
    finally:
        quotas.record_end(key, demand, charged, 0, dispatcher.get_time())


def _choose_model(dispatcher: Dispatcher, target: ModelTarget, limits: KeyLimits) -> str:
    """Return the first candidate that a node with the key's labels can count; the first candidate if none can."""
    labels_only = replace(limits, models=())
    able = (model for model in target.candidates if _list_counting_nodes(dispatcher, model, labels_only))
    return next(able, target.candidates[0])


async def _ask_nodes(
    dispatcher: Dispatcher, request: CountTokens, limits: KeyLimits, *, names_others: bool
) -> int | Problem:
    """Ask the nodes one after another, first those that have loaded the model. Return the count or the problem.

    `names_others` tells whether the refusal of an unknown model may name other models.
    """
    why: Refused | None = None
    for node in _list_counting_nodes(dispatcher, request.model, limits):
        unavailable = dispatcher.placer.find_unavailable_refusal(node)
        if unavailable is not None:
            why = why or unavailable
            continue
        ended = await _count_on(dispatcher, node, request)
        if isinstance(ended, Finished):
            return ended.prompt_tokens
        if not isinstance(ended, Refused):
            return from_failure(ended.code, ended.message)
        if ended.code in FINAL - _ELSEWHERE or ended.code is RefusalCode.OVER_SHARE:
            return from_refused(ended)
        why = ended
    return from_refused(why or _refuse_without_node(dispatcher, request.model, limits, names_others=names_others))


async def _count_on(dispatcher: Dispatcher, node: NodeView, request: CountTokens) -> CommandResult:
    try:
        async with asyncio.timeout(COUNT_TIMEOUT_SECONDS):
            return await dispatcher.commands.count_tokens(node.id, node.name, request)
    except TimeoutError:
        return Refused(
            RefusalCode.NOT_READY,
            f"{node.name} did not count the tokens within {COUNT_TIMEOUT_SECONDS:.0f} s: retry",
            None,
            2.0,
            node.name,
        )


def _list_counting_nodes(dispatcher: Dispatcher, model: str, limits: KeyLimits) -> list[NodeView]:
    able = [node for node in _list_serving_nodes(dispatcher, model, limits) if _get_kind(node, model) is ModelKind.CHAT]
    return sorted(able, key=lambda node: (not node.models[model].loaded, dispatcher.count_in_flight(node.id)))


def _list_serving_nodes(dispatcher: Dispatcher, model: str, limits: KeyLimits) -> list[NodeView]:
    nodes = filter_view(dispatcher.view, limits).nodes
    return [node for node in nodes if model in node.models and not node.models[model].cause]


def _get_kind(node: NodeView, model: str) -> ModelKind:
    return get_kind(node.models[model].features)


def _refuse_without_node(dispatcher: Dispatcher, model: str, limits: KeyLimits, *, names_others: bool) -> Refused:
    others = _list_serving_nodes(dispatcher, model, limits)
    if others:
        return Refused(RefusalCode.UNSUPPORTED, explain_other_kind(model, _get_kind(others[0], model)))
    if dispatcher.view.has_model(model) and limits.labels:
        labels = ", ".join(sorted(limits.labels))
        text = f"no node with the labels that this API key is bound to ({labels}) serves {model}"
        return Refused(RefusalCode.NOT_ALLOWED, text)
    if names_others and not dispatcher.view.has_model(model):
        return refuse_unknown_model(dispatcher.view, model)
    return Refused(RefusalCode.NO_MODEL, f"no node serves the model {model!r}")

"""`/v1/models`: list the models that the cluster can serve, and their aliases, in OpenAI's or Anthropic's format.

A model that no node can load is not listed.
"""

from datetime import UTC, datetime
from itertools import chain

import msgspec
from msgspec.structs import replace

from router.admission.model_names import VisibleModels
from router.errors import Problem
from router.placement.candidate import GRAMMAR, LOGPROBS, SAMPLING, TOOLS
from wire.models.kind import ModelKind, get_kind
from wire.refusals import RefusalCode
from wire.report import Model

OWNER = "macpool"
ALIAS_OWNER = "macpool-alias"
"""Value of `owned_by` for an alias in the list of models. The value for a model is `OWNER`."""
_ALWAYS = ("max_tokens", "stop", "seed", "temperature", "top_p")
_PARAMETERS = {
    ModelKind.EMBED: ("dimensions", "encoding_format", "truncate", "prompt_name"),
    ModelKind.RERANK: ("top_n", "return_documents", "truncate", "max_tokens_per_doc"),
}
_OUTPUTS = {
    ModelKind.CHAT: ("llm", "text"),
    ModelKind.EMBED: ("embeddings", "embeddings"),
    ModelKind.RERANK: ("rerank", "rerank"),
}
"""Type of a model and modality of its output, by the kind of the model."""
_BY_FEATURE = {
    TOOLS: ("tools", "tool_choice", "parallel_tool_calls"),
    GRAMMAR: ("response_format", "structured_outputs"),
    LOGPROBS: ("logprobs", "top_logprobs"),
    SAMPLING: ("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
}


def list_models(models: VisibleModels, created: int) -> bytes:
    """Return the models that a member can serve, then all aliases, each sorted by name, as JSON in OpenAI's format.

    An alias is listed even if no node can serve its candidates. `created`, in Unix seconds, is the creation time of
    every entry.
    """
    served, loaded = models.view.get_served_models(), models.view.get_loaded_models()
    rows = [_build_model(served[name], created, loaded=name in loaded) for name in sorted(served)]
    rows += [_build_alias(models, alias, created) for alias in models.list_aliases()]
    return msgspec.json.encode({"object": "list", "data": rows})


def get_model(models: VisibleModels, name: str, created: int) -> bytes | Problem:
    """Return a model or an alias as JSON in OpenAI's format, or a 404 problem with the reason.

    `created`, in Unix seconds, is the creation time in the answer.
    """
    alias, view = models.find_alias(name), models.view
    if alias is not None:
        return msgspec.json.encode(_build_alias(models, alias, created))
    name = view.resolve_name(name)
    model = view.get_served_models().get(name)
    if model is not None:
        return msgspec.json.encode(_build_model(model, created, loaded=name in view.get_loaded_models()))
    known = view.get_models().get(name)
    why = f"no node can load the model {name!r}: {known.cause}" if known else f"no node serves the model {name[:256]!r}"
    return Problem(404, RefusalCode.NO_MODEL, why, "model")


def _build_model(model: Model, created: int, *, loaded: bool) -> dict[str, object]:
    """Return a model in OpenAI's format, with fields that clients know from other servers.

    OpenRouter has `context_length`, `architecture` and `supported_parameters`. vLLM has `max_model_len`, and llama.cpp
    has `meta`. LM Studio has `type`, `state`, `max_context_length` and `capabilities`. `size` is the size of the
    weights in bytes.
    """
    kind = get_kind(model.features)
    named, output = _OUTPUTS[kind]
    length, more = model.context or None, (_BY_FEATURE.get(feature, ()) for feature in model.features)
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "type": named,
        "context_length": length,
        "max_model_len": length,
        "max_context_length": length,
        "loaded_context_length": length if loaded else None,
        "state": "loaded" if loaded else "not-loaded",
        "compatibility_type": "mlx",
        "size": model.weights,
        "capabilities": ["tool_use"] if TOOLS in model.features else [],
        "features": [kind, *(feature for feature in model.features if feature != kind)],
        "supported_parameters": list(_PARAMETERS.get(kind, (*_ALWAYS, *chain.from_iterable(more)))),
        "architecture": {
            "input_modalities": ["text"],
            "output_modalities": [output],
        },
        "meta": {"n_ctx_train": length, "size": model.weights},
    }


def _build_alias(models: VisibleModels, alias: str, created: int) -> dict[str, object]:
    """Return an alias in OpenAI's format, with the properties of its first candidate that a node can serve.

    `alias.candidates` has all candidates.
    """
    about = {"candidates": models.aliases[alias]}
    model = models.find_alias_model(alias)
    if model is None:
        return {"id": alias, "object": "model", "created": created, "owned_by": ALIAS_OWNER, "alias": about}
    loaded = models.is_loaded(model.name)
    return {**_build_model(model, created, loaded=loaded), "id": alias, "owned_by": ALIAS_OWNER, "alias": about}


def list_anthropic_models(models: VisibleModels, created: int) -> bytes:
    """Return the models that a member can serve, then the aliases of such models, as JSON in Anthropic's format.

    All of them are on one page. `created`, in Unix seconds, is the creation time of every entry.
    """
    served = models.view.get_served_models()
    rows = [_build_anthropic_model(served[name], created) for name in sorted(served)]
    for alias in models.list_aliases():
        model = models.find_alias_model(alias)
        rows += [] if model is None else [_build_anthropic_model(replace(model, name=alias), created)]
    ends = {"first_id": rows[0]["id"], "last_id": rows[-1]["id"]} if rows else {"first_id": None, "last_id": None}
    return msgspec.json.encode({"data": rows, "has_more": False, **ends})


def get_anthropic_model(models: VisibleModels, name: str, created: int) -> bytes | Problem:
    """Return a model or an alias as JSON in Anthropic's format, or a 404 problem with the reason.

    An alias of which no node can serve a candidate gives a 404 problem, because `list_anthropic_models` does not list
    it. `created`, in Unix seconds, is the creation time in the answer.
    """
    model, alias = models.find_model(name), models.find_alias(name)
    if model is not None:
        return msgspec.json.encode(_build_anthropic_model(model, created))
    if alias is not None:
        return Problem(404, RefusalCode.NO_MODEL, f"no node serves a candidate of the alias {alias!r}", "model")
    return get_model(models, name, created)


def _build_anthropic_model(model: Model, created: int) -> dict[str, object]:
    moment = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": moment,
        "lifecycle": "active",
        "max_input_tokens": model.context,
        "max_tokens": model.context,
    }

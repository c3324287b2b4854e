"""Ollama's read-only routes: its version, and the cluster's models in the formats that Ollama's clients list and show.

Names are those of Macpool, without tags. Fields that exist only in Ollama's own files (parameters, templates, families)
are empty. A digest is computed from the fingerprint of a model, or from its name if it has no fingerprint.
"""

import hashlib

import msgspec

from router.admission.model_names import VisibleModels
from router.dialects.ollama.api import strip_latest_tag
from router.dialects.ollama.response import format_time
from router.dialects.ollama.schema import SHOW
from router.errors import Problem, build_invalid
from router.placement.cluster_view import ClusterView
from wire.models.kind import ModelKind, get_kind
from wire.refusals import RefusalCode
from wire.report import Model

OLLAMA_VERSION = "0.12.6"
"""Version of Ollama with these formats, which clients compare. `cluster version` shows the version of Macpool."""
NEVER = "2300-01-01T00:00:00Z"
"""Time that `ollama ps` shows as `Forever`. A model is unloaded when its memory is needed, not at a fixed time.

For a time in the past, `ollama ps` shows `Stopping...`.
"""

Row = dict[str, object]


def encode_version() -> bytes:
    """Return the version of Ollama whose API is emulated, as JSON."""
    return msgspec.json.encode({"version": OLLAMA_VERSION})


def list_models(models: VisibleModels, created: int) -> bytes:
    """Return the models that a member can serve, and the aliases of such models, as JSON in Ollama's format.

    `created`, in Unix seconds, is the modification time of every model.
    """
    served = models.view.get_served_models()
    visible = [served[name] for name in sorted(served)]
    visible += (model for alias in models.list_aliases() if (model := models.find_model(alias)) is not None)
    return msgspec.json.encode({"models": [_build_row(model, modified_at=format_time(created)) for model in visible]})


def list_loaded_models(view: ClusterView) -> bytes:
    """Return every model that a node has loaded, as JSON in Ollama's format.

    Sizes are the bytes of the weights on one node.
    """
    loaded = view.get_loaded_models()
    rows = (loaded[name] for name in sorted(loaded))
    return msgspec.json.encode(
        {
            "models": [
                _build_row(model, size_vram=model.weights, expires_at=NEVER, context_length=model.context)
                for model in rows
            ]
        }
    )


def show_model(models: VisibleModels, body: bytes, created: int) -> bytes | Problem:
    """Return the model that a body names, as JSON in Ollama's format.

    `created`, in Unix seconds, is the modification time of the model. Return a 400 problem for an invalid body, and a
    404 problem for a model that no member can serve.
    """
    parsed = SHOW.read(body)
    if isinstance(parsed, Problem):
        return parsed
    name = strip_latest_tag(parsed.body.model or parsed.body.name or "")
    if not name:
        return build_invalid("model: Field required", "model")
    model = models.find_model(name)
    if model is None:
        return Problem(404, RefusalCode.NO_MODEL, f"no node serves the model {name!r}", "model")
    return msgspec.json.encode(
        {
            "license": "",
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": _build_details(),
            "model_info": {
                "general.architecture": "mlx",
                "general.basename": model.name,  # VS Code shows it as the model's name
                "mlx.context_length": model.context,
            },
            "capabilities": _list_capabilities(model),
            "modified_at": format_time(created),
        }
    )


def _list_capabilities(model: Model) -> list[str]:
    kind = get_kind(model.features)
    if kind is not ModelKind.CHAT:
        return ["embedding" if kind is ModelKind.EMBED else kind.value]
    names = {"tools": "tools", "reasoning": "thinking"}
    return ["completion", *(name for feature, name in names.items() if feature in model.features)]


def _build_row(model: Model, **more: object) -> Row:
    digest = hashlib.sha256((model.fingerprint or model.name).encode()).hexdigest()
    return {
        "name": model.name,
        "model": model.name,
        "size": model.weights,
        "digest": digest,
        "details": _build_details(),
        **more,
    }


def _build_details() -> Row:
    return {
        "parent_model": "",
        "format": "mlx",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }

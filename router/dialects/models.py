"""`/v1/models`: what the cluster can serve, in OpenAI's shape or Anthropic's, but no model that no node can load."""

from datetime import UTC, datetime

import msgspec

from router.problems import Problem
from router.view import ClusterView
from wire.report import Model

OWNER = "macpool"


def listing(view: ClusterView, created: int) -> bytes:
    """Give every model that a member can serve, by name; `created` in seconds since 1970."""
    models = [_model(name, created) for name in sorted(view.served())]
    return msgspec.json.encode({"object": "list", "data": models})


def one(view: ClusterView, name: str, created: int) -> bytes | Problem:
    """Give one model, or the 404 that names it."""
    if name in view.served():
        return msgspec.json.encode(_model(name, created))
    known = view.models().get(name)
    why = f"no node can load the model {name!r}: {known.cause}" if known else f"no node serves the model {name[:256]!r}"
    return Problem(404, "model_not_found", why, "model")


def _model(name: str, created: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created, "owned_by": OWNER}


def anthropic_listing(view: ClusterView, created: int) -> bytes:
    """Give every model that a member can serve in Anthropic's shape, all on one page."""
    served = view.served()
    models = [_anthropic(served[name], created) for name in sorted(served)]
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {"first_id": None, "last_id": None}
    return msgspec.json.encode({"data": models, "has_more": False, **ends})


def anthropic_one(view: ClusterView, name: str, created: int) -> bytes | Problem:
    """Give one model in Anthropic's shape, or the 404 that names it."""
    found = view.served().get(name)
    return msgspec.json.encode(_anthropic(found, created)) if found else one(view, name, created)


def _anthropic(model: Model, created: int) -> dict[str, object]:
    moment = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": model.name, "display_name": model.name, "created_at": moment, "lifecycle": "active",
            "max_input_tokens": model.context, "max_tokens": model.context}  # fmt: skip

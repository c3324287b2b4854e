"""`/v1/models`: what the cluster serves, in OpenAI's shape."""

import msgspec

from router.problems import Problem
from router.view import ClusterView

OWNER = "macpool"


def listing(view: ClusterView, created: int) -> bytes:
    """Give every model that a member serves, by name; `created` in seconds since 1970."""
    models = [_model(name, created) for name in sorted(view.models())]
    return msgspec.json.encode({"object": "list", "data": models})


def one(view: ClusterView, name: str, created: int) -> bytes | Problem:
    """Give one model, or the 404 that names it."""
    if name not in view.models():
        return Problem(404, "model_not_found", f"no node serves the model {name[:256]!r}", "model")
    return msgspec.json.encode(_model(name, created))


def _model(name: str, created: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created, "owned_by": OWNER}

"""`/v1/models`: what the cluster can serve, in OpenAI's shape. A model that no node can load is not in it."""

import msgspec

from router.problems import Problem
from router.view import ClusterView

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

"""Ollama's routes that change models, which Macpool answers with the status 501."""

from router.errors import Problem

_CREATE = "make quantized copies with `cluster model quantize`, and set other names in `router.aliases`"
_HINTS = {
    "/api/pull": "download models with `cluster pull`",
    "/api/push": "upload models with the tools of their hub, such as `hf upload`",
    "/api/create": _CREATE,
    "/api/copy": "set another name of a model in `router.aliases`",
    "/api/delete": "delete copies with `cluster model rm`",
}
UNSUPPORTED_ROUTES = frozenset(_HINTS)


def build_unsupported_route(path: str) -> Problem:
    """Return the 501 problem for an unsupported route of Ollama, whose message says how to proceed instead.

    Uploads of blobs (`/api/blobs/DIGEST`) get the message of `/api/create`.
    """
    return Problem(501, "unsupported_operation", f"{path} is not supported: {_HINTS.get(path, _CREATE)}")

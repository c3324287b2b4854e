"""Ollama's routes that change models. Macpool answers them with 501."""

from router.errors import Problem

_LOAD = "load and unload models with `cluster model load` and `cluster model unload`"
_HINTS = {
    "/api/pull": "download models with `cluster pull`",
    "/api/push": _LOAD,
    "/api/create": "make quantized copies with `cluster model quantize`, and set other names in `router.aliases`",
    "/api/copy": "set another name of a model in `router.aliases`",
    "/api/delete": "delete copies with `cluster model rm`",
}
UNSUPPORTED_ROUTES = frozenset(_HINTS)


def build_unsupported_route(path: str) -> Problem:
    """Build the 501 problem for an unsupported route of Ollama. Its message names Macpool's command for the purpose."""
    return Problem(501, "unsupported_operation", f"{path} is not supported: {_HINTS.get(path, _LOAD)}")

"""Ollama's routes that Macpool answers with 501: those that change models."""

from router.errors import Problem

UNSUPPORTED_ROUTES = frozenset(
    {
        "/api/pull",
        "/api/push",
        "/api/create",
        "/api/copy",
        "/api/delete",
    }
)


def build_unsupported_route(path: str) -> Problem:
    """Build the 501 problem for an unsupported route of Ollama, which names Macpool's commands for models."""
    text = f"{path} is not supported: manage models with `cluster model load` and `cluster model unload`"
    return Problem(501, "unsupported_operation", text)

"""Route of the control plane: its scope, its handler, and its entry in the OpenAPI document."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from router.dialects.openapi import ALWAYS, describe_error

OPEN = ""
"""Scope of a public route. `tests/test_routes.py` lists these routes with reasons."""
EVENTS = "text/event-stream"
MAX_BODY_BYTES = 64 * 1024
"""Most bytes of a body on a control route with API key."""
MAX_PUBLIC_BODY_BYTES = 1024
"""Most bytes of a body on a public control route: a code of 100 characters, each of them escaped."""


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a 200 response: its media type and its schema in the OpenAPI document."""

    media: str
    schema: Mapping[str, Any]

    @classmethod
    def text(cls, media: str) -> Self:
        """Describe text."""
        return cls(media, {"type": "string"})


JSON = Content(
    "application/json",
    {"type": "object", "required": ["schema"], "properties": {"schema": {"type": "integer"}}},
)
"""An object that names the version of its own form, as most answers are."""
LIST = Content("application/json", {"type": "array", "items": {"type": "object"}})
EVENT_STREAM = Content(EVENTS, {"type": "object"})
TEXT = Content.text("text/plain")


@dataclass(frozen=True, slots=True)
class Route:
    """One control route. FastAPI calls `answer`, whose name is the action in the audit log."""

    method: str
    path: str
    scope: str
    answer: Callable[..., Any]
    refusals: tuple[int, ...] = ()
    """Further statuses besides those implied by method and path."""
    content: Content = JSON

    @property
    def longest_body(self) -> int:
        """Return the bound of its body in bytes."""
        return MAX_PUBLIC_BODY_BYTES if self.scope == OPEN else MAX_BODY_BYTES

    @property
    def audited(self) -> bool:
        """Whether each use is written to the audit log: true for state changes by an administrator."""
        return self.scope == "admin" and self.method != "GET"

    @property
    def summary(self) -> str:
        """Return the first line of the handler's docstring."""
        return (self.answer.__doc__ or "").splitlines()[0]

    def responses(self) -> dict[str, Any]:
        """Describe every status that it answers with."""
        content = {self.content.media: {"schema": dict(self.content.schema)}}
        good = {"description": "the answer" if self.method == "GET" else "done", "content": content}
        missing = (404,) if "{" in self.path else ()
        unread = () if self.method == "GET" else (408, 413)
        bad = sorted({*ALWAYS, *self.refusals, *missing, *unread})
        return {"200": good, **{str(status): describe_error("/api/v1/", status) for status in bad}}

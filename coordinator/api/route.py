"""Route of the control plane: its scope, its handler, and its entry in the OpenAPI document."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from router.dialects.openapi import ALWAYS, describe_error

PUBLIC_SCOPE = ""
"""Scope of a public route. `tests/test_routes.py` lists these routes with reasons."""
EVENT_STREAM_TYPE = "text/event-stream"
"""Media type of server-sent events."""
MAX_BODY_BYTES = 64 * 1024
"""Maximum bytes of the body of a control route that needs an API key."""
MAX_PUBLIC_BODY_BYTES = 1024
"""Maximum bytes of the body of a public control route: enough for a code of 100 characters, each of them escaped."""


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a 200 response: its media type and its schema in the OpenAPI document."""

    media: str
    schema: Mapping[str, Any]

    @classmethod
    def of_text(cls, media: str) -> Self:
        """Return content of this media type, described as a string."""
        return cls(media, {"type": "string"})


JSON = Content(
    "application/json",
    {"type": "object", "required": ["schema"], "properties": {"schema": {"type": "integer"}}},
)
"""Content of most routes: a JSON object with the version of its format in `schema`."""
LIST = Content("application/json", {"type": "array", "items": {"type": "object"}})
"""Content of a route whose format Prometheus defines: a JSON array of objects."""
EVENT_STREAM = Content(EVENT_STREAM_TYPE, {"type": "object"})
"""Content of a route with server-sent events, each with a JSON object."""
TEXT = Content.of_text("text/plain")
"""Content of a route with plain text, such as a log."""


@dataclass(frozen=True, slots=True)
class Route:
    """Control route: method, path, required scope and handler."""

    method: str
    """HTTP method in capitals."""
    path: str
    """Path with parameters in braces, such as `/api/v1/nodes/{node}`."""
    scope: str
    """Scope that the API key needs; `PUBLIC_SCOPE` if no key is needed."""
    handler: Callable[..., Any]
    """Function that FastAPI calls.

    Its name is the action in the audit log, its docstring the description in OpenAPI.
    """
    refusals: tuple[int, ...] = ()
    """Error statuses in addition to those that `describe_responses` derives from method, path and scope."""
    content: Content = JSON
    """Content of the response with status 200."""
    ends_with_name: bool = False
    """Whether the path ends with a parameter that may contain slashes, such as `publisher/model`."""
    deferrable: bool = False
    """Whether the command can end after the response (`DeferredCommands`). Its body has a model and a node."""
    ends_with_client: bool = False
    """Whether the handler is cancelled when the client disconnects."""

    @property
    def pattern(self) -> str:
        """Path in the syntax of the application. With `ends_with_name`, the last parameter also matches slashes."""
        return self.path.removesuffix("}") + ":path}" if self.ends_with_name else self.path

    @property
    def max_body_bytes(self) -> int:
        """Maximum bytes of the request body: `MAX_PUBLIC_BODY_BYTES` for a public route, else `MAX_BODY_BYTES`."""
        return MAX_PUBLIC_BODY_BYTES if self.scope == PUBLIC_SCOPE else MAX_BODY_BYTES

    @property
    def audited(self) -> bool:
        """Whether each successful call gets an entry in the audit log: the scope is `admin`, and the method not GET."""
        return self.scope == "admin" and self.method != "GET"

    @property
    def summary(self) -> str:
        """First line of the handler's docstring, as the summary in the OpenAPI document."""
        return (self.handler.__doc__ or "").splitlines()[0]

    def describe_responses(self) -> dict[str, Any]:
        """Return the OpenAPI response objects of this route, by status as text.

        The statuses are 200, 202 if `deferrable`, and the error statuses.
        """
        content = {self.content.media: {"schema": dict(self.content.schema)}}
        good = {"description": "the answer" if self.method == "GET" else "done", "content": content}
        missing = (404,) if "{" in self.path else ()
        unread = () if self.method == "GET" else (408, 413)
        stored = (503,) if self.audited else ()  # the audit log may be impossible to write
        bad = sorted({*ALWAYS, *self.refusals, *missing, *unread, *stored})
        accepted = {"description": "started, for a request with `Prefer: respond-async`", "content": content}
        later = {"202": accepted} if self.deferrable else {}
        return {"200": good, **later, **{str(status): describe_error("/api/v1/", status) for status in bad}}

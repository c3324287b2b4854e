"""Authentication of control routes by API key, and audit log entries for an administrator's actions."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from functools import wraps
from typing import Any, cast

from fastapi import Request

from coordinator.api.body import Body
from coordinator.api.errors import ProblemError
from coordinator.state.access_admin import LOCAL_KEY_NAME, PAGE_KEY_NAME
from coordinator.state.database import Database
from router.admission.api_keys import KeyRing, extract_key
from router.errors import NO_KEY, WRONG_KEY, build_missing_scope

ACTOR: ContextVar[str] = ContextVar("actor", default="")
"""Actor of the current request in the audit log: `local`, `page`, or the id of the API key; empty on a public route."""
KEY: ContextVar[str] = ContextVar("key", default="")
"""Id of the API key of the current request; empty on a public route."""
ADDRESS: ContextVar[str] = ContextVar("address", default="")
"""IP address of the client of the current request; empty if unknown, and on a public route."""
IS_VALID: ContextVar[Callable[[], bool]] = ContextVar("is_valid", default=lambda: True)
"""Function that returns whether the API key of the current request is still valid; True on a public route."""


def require_scope(ring: KeyRing, scope: str) -> Callable[[Request], Awaitable[None]]:
    """Return a check that admits only requests with an API key that has this scope (`ApiKey.allows`).

    The check sets `ACTOR`, `KEY`, `ADDRESS` and `IS_VALID`. It raises `ProblemError`: 401 without a valid key, 403 for
    a key without the scope.
    """

    async def check(request: Request) -> None:
        presented = extract_key(request.scope["headers"])
        if presented is None:
            raise ProblemError(NO_KEY)
        key = ring.check(presented)
        if key is None:
            raise ProblemError(WRONG_KEY)
        if not key.allows(scope):
            raise ProblemError(build_missing_scope(scope))
        ACTOR.set(key.name if key.name in (LOCAL_KEY_NAME, PAGE_KEY_NAME) else key.id)
        KEY.set(key.id)
        ADDRESS.set(request.client.host if request.client else "")
        IS_VALID.set(lambda: ring.find(presented) is not None)

    return check


def end_with_key(pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Return the `pieces` of a stream, until the API key of the current request is revoked, rotated or expires.

    The end is noticed at the next piece, which is discarded.
    """
    is_valid = IS_VALID.get()

    async def read() -> AsyncGenerator[bytes]:
        async with aclosing(pieces):
            async for piece in pieces:
                if not is_valid():
                    return
                yield piece

    return read()


def wrap_audited(store: Database, act: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a route handler so that the audit log gets an entry, with the handler's name, for each successful call.

    An error of the handler is raised unchanged, without an entry. If the entry cannot be written to the disk, the
    wrapped handler raises `StoreError`, although the call took effect.
    """

    @wraps(act)
    async def audited(**arguments: Any) -> Any:
        answer = await act(**arguments)
        store.audit.add(time.time(), ACTOR.get(), act.__name__, _describe_subject(arguments, answer), ADDRESS.get())
        return answer

    return audited


def _describe_subject(arguments: Mapping[str, Any], answer: Any) -> str:
    """Return the subject of an action for the audit log, cut to 300 characters.

    It consists of the names in the action's path, its body and its answer.
    """
    named = [value for value in arguments.values() if isinstance(value, str)]
    body = next((value for value in arguments.values() if isinstance(value, Body)), None)
    fields = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
    named += [str(value) for field in ("model", "repo", "node", "name") if (value := getattr(body, field, None))]
    made = fields.get("pull") or fields.get("quantization") or fields
    named += [str(made[field]) for field in ("name", "id") if field in made and made[field] not in named]
    return " ".join(named)[:300]

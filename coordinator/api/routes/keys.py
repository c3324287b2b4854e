"""Routes of API keys: creation, limits, name, expiry, rotation, revocation and usage."""

from collections.abc import Mapping
from datetime import date
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query
from fastapi.responses import Response
from pydantic import Field

from coordinator.api.auth import KEY
from coordinator.api.body import PLAIN_TEXT_PATTERN, Body
from coordinator.api.dispatcher_api import DispatcherApi
from coordinator.api.errors import ProblemError
from coordinator.api.route import Route
from coordinator.state.access_admin import AccessAdmin, NameReservedError, NameTakenError
from router.admission.api_keys import KeyRing
from router.admission.rate_limits import NO_LIMITS, KeyLimits
from router.errors import NO_KEY, Problem, build_invalid
from router.worker_thread import encoded_list, run_in_worker

MAX_KEY_LIFE_SECONDS = 10 * 365 * 86400.0
"""Maximum lifetime of a key with an expiry, in seconds. A key without expiry is valid until it is revoked."""
Since = Annotated[str, Query(pattern=r"^([0-9]{4}-[0-9]{2}-[0-9]{2})?$")]
"""Query parameter: first day of the usage (UTC), as `2026-01-31`; empty for all stored days."""
LifetimeSeconds = Annotated[float, Field(gt=0, le=MAX_KEY_LIFE_SECONDS)]
"""Seconds from now until a key expires."""


class NewKeyBody(Body):  # ruff does not see that it is a model, whose defaults are copied
    """Body of a request for a new API key."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=PLAIN_TEXT_PATTERN)]
    scopes: Annotated[list[Literal["infer", "metrics", "admin"]], Field(min_length=1, max_length=3)] = ["infer"]  # noqa: RUF012
    ttl_seconds: LifetimeSeconds | None = None
    """Seconds from now until the key expires; null: never."""
    limits: dict[str, Any] = {}  # noqa: RUF012
    """Fields of `KeyLimits`; a missing field is no limit."""


class KeyLimitsBody(Body):
    """Body with the new limits of a key. They replace all earlier limits."""

    limits: dict[str, Any]
    """Fields of `KeyLimits`; a missing field is no limit."""


class KeyNameBody(Body):
    """Body with the new name of a key."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=PLAIN_TEXT_PATTERN)]


class KeyExpiryBody(Body):
    """Body with the new expiry of a key, in seconds from now; null: never."""

    ttl_seconds: LifetimeSeconds | None


class KeyRoutes:
    """Routes of `cluster key`. The parameter `key` is the id of a key.

    The response to a change has the id of the key. If a change cannot be stored, the handler raises `StoreError`, which
    becomes 503.
    """

    def __init__(self, admin: AccessAdmin, ring: KeyRing, traffic: DispatcherApi) -> None:
        self._admin = admin
        self._ring = ring
        self._traffic = traffic

    def list_routes(self) -> tuple[Route, ...]:
        """Return the routes of API keys."""
        return (
            Route("GET", "/api/v1/keys", "admin", self.list_keys),
            Route("POST", "/api/v1/keys", "admin", self.create_key, (409,)),
            Route("GET", "/api/v1/keys/usage", "admin", self.keys_usage, (503,)),
            Route("PUT", "/api/v1/keys/{key}/limits", "admin", self.limit_key),
            Route("PUT", "/api/v1/keys/{key}/name", "admin", self.rename_key, (409,)),
            Route("PUT", "/api/v1/keys/{key}/expiry", "admin", self.expire_key),
            Route("POST", "/api/v1/keys/{key}/rotate", "admin", self.rotate_key),
            Route("DELETE", "/api/v1/keys/{key}", "admin", self.revoke_key),
            Route("GET", "/api/v1/key", "infer", self.own_key),
            Route("GET", "/api/v1/usage", "infer", self.own_usage, (503,)),
        )

    async def list_keys(self) -> dict[str, Any]:
        """List API keys without their secrets, with times in Unix seconds. Revoked keys are omitted.

        Expired keys are included.
        """
        return self._admin.list_keys()

    async def create_key(self, body: NewKeyBody) -> dict[str, Any]:
        """Create an API key, and return its id and text. Only this response contains its secret.

        Raise `ProblemError`: 400 for a reserved name or invalid limits, 409 for a name in use. Raise `StoreError` (503)
        if the key cannot be stored.
        """
        self._check_key_name(body.name)
        answer = self._admin.create_key(body.name, list(body.scopes), body.ttl_seconds, _parse_limits(body.limits))
        await self._admin.store.flush()
        return answer

    async def limit_key(self, key: str, body: KeyLimitsBody) -> dict[str, Any]:
        """Replace all limits of a key: models, labels, rates, running and queued requests, priority, upstreams.

        A limit that the body omits is removed. Return the id of the key. Raise `ProblemError`: 400 for invalid limits,
        404 for an unknown key. Raise `StoreError` (503) if the change cannot be stored.
        """
        return await self._confirm_change(key, self._admin.set_key_limits(key, _parse_limits(body.limits)))

    async def rename_key(self, key: str, body: KeyNameBody) -> dict[str, Any]:
        """Rename a key, and return its id. Its secret, limits and usage do not change. Names of keys are unique.

        Raise `ProblemError`: 400 for a reserved name, 404 for an unknown key, 409 for a name in use. Raise `StoreError`
        (503) if the change cannot be stored.
        """
        self._check_key_name(body.name, except_key=key)
        return await self._confirm_change(key, self._admin.rename_key(key, body.name))

    def _check_key_name(self, name: str, except_key: str = "") -> None:
        try:
            self._admin.check_key_name(name, except_key)
        except NameReservedError as error:
            raise ProblemError(build_invalid(str(error), "name")) from None
        except NameTakenError as error:
            raise ProblemError(Problem(409, "name_taken", str(error), "name")) from None

    async def expire_key(self, key: str, body: KeyExpiryBody) -> dict[str, Any]:
        """Set when a key expires, in seconds from now. Return the id of the key.

        If `ttl_seconds` is null, the key does not expire. Raise `ProblemError` 404 for an unknown key. Raise
        `StoreError` (503) if the change cannot be stored.
        """
        return await self._confirm_change(key, self._admin.set_key_expiry(key, body.ttl_seconds))

    async def rotate_key(self, key: str) -> dict[str, Any]:
        """Replace the secret of a key, and return the key's id and new text. The old secret stops working at once.

        Only this response contains the new secret. Raise `ProblemError` 404 for an unknown key. Raise `StoreError`
        (503) if the change cannot be stored.
        """
        text = self._admin.rotate_key(key)
        return {**await self._confirm_change(key, text), "key": text}

    async def revoke_key(self, key: str) -> dict[str, Any]:
        """Revoke an API key at once, and return its id.

        Running requests of the key continue, but its streams of logs, events and the page end. Raise `ProblemError` 404
        for an unknown key. Raise `StoreError` (503) if the change cannot be stored; until the coordinator stops, the
        key is refused nevertheless.
        """
        return await self._confirm_change(key, self._admin.revoke_key(key))

    async def _confirm_change(self, key: str, known: object) -> dict[str, Any]:
        if not known:
            raise ProblemError(Problem(404, "key_not_found", f"there is no key {key[:40]!r}"))
        await self._admin.store.flush()
        return {"schema": 1, "id": key}

    async def keys_usage(self, key: str | None = None, since: Since = "", daily: bool = False) -> Response:
        """Return the requests and tokens of each key by model; with `daily`, per day, oldest first.

        `key` is the id of the only key to return; without it, all keys are returned, including revoked ones. `since` is
        the first day (UTC, such as `2026-01-31`); if empty, all stored days are included (400 days). The list is empty
        for a key without usage. Raise `ProblemError` 400 if `since` is not a day of the calendar. Raise `StoreError`
        (503) if the counts up to now cannot be stored.
        """
        return await self._answer_usage(key, since, daily=daily)

    async def own_usage(self, since: Since = "", daily: bool = False) -> Response:
        """Return the requests and tokens of the calling key by model; with `daily`, per day, oldest first.

        `since` is the first day (UTC, such as `2026-01-31`); if empty, all stored days are included (400 days). Raise
        `ProblemError` 400 if `since` is not a day of the calendar. Raise `StoreError` (503) if the counts up to now
        cannot be stored.
        """
        return await self._answer_usage(KEY.get(), since, daily=daily)

    async def own_key(self) -> dict[str, Any]:
        """Return the calling key without its secret: name, scopes, expiry and limits.

        `expires` is in Unix seconds; null if the key does not expire. Raise `ProblemError` 401 if the key was revoked
        during the request.
        """
        key = self._ring.find_key(KEY.get())
        if key is None:
            raise ProblemError(NO_KEY)
        return {
            "schema": 1,
            "id": key.id,
            "name": key.name,
            "scopes": sorted(key.scopes),
            "expires": key.expires,
            "limits": msgspec.to_builtins(key.limits or NO_LIMITS),
        }

    async def _answer_usage(self, key: str | None, since: str, *, daily: bool) -> Response:
        _check_day(since)
        self._admin.usage.record(self._traffic.usage)  # up to now
        sum_rows = self._admin.usage.prepare_sum(key, since, daily=daily)
        body = await run_in_worker(lambda: _encode_usage(sum_rows()))
        return Response(body, media_type="application/json")


def _check_day(day: str) -> None:
    """Raise `ProblemError` (400) for a text such as `2026-02-30`, which would include other days or none."""
    try:
        date.fromisoformat(day or "2000-01-01")
    except ValueError:
        raise ProblemError(build_invalid(f"since: {day} is not a day of the calendar", "since")) from None


def _encode_usage(answer: dict[str, Any]) -> bytes:
    return msgspec.json.encode({**answer, "usage": encoded_list(answer["usage"])})


def _parse_limits(limits: Mapping[str, Any]) -> KeyLimits:
    try:
        return msgspec.convert(limits, KeyLimits)
    except msgspec.ValidationError as error:
        raise ProblemError(build_invalid(f"limits: {error}", "limits")) from None

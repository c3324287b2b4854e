"""Administration of tokens and keys without a running coordinator, directly on the locked database."""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import structlog

from coordinator.client.api_client import ApiSession
from coordinator.client.errors import NOT_FOUND, REFUSED, UNREACHABLE, CommandError
from coordinator.client.member_client import read_member_identity
from coordinator.joining.join_tokens import JoinTokens
from coordinator.state.access_admin import AccessAdmin, NameReservedError, NameTakenError, load_pepper
from coordinator.state.database import Database
from coordinator.state.store_errors import StoreError
from coordinator.tls.cluster_ca import AuthorityError, ClusterCa
from router.admission.api_keys import KeyRing
from router.admission.rate_limits import KeyLimits

_VERBS = {
    "POST": "create",
    "DELETE": "revoke",
    "limits": "limit",
    "name": "rename",
    "expiry": "expire",
    "rotate": "rotate",
}
"""Verbs of the actions in the audit log, by method or operation: the names of the API's handlers."""


def run_offline(session: ApiSession, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Perform the operation of an API route for tokens, keys or audit on the state folder, and return its JSON.

    A change is written to the audit log as by the API, with the actor `offline`. Raise `CommandError` if there is no
    cluster, or if a file cannot be read or written. Raise it also if the id is unknown, the name is taken, or a value
    is refused.
    """
    if not (session.state / "cluster.db").exists():
        if read_member_identity(session.state) is not None:
            raise CommandError(UNREACHABLE, session.explain_no_coordinator())
        raise CommandError(NOT_FOUND, f"there is no cluster in {session.state}: create one with `cluster up`")
    try:
        with _hide_log():
            return _use_database(session, method, path, body)
    except (StoreError, AuthorityError) as error:
        raise CommandError(1, str(error)) from None
    except OSError as error:
        place = error.filename or session.state
        raise CommandError(1, f"{place} cannot be used: {error.strerror or error}: check its owner and mode") from None


@contextmanager
def _hide_log() -> Generator[None]:
    """Write only warnings of the log, and to standard error, while the context is open.

    Standard output is for the answer of the command.
    """
    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("warning"),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def _use_database(session: ApiSession, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    store = Database(session.state)
    try:
        authority = ClusterCa(session.state / "authority", time.time, is_new_cluster=not store.meta.cluster)
        pepper = load_pepper(session.state, len(store.keys))
        tokens = JoinTokens(store, authority.ca, time.time)
        return _run_operation(AccessAdmin(store, tokens, KeyRing(pepper), pepper, time.time), method, path, body)
    finally:
        store.close()


def _run_operation(admin: AccessAdmin, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    path, _, query = path.removeprefix("/api/v1/").partition("?")
    kind, name, operation = [*path.split("/"), "", ""][:3]
    parameters = dict(parse_qsl(query))
    if method == "GET":
        return _answer_query(admin, path, parameters)
    if body:
        _check_body(kind, operation, body)
    if kind == "keys" and "name" in body:
        try:
            admin.check_key_name(body["name"], name)
        except NameReservedError as error:
            raise CommandError(2, str(error)) from None
        except NameTakenError as error:
            raise CommandError(REFUSED, str(error)) from None
    if operation:
        answer = _change_key(admin, name, operation, body)
    elif method != "POST":
        if not (admin.revoke_token(name) if kind == "tokens" else admin.revoke_key(name)):
            raise CommandError(NOT_FOUND, f"there is no {kind.removesuffix('s')} {name}")
        answer = {"schema": 1, "id": name}
    elif kind == "tokens":
        answer = admin.create_token(body["ttl_seconds"], body["uses"], body["name"])
    else:
        answer = admin.create_key(body["name"], body["scopes"], body["ttl_seconds"], _parse_limits(body))
    verb = _VERBS[operation or method]
    subject = name or f"{body['name']} {answer['id']}".strip()
    admin.store.audit.add(time.time(), "offline", f"{verb}_{kind.removesuffix('s')}", subject)
    return answer


def _check_body(kind: str, operation: str, body: dict[str, Any]) -> None:
    """Raise `CommandError` if the API would refuse a body for the type or bounds of a field."""
    from pydantic import ValidationError

    from coordinator.api.routes.joining import NewTokenBody
    from coordinator.api.routes.keys import KeyExpiryBody, KeyLimitsBody, KeyNameBody, NewKeyBody

    bodies = {"limits": KeyLimitsBody, "name": KeyNameBody, "expiry": KeyExpiryBody}
    try:
        bodies.get(operation, NewTokenBody if kind == "tokens" else NewKeyBody).model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise CommandError(2, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _change_key(admin: AccessAdmin, key: str, operation: str, body: dict[str, Any]) -> dict[str, Any]:
    """Change one property of a key, as the API's route `operation` of keys does. Return the body of its response.

    Raise `CommandError` if no key has the id `key`.
    """
    match operation:
        case "limits":
            known = admin.set_key_limits(key, _parse_limits(body))
        case "name":
            known = admin.rename_key(key, body["name"])
        case "expiry":
            known = admin.set_key_expiry(key, body["ttl_seconds"])
        case _:
            known = admin.rotate_key(key)
    if not known:
        raise CommandError(NOT_FOUND, f"there is no key {key}")
    return {"schema": 1, "id": key} | ({"key": known} if isinstance(known, str) else {})


def _answer_query(admin: AccessAdmin, path: str, query: dict[str, str]) -> dict[str, Any]:
    match path:
        case "tokens":
            return admin.list_tokens()
        case "keys":
            return admin.list_keys()
        case "keys/usage":
            return admin.usage.sum(query.get("key"), query.get("since", ""))
        case _:
            return admin.list_audit_entries(int(query["last"]))


def _parse_limits(body: dict[str, Any]) -> KeyLimits:
    try:
        return msgspec.convert(body["limits"], KeyLimits)
    except msgspec.ValidationError as error:
        raise CommandError(2, f"limits: {error}") from None

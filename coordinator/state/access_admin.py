"""Administration of join tokens and API keys, with or without a running coordinator."""

import secrets
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from coordinator.joining.join_tokens import JoinTokens
from coordinator.state.database import Database
from coordinator.state.rows import KeyRow
from coordinator.state.store_errors import StoreError
from coordinator.state.usage_history import UsageHistory
from host.private_files import write_private
from router.admission.api_keys import ApiKey, KeyRing, new_key, new_secret
from router.admission.rate_limits import NO_LIMITS, KeyLimits

LOCAL_KEY_NAME = "local"
"""Name of the API key of local commands (`run.json`). The key is not listed, and valid while the coordinator runs."""

PAGE_KEY_NAME = "page"
"""Name of the keys of browser sessions, in the audit log. These keys are not listed."""


def load_pepper(state: Path, keys: int) -> bytes:
    """Return the secret for digests of API keys. Create it on first use (file `pepper`, 32 bytes, mode 0600).

    `keys` is the number of stored keys. Raise `StoreError` if there are keys and the secret is lost. Raise `OSError` if
    the file cannot be read or written.
    """
    file = state / "pepper"
    pepper = file.read_bytes() if file.exists() else b""
    if not pepper and keys:
        quoted = shlex.quote(str(file))
        raise StoreError(
            f"{file} is {'empty' if file.exists() else 'missing'}, and without it none of {keys} API keys is valid: "
            "restore it from a backup (`cluster restore FILE --replace`), or copy it from there. To use new keys, run "
            f"`(umask 077; head -c 32 /dev/urandom > {quoted})`, then `cluster key rotate NAME` for each key"
        )
    if not pepper:
        pepper = secrets.token_bytes(32)
        write_private(file, pepper)
    return pepper


class NameReservedError(ValueError):
    """Raised for a name that the audit log reserves (`LOCAL_KEY_NAME` and `PAGE_KEY_NAME`)."""


class NameTakenError(ValueError):
    """Raised if another key has this name or id, because the audit log and `cluster key` could not distinguish them."""


@dataclass(frozen=True, slots=True)
class AccessAdmin:
    """Administration of join tokens, API keys and audit log, in the database and in the key ring.

    Methods that return a dict return the JSON body of the API's response. `clock` returns Unix seconds. While changes
    cannot be written, methods that change the database raise `StoreError`. No key is then created or changed. Any other
    change, such as a revocation, is in effect and waits for the disk.
    """

    store: Database
    tokens: JoinTokens
    ring: KeyRing
    pepper: bytes
    """Secret for digests of API keys."""
    clock: Callable[[], float]

    @property
    def usage(self) -> UsageHistory:
        """Usage of the API keys in the database."""
        return UsageHistory(self.store, self.ring, self.clock)

    def load_keys(self) -> None:
        """Add the stored keys to the key ring."""
        for row in self.store.keys.values():
            self.ring.put(_to_api_key(row))

    def create_token(self, ttl: float, uses: int, name: str) -> dict[str, Any]:
        """Create a join token for `uses` nodes, valid for `ttl` seconds. The result contains its id and its text.

        `name` is shown in the list of tokens. Delete the tokens that expired more than
        `join_tokens.EXPIRED_KEPT_SECONDS` ago. Raise `ValueError` if `uses` or `ttl` is not positive, and `StoreError`
        after a failed write.
        """
        token = self.tokens.create(ttl, uses, name)
        return {"schema": 1, "id": token.id, "token": str(token)}

    def list_tokens(self) -> dict[str, Any]:
        """Return the join tokens without their secrets, newest first. Times are in Unix seconds.

        Revoked tokens are omitted. Used and expired tokens are included until they are deleted.
        """
        rows = [
            {"id": t.id, "name": t.name, "uses_left": t.uses_left, "created": t.created, "expires": t.expires}
            for t in self.tokens.list()
            if not t.revoked
        ]
        return {"schema": 1, "tokens": rows}

    def revoke_token(self, token: str) -> bool:
        """Revoke a join token by its id. Return False if no token has this id.

        Raise `StoreError` after a failed write.
        """
        return self.tokens.revoke(token)

    def check_key_name(self, name: str, except_key: str = "") -> None:
        """Check that a name can be used for an API key. Case is ignored.

        Raise `NameTakenError` if a key other than `except_key` (id) has this name or id. Raise `NameReservedError` for
        `LOCAL_KEY_NAME` and `PAGE_KEY_NAME`.
        """
        if name in (LOCAL_KEY_NAME, PAGE_KEY_NAME):
            raise NameReservedError(f"name: {name!r} is reserved for the owner of this machine in the audit log")
        for row in self.store.keys.values():
            if row.id != except_key and name.casefold() in (row.name.casefold(), row.id.casefold()):
                raise NameTakenError(
                    f"a key named {row.name} exists already ({row.id}): use another name, or revoke that key first"
                )

    def create_key(
        self, name: str, scopes: list[str], ttl: float | None, limits: KeyLimits | None = None
    ) -> dict[str, Any]:
        """Create an API key that is valid for `ttl` seconds; None: without expiry.

        The caller must check `name` with `check_key_name`. The result contains the key's text, which is not stored.
        Raise `ValueError` for an unknown scope or an empty list of scopes, and `StoreError` after a failed write.
        """
        self.store.raise_failure()
        limits = None if limits == NO_LIMITS else limits
        now = self.clock()
        key, text = new_key(
            self.pepper, name, scopes, created=now, expires=None if ttl is None else now + ttl, limits=limits
        )
        self.store.keys.put(KeyRow(key.id, name, tuple(sorted(key.scopes)), key.digest, now, key.expires, limits))
        self.ring.put(key)
        return {"schema": 1, "id": key.id, "key": text}

    def set_key_limits(self, key: str, limits: KeyLimits) -> bool:
        """Replace the limits of a key, effective at once. Return False if no key has the id `key`.

        Raise `StoreError` after a failed write.
        """
        return self._change_key(key, limits=None if limits == NO_LIMITS else limits)

    def rename_key(self, key: str, name: str) -> bool:
        """Rename a key. Return False if no key has the id `key`.

        The caller must check `name` with `check_key_name`. Raise `StoreError` after a failed write.
        """
        return self._change_key(key, name=name)

    def set_key_expiry(self, key: str, ttl: float | None) -> bool:
        """Set the expiry of a key to `ttl` seconds from now; None: never. Return False if no key has the id `key`.

        Raise `StoreError` after a failed write.
        """
        return self._change_key(key, expires=None if ttl is None else self.clock() + ttl)

    def rotate_key(self, key: str) -> str | None:
        """Replace the secret of a key. Return the key's new text; None if no key has the id `key`.

        Raise `StoreError` after a failed write.
        """
        digest, text = new_secret(self.pepper, key)
        return text if self._change_key(key, digest=digest) else None

    def _change_key(self, key: str, **changes: Any) -> bool:
        row = self.store.keys.get(key)
        if row is None:
            return False
        self.store.raise_failure()
        row = replace(row, **changes)
        self.store.keys.put(row)
        self.ring.put(_to_api_key(row))
        return True

    def list_keys(self) -> dict[str, Any]:
        """Return the API keys without their secrets. Times are in Unix seconds.

        Expired keys are included, revoked keys are not.
        """
        rows = [
            {
                "id": row.id,
                "name": row.name,
                "scopes": list(row.scopes),
                "created": row.created,
                "expires": row.expires,
                "limits": msgspec.to_builtins(row.limits or NO_LIMITS),
            }
            for row in self.store.keys.values()
        ]
        return {"schema": 1, "keys": rows}

    def revoke_key(self, key: str) -> bool:
        """Revoke a key, effective at once. Return False if no stored key has the id `key`.

        Raise `StoreError` after a failed write. The key is then no longer valid in this process.
        """
        if key not in self.store.keys:
            return False
        self.ring.drop(key)
        return self.store.keys.revoke(key, self.clock())

    def list_audit_entries(self, last: int) -> dict[str, Any]:
        """Return the newest `last` entries of the audit log, oldest first. Times are in Unix seconds.

        `actor_name` is the name of the API key that is the actor. It is empty for any other actor, and for a revoked
        key.
        """
        names = {row.id: row.name for row in self.store.keys.values()}
        entries = list(self.store.audit)
        newest = entries[max(0, len(entries) - last) :]
        acts = [{**asdict(entry), "actor_name": names.get(entry.actor, "")} for entry in newest]
        return {"schema": 1, "acts": acts}


def _to_api_key(row: KeyRow) -> ApiKey:
    return ApiKey(row.id, row.name, frozenset(row.scopes), row.digest, row.created, row.expires, row.limits)

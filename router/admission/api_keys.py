"""API keys: made once, shown once, stored as HMAC-SHA256(pepper, key), compared in constant time on bytes.

The id in a key is no secret: it finds the digest to compare with. An unknown id costs the same comparison as a wrong
secret, so neither tells a caller which ids exist.
"""

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router.admission.rate_limits import KeyLimits

SCOPES = frozenset({"infer", "admin", "metrics"})
_PREFIX = b"mp_"
_SECRET_BYTES = 32
_LONGEST = 256
_NO_DIGEST = bytes(32)
"""What is compared with where no key has the id."""
SESSION = b"x-session-id"
LONGEST_SESSION = 200


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key without its secret. Times in seconds since 1970; `expires` None means never."""

    id: str
    name: str
    scopes: frozenset[str]
    digest: bytes
    created: float
    expires: float | None = None
    limits: KeyLimits | None = None

    def allows(self, scope: str) -> bool:
        """Say whether the key may do this; `admin` may do everything."""
        return scope in self.scopes or "admin" in self.scopes


def nobody_known(now: float) -> ApiKey:
    """Give the key of those who show none: it may ask models, and nothing else."""
    return ApiKey("anonymous", "anonymous", frozenset({"infer"}), b"", now)


def digest_of(pepper: bytes, key: bytes) -> bytes:
    """Give what is stored of a key."""
    return hmac.digest(pepper, key, "sha256")


def new_secret(pepper: bytes, key_id: str) -> tuple[bytes, str]:
    """Return the digest of a new secret of a key, and the key's text `mp_<id>_<43 characters>`."""
    secret = base64.urlsafe_b64encode(secrets.token_bytes(_SECRET_BYTES)).decode().rstrip("=")
    text = f"mp_{key_id}_{secret}"
    return digest_of(pepper, text.encode()), text


def new_key(
    pepper: bytes,
    name: str,
    scopes: Iterable[str],
    *,
    created: float,
    expires: float | None = None,
    limits: KeyLimits | None = None,
) -> tuple[ApiKey, str]:
    """Make a key; give its record and its text `mp_<id>_<43 characters>`, which is shown once and kept nowhere.

    Raises ValueError for a scope that is not one of infer, admin, metrics, or when none is given.
    """
    wanted = frozenset(scopes)
    if not wanted or not wanted <= SCOPES:
        raise ValueError(f"scopes are {', '.join(sorted(SCOPES))}; not {', '.join(sorted(wanted - SCOPES)) or 'none'}")
    key_id = base64.b32encode(secrets.token_bytes(5)).decode().lower()
    digest, text = new_secret(pepper, key_id)
    return ApiKey(key_id, name, wanted, digest, created, expires, limits), text


class KeyRing:
    """The keys in force, in memory on the loop; the coordinator persists them."""

    def __init__(self, pepper: bytes, clock: Callable[[], float] = time.time) -> None:
        self._pepper = pepper
        self._clock = clock
        self._keys: dict[bytes, ApiKey] = {}
        self._salt = secrets.token_bytes(_SECRET_BYTES)
        self._proven: dict[bytes, ApiKey] = {}
        self.refused = 0
        """Keys that were shown and not known, or expired."""
        self.anonymous: ApiKey | None = None
        """Who a caller is that shows no key of ours; None: nobody, and it gets nothing."""

    def put(self, key: ApiKey) -> None:
        """Let a key in, in place of one with the same id."""
        self._proven.clear()
        self._keys[key.id.encode()] = key

    def drop(self, key_id: str) -> bool:
        """Revoke a key at once; False when there was none."""
        self._proven.clear()
        return self._keys.pop(key_id.encode(), None) is not None

    def list(self) -> list[ApiKey]:
        """Give all keys, oldest first."""
        return sorted(self._keys.values(), key=lambda key: key.created)

    def names(self) -> dict[str, str]:
        """Return the name of every key in force by its id, the one of clients without a key included."""
        names = {key.id: key.name for key in self._keys.values()}
        return names if self.anonymous is None else {**names, self.anonymous.id: self.anonymous.name}

    def of(self, key_id: str) -> ApiKey | None:
        """Return a key by its id, the one of clients without a key included; None where there is none."""
        key = self._keys.get(key_id.encode())
        return self.anonymous if key is None and self.anonymous and self.anonymous.id == key_id else key

    def limits(self, key_id: str) -> KeyLimits | None:
        """Give the limits of a key in force, None where it has none."""
        key = self._keys.get(key_id.encode())
        return None if key is None else key.limits

    def check(self, presented: bytes | str) -> ApiKey | None:
        """Give the key that a client presented, None when it is unknown, wrong or expired.

        What was proven before is known again by a salted hash of its whole text, which costs a tenth of the HMAC.
        """
        text = presented.encode("utf-8", "replace") if isinstance(presented, str) else presented
        if self.anonymous is not None and not text.startswith(_PREFIX):  # libraries insist on sending something
            return self.anonymous
        known = self._find(text) if len(text) <= _LONGEST else None
        if known is None or self._expired(known):
            self.refused += 1
            return None
        return known

    def _find(self, text: bytes) -> ApiKey | None:
        """Return the key with this text. Each key has one, so no more is remembered than there are keys."""
        seen = hashlib.blake2b(text, key=self._salt).digest()
        known = self._proven.get(seen) or self._prove(text)
        if known is not None:
            self._proven[seen] = known
        return known

    def knows(self, presented: bytes) -> bool:
        """Return whether a key is one of ours and in force, without counting a wrong one."""
        known = self._prove(presented) if len(presented) <= _LONGEST else None
        return known is not None and not self._expired(known)

    def _prove(self, text: bytes) -> ApiKey | None:
        key_id, _, _ = text.removeprefix(_PREFIX).partition(b"_")
        key = self._keys.get(key_id)
        right = hmac.compare_digest(digest_of(self._pepper, text), _NO_DIGEST if key is None else key.digest)
        return key if right else None

    def _expired(self, key: ApiKey) -> bool:
        return key.expires is not None and key.expires <= self._clock()


def credential(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Take the key out of lower-case raw headers: `Authorization: Bearer KEY`, else `x-api-key: KEY`."""
    other: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
        elif name == b"x-api-key":
            other = value.strip()
    return other


def session_of(value: bytes | None) -> str:
    """Read the header that names a conversation; empty where there is none, or it is too long to be a name."""
    return "" if value is None or len(value) > LONGEST_SESSION else value.decode("latin-1").strip()

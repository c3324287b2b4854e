"""Create and check API keys. Only HMAC-SHA256(pepper, key) of a key is stored, and compared in constant time.

The id in a key is not secret: it selects the digest to compare with. An unknown id costs the same comparison as a wrong
secret. The time of a check therefore does not reveal which ids exist.
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
_MAX_KEY_BYTES = 256
_NO_DIGEST = bytes(32)
"""Digest to compare with if no key has the id."""
_PROXY_HEADERS = frozenset(
    {
        b"forwarded",
        b"via",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-real-ip",
        b"cf-connecting-ip",
        b"tailscale-user-login",
    }
)
"""Headers that proxies add: those of RFC 7239 and RFC 9110, and those of nginx, Caddy, Cloudflare and Tailscale."""
SESSION_HEADER = b"x-session-id"
"""Header with which a client names its conversation."""
MAX_SESSION_BYTES = 200
"""Maximum bytes of a session name. A longer name is ignored (`parse_session`)."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Stored API key: its identity, rights and digest, without its secret."""

    id: str
    """Public id, which is a part of the key's text."""
    name: str
    """Name for people."""
    scopes: frozenset[str]
    """Rights of the key, from `SCOPES`."""
    digest: bytes
    """Digest of the key's text (`compute_digest`); empty for the key of clients without a key."""
    created: float
    """Creation time in Unix seconds."""
    expires: float | None = None
    """Expiry in Unix seconds; None if the key never expires."""
    limits: KeyLimits | None = None
    """Limits of the key; None if only the bounds for every key apply."""

    def allows(self, scope: str) -> bool:
        """Return whether the key has a scope; `admin` includes every scope."""
        return scope in self.scopes or "admin" in self.scopes


def create_anonymous_key(now: float) -> ApiKey:
    """Return the key that stands for clients without a key. Its only scope is `infer`. `now` is in Unix seconds."""
    return ApiKey("anonymous", "anonymous", frozenset({"infer"}), b"", now)


def compute_digest(pepper: bytes, key: bytes) -> bytes:
    """Return the digest that is stored for a key: HMAC-SHA256 of the key's text under `pepper`."""
    return hmac.digest(pepper, key, "sha256")


def new_secret(pepper: bytes, key_id: str) -> tuple[bytes, str]:
    """Create a secret for the key `key_id`. Return the digest to store, and the key's text `mp_<id>_<43 characters>`.

    The text is shown to the user once and cannot be recovered.
    """
    secret = base64.urlsafe_b64encode(secrets.token_bytes(_SECRET_BYTES)).decode().rstrip("=")
    text = f"mp_{key_id}_{secret}"
    return compute_digest(pepper, text.encode()), text


def new_key(
    pepper: bytes,
    name: str,
    scopes: Iterable[str],
    *,
    created: float,
    expires: float | None = None,
    limits: KeyLimits | None = None,
) -> tuple[ApiKey, str]:
    """Create a key. Return the key to store, which has only a digest, and its text `mp_<id>_<43 characters>`.

    `created` and `expires` are in Unix seconds; with `expires` None, the key never expires. With `limits` None, only
    the bounds for every key apply. Raise `ValueError` for a scope outside of `SCOPES`, or without any scope.
    """
    wanted = frozenset(scopes)
    if not wanted or not wanted <= SCOPES:
        raise ValueError(f"scopes are {', '.join(sorted(SCOPES))}; not {', '.join(sorted(wanted - SCOPES)) or 'none'}")
    key_id = base64.b32encode(secrets.token_bytes(5)).decode().lower()
    digest, text = new_secret(pepper, key_id)
    return ApiKey(key_id, name, wanted, digest, created, expires, limits), text


class KeyRing:
    """All API keys in memory, to authenticate clients. The coordinator persists the keys.

    `pepper` is the secret of the digests (`compute_digest`). `clock()` returns Unix seconds. `anonymous` is the key for
    requests without a key; None refuses such requests.
    """

    def __init__(
        self, pepper: bytes, clock: Callable[[], float] = time.time, *, anonymous: ApiKey | None = None
    ) -> None:
        self._pepper = pepper
        self._clock = clock
        self._keys: dict[bytes, ApiKey] = {}
        self._salt = secrets.token_bytes(_SECRET_BYTES)
        self._proven: dict[bytes, ApiKey] = {}
        self.refused = 0
        """Number of texts for which `check` returned None."""
        self.anonymous = anonymous
        """Key for requests without a Macpool key; None if such requests are refused."""

    def put(self, key: ApiKey) -> None:
        """Add a key, or replace the key with the same id."""
        self._proven.clear()
        self._keys[key.id.encode()] = key

    def drop(self, key_id: str) -> bool:
        """Revoke a key at once. Return False if no key has this id."""
        self._proven.clear()
        return self._keys.pop(key_id.encode(), None) is not None

    def list(self) -> list[ApiKey]:
        """Return all keys except `anonymous`, oldest first."""
        return sorted(self._keys.values(), key=lambda key: key.created)

    def get_names(self) -> dict[str, str]:
        """Return the names of all keys by id, including `anonymous`."""
        names = {key.id: key.name for key in self._keys.values()}
        return names if self.anonymous is None else {**names, self.anonymous.id: self.anonymous.name}

    def find_key(self, key_id: str) -> ApiKey | None:
        """Return the key with this id, which may be `anonymous`; None for an unknown id."""
        key = self._keys.get(key_id.encode())
        return self.anonymous if key is None and self.anonymous and self.anonymous.id == key_id else key

    def get_limits(self, key_id: str) -> KeyLimits | None:
        """Return the limits of a key by its id; None for an unknown id, a key without limits, and `anonymous`."""
        key = self._keys.get(key_id.encode())
        return None if key is None else key.limits

    def compute_salted_hash(self, text: bytes) -> bytes:
        """Return the hash of a key's text by which this object recognizes a text that it has verified before."""
        return hashlib.blake2b(text, key=self._salt).digest()

    def check(self, presented: bytes | str, salted_hash: bytes | None = None) -> ApiKey | None:
        """Return the key whose text a client has presented; None if the text is unknown or wrong, or the key expired.

        `salted_hash` is the hash of the text (`compute_salted_hash`), if the caller has it; None otherwise. A text that
        was verified before is recognized by this hash, which costs a tenth of the HMAC. If `anonymous` is set, it is
        returned for every text that does not begin with `mp_`. A result of None increases `refused`.
        """
        known = self.find(presented, salted_hash)
        self.refused += known is None
        return known

    def find(self, presented: bytes | str, salted_hash: bytes | None = None) -> ApiKey | None:
        """Return the result of `check` without increasing `refused`, for callers that call `check` later as well."""
        text = presented.encode("utf-8", "replace") if isinstance(presented, str) else presented
        if self.anonymous is not None and not text.startswith(_PREFIX):  # client libraries always send a key
            return self.anonymous
        known = None if salted_hash is None else self._proven.get(salted_hash)
        if known is None and len(text) <= _MAX_KEY_BYTES:
            known = self._prove_once(text, salted_hash or self.compute_salted_hash(text))
        return None if known is None or self._is_expired(known) else known

    def _prove_once(self, text: bytes, digest: bytes) -> ApiKey | None:
        """Return the key with this text, or None. Cache a found key under `digest`, the salted hash of the text.

        Each key has one text. The cache is therefore no larger than the number of keys.
        """
        known = self._proven.get(digest) or self._prove(text)
        if known is not None:
            self._proven[digest] = known
        return known

    def is_valid(self, presented: bytes) -> bool:
        """Return whether a client has presented the text of a known key that has not expired.

        Unlike `check`, do not count a wrong text in `refused`, and never accept `anonymous`.
        """
        known = self._prove(presented) if len(presented) <= _MAX_KEY_BYTES else None
        return known is not None and not self._is_expired(known)

    def _prove(self, text: bytes) -> ApiKey | None:
        key_id, _, _ = text.removeprefix(_PREFIX).partition(b"_")
        key = self._keys.get(key_id)
        right = hmac.compare_digest(compute_digest(self._pepper, text), _NO_DIGEST if key is None else key.digest)
        return key if right else None

    def _is_expired(self, key: ApiKey) -> bool:
        return key.expires is not None and key.expires <= self._clock()


def extract_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key in raw headers with lower-case names: `Authorization: Bearer KEY`, or else `x-api-key: KEY`.

    Return None if neither is present.
    """
    other: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
        elif name == b"x-api-key":
            other = value.strip()
    return other


def is_forwarded(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a proxy has forwarded a request, by its raw headers with lower-case names.

    A proxy that adds none of the usual headers, such as `x-forwarded-for` or `via`, is not recognized.
    """
    return any(name in _PROXY_HEADERS for name, _ in headers)


def parse_session(value: bytes | None) -> str:
    """Return the name of a conversation from the value of its header, without spaces around the name.

    Return an empty text if the header is absent or longer than `MAX_SESSION_BYTES`.
    """
    return "" if value is None or len(value) > MAX_SESSION_BYTES else value.decode("latin-1").strip()

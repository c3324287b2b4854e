"""Sign-in to the page: `cluster open` prints a one-time link. The page exchanges its code for a browser key.

The code is in the link's fragment (after `#`), which browsers do not send to a server or write to a log. A code is
valid for two minutes and one use. A browser key has administrator scope and is valid for twelve hours. The coordinator
keeps browser keys only in memory: a restart ends them. Above `MAX_KEYS`, the oldest one ends. The page stores its key
in `localStorage`, which belongs to one origin. There is no cookie. Therefore no other site and no other port of this
machine can use the key.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable

from coordinator.state.access_admin import PAGE_KEY_NAME
from router.admission.api_keys import KeyRing, new_key

CODE_SECONDS = 120.0
"""Validity of a sign-in code, in seconds."""
KEY_SECONDS = 12 * 3600.0
"""Validity of a browser key, in seconds."""
MAX_CODES, MAX_KEYS = 16, 64
"""Maximum numbers of unused sign-in codes and of browser keys. Above the maximum, the oldest one is removed."""


class BrowserSessions:
    """Unused sign-in codes of the page, and the browser keys that were created from codes.

    Browser keys are added to `ring`. `pepper` is the secret for the digests of keys. `clock` returns Unix seconds.
    """

    def __init__(self, ring: KeyRing, pepper: bytes, clock: Callable[[], float]) -> None:
        self._ring = ring
        self._pepper = pepper
        self._clock = clock
        self._codes: dict[bytes, float] = {}
        self._keys: dict[str, float] = {}

    def create_code(self) -> str:
        """Create and return a code for one sign-in, valid for `CODE_SECONDS`. Above `MAX_CODES`, remove the oldest."""
        self._delete_expired()
        while len(self._codes) >= MAX_CODES:
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(24)
        self._codes[_compute_digest(code)] = self._clock() + CODE_SECONDS
        return code

    def redeem_code(self, code: str) -> tuple[str, float] | None:
        """Exchange a sign-in code for a key. Return the key and its expiry in Unix seconds.

        Above `MAX_KEYS`, revoke the oldest browser key. Return None for a code that is unknown, used or expired.
        """
        self._delete_expired()
        digest = _compute_digest(code)
        stored = next((issued for issued in self._codes if hmac.compare_digest(issued, digest)), None)
        if stored is None:
            return None
        del self._codes[stored]
        while len(self._keys) >= MAX_KEYS:
            self.end_session(next(iter(self._keys)))
        now = self._clock()
        key, text = new_key(self._pepper, PAGE_KEY_NAME, ["admin"], created=now, expires=now + KEY_SECONDS)
        self._ring.put(key)
        self._keys[key.id] = now + KEY_SECONDS
        return text, now + KEY_SECONDS

    def end_session(self, key: str) -> bool:
        """Revoke a browser key by its id. Return False if no browser key has the id `key`."""
        if self._keys.pop(key, None) is None:
            return False
        self._ring.drop(key)
        return True

    def _delete_expired(self) -> None:
        now = self._clock()
        self._codes = {code: until for code, until in self._codes.items() if until > now}
        for key in [key for key, until in self._keys.items() if until <= now]:
            self.end_session(key)


def _compute_digest(code: str) -> bytes:
    return hashlib.sha256(code.encode(errors="replace")).digest()

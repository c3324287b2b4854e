"""Sign-in to the page: `cluster open` prints a one-time link, which the page exchanges for a key of its own.

The code is in the link's fragment (after `#`), which browsers send to no server and write to no log. It is valid for
two minutes and one use. The key has administrator scope, is valid for twelve hours, and exists in memory only. The page
keeps it for its own origin. There is no cookie, hence no foreign site and no other port of this machine can use it.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable

from router.admission.api_keys import KeyRing, new_key

PAGE = "page"
"""Name of browser keys in the audit log. They are not listed."""
CODE_SECONDS = 120.0
KEY_SECONDS = 12 * 3600.0
MAX_CODES, MAX_KEYS = 16, 64


class BrowserSessions:
    """Unused sign-in codes and the browser keys. `clock` returns Unix seconds."""

    def __init__(self, ring: KeyRing, pepper: bytes, clock: Callable[[], float]) -> None:
        self._ring = ring
        self._pepper = pepper
        self._clock = clock
        self._codes: dict[bytes, float] = {}
        self._keys: dict[str, float] = {}

    def create_code(self) -> str:
        """Create a code for one sign-in. At the limit, the oldest code is removed."""
        self._forget()
        while len(self._codes) >= MAX_CODES:
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(24)
        self._codes[_digest(code)] = self._clock() + CODE_SECONDS
        return code

    def enter(self, code: str) -> tuple[str, float] | None:
        """Change a code for a key; give it and its last moment, or None for a code that is unknown, used or old."""
        self._forget()
        digest = _digest(code)
        found = next((one for one in self._codes if hmac.compare_digest(one, digest)), None)
        if found is None:
            return None
        del self._codes[found]
        while len(self._keys) >= MAX_KEYS:
            self.end_session(next(iter(self._keys)))
        now = self._clock()
        key, text = new_key(self._pepper, PAGE, ["admin"], created=now, expires=now + KEY_SECONDS)
        self._ring.put(key)
        self._keys[key.id] = now + KEY_SECONDS
        return text, now + KEY_SECONDS

    def end_session(self, key: str) -> bool:
        """End a visit at once; False for a key that is no visitor's."""
        if self._keys.pop(key, None) is None:
            return False
        self._ring.drop(key)
        return True

    def _forget(self) -> None:
        now = self._clock()
        self._codes = {code: until for code, until in self._codes.items() if until > now}
        for key in [key for key, until in self._keys.items() if until <= now]:
            self.end_session(key)


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode(errors="replace")).digest()

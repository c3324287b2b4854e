"""Join tokens: made for a person, redeemed by a node that proves to know the secret without sending it.

A peer hears `token_expired`, `token_used` or `token_unknown` only after it proved the secret; without the proof it
hears `token_wrong` or `token_unknown`. The log says which it really was, with the token's id and never more.
Checking and counting down happen in one call on the loop that owns the store, so a token cannot be used twice.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import structlog

from coordinator.state.database import Store, TokenRow
from wire.identity import JoinToken, new_token, request_mac, token_key

log = structlog.get_logger()

USUAL_LIFE = 3600.0
"""Seconds that a token is good for unless said otherwise."""
KEPT_AFTER = 7 * 24 * 3600.0
"""Seconds that an expired token stays in the list, so that a late redeemer hears `token_expired`."""

_NOBODY = bytes(32)
"""Key against which the MAC of an unknown token is checked, so that both answers take the same time."""


def join_line(url: str, token: str) -> str:
    """Return the line to type on a Mac that is to join. `echo` belongs to the shell, so that the token does not stand
    in the list of processes, which everybody on that machine can read."""
    return f"echo {token} | cluster join {url} --token-file -"


class Redemption(StrEnum):
    """What became of an attempt; all but ACCEPTED are reasons of `Denied`."""

    ACCEPTED = "accepted"
    UNKNOWN = "token_unknown"
    WRONG = "token_wrong"
    EXPIRED = "token_expired"
    USED = "token_used"


MESSAGES = {
    Redemption.UNKNOWN: "this token is not known here, or it was revoked: make one with `cluster token create`",
    Redemption.WRONG: "the token's secret is not the right one: copy the whole token again",
    Redemption.EXPIRED: "the token has expired: make a new one with `cluster token create`",
    Redemption.USED: "the token was used already: make a new one with `cluster token create`",
}


@dataclass(frozen=True, slots=True)
class Token:
    """A join token as it may be listed: nothing in it is secret. Times in Unix seconds."""

    id: str
    name: str
    created: float
    expires: float
    uses_left: int
    revoked: bool


class Tokens:
    """The join tokens of a cluster whose CA is `ca` (DER). `clock` gives Unix seconds."""

    def __init__(self, store: Store, ca: bytes, clock: Callable[[], float]) -> None:
        self._store = store
        self._ca = ca
        self._clock = clock
        self._replacing: set[str] = set()
        """Tokens of this process for its own machine, whose node may have lost its identity."""

    def create(self, ttl: float = USUAL_LIFE, uses: int = 1, name: str = "", *, replaces: bool = False) -> JoinToken:
        """Make a token for `uses` nodes, good for `ttl` seconds. ValueError unless both are positive. With `replaces` a
        machine that is a member already takes its own place without the key of that member."""
        if ttl <= 0 or uses < 1:
            raise ValueError(f"a token needs a positive time ({ttl} s) and at least one use ({uses})")
        self._drop_old()
        token, now = new_token(self._ca), self._clock()
        self._store.put_token(TokenRow(token.id, token_key(token.secret), now, now + ttl, uses, name))
        if replaces:
            self._replacing.add(token.id)
        log.info("token created", token=token.id, name=name, uses=uses, ttl=ttl)
        return token

    def list(self) -> list[Token]:
        """Give all tokens, newest first, without their keys."""
        rows = sorted(self._store.tokens.values(), key=lambda row: row.created, reverse=True)
        return [Token(row.id, row.name, row.created, row.expires, row.uses_left, row.revoked) for row in rows]

    def revoke(self, token: str) -> bool:
        """Make a token worthless; False when there is none of this id."""
        row = self._store.tokens.get(token)
        if row is not None:
            self._store.put_token(replace(row, revoked=True))
            log.info("token revoked", token=token)
        return row is not None

    def check(self, token: str, mac: bytes, csr: bytes) -> Redemption:
        """Say whether `redeem` would accept, and use nothing up."""
        row = self._store.tokens.get(token)
        proven = hmac.compare_digest(request_mac(row.key if row else _NOBODY, csr), mac)
        if row is None:
            return self._no(token, Redemption.UNKNOWN, "unknown")
        if not proven:
            return self._no(token, Redemption.WRONG, "wrong")
        if row.revoked:
            return self._no(token, Redemption.UNKNOWN, "revoked")
        if row.uses_left < 1:
            return self._no(token, Redemption.USED, "used")
        if self._clock() >= row.expires:
            return self._no(token, Redemption.EXPIRED, "expired")
        return Redemption.ACCEPTED

    def may_replace(self, token: str) -> bool:
        """Return whether a token was made for a machine that may be a member already."""
        return token in self._replacing

    def redeem(self, token: str, mac: bytes, csr: bytes) -> Redemption:
        """Use a token once for this request (DER) if its MAC proves the secret. Flush the store before acting on it."""
        answer = self.check(token, mac, csr)
        if answer is Redemption.ACCEPTED:
            row = self._store.tokens[token]
            self._store.put_token(replace(row, uses_left=row.uses_left - 1))
            log.info("token redeemed", token=token, uses_left=row.uses_left - 1)
        return answer

    def _no(self, token: str, answer: Redemption, why: str) -> Redemption:
        log.warning("token refused", token=token[:16], why=why)
        return answer

    def _drop_old(self) -> None:
        old = [row.id for row in self._store.tokens.values() if self._clock() > row.expires + KEPT_AFTER]
        for token in old:
            self._store.drop_token(token)
            self._replacing.discard(token)

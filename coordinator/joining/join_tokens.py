"""Join tokens: a node proves that it has the secret of a token, without sending it.

A peer that has given this proof gets the reason `token_expired`, `token_used`, or `token_unknown` for a revoked token.
Any other peer gets `token_wrong`, or `token_unknown` for an unknown id. The log has the actual reason, and only the
token's id. Check and use are one call on the loop that owns the store, so that a token is not used more often than
permitted.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import structlog

from coordinator.state.database import Database
from coordinator.state.rows import TokenRow
from wire.join_token import JoinToken, compute_request_mac, derive_token_key, new_token

log = structlog.get_logger()

DEFAULT_TOKEN_SECONDS = 3600.0
"""Default lifetime of a token, in seconds."""
EXPIRED_KEPT_SECONDS = 7 * 24 * 3600.0
"""Minimum seconds for which an expired token is kept, so that its late use is denied with `token_expired`.

After that, the next creation of a token deletes it.
"""

_UNKNOWN_DIGEST = bytes(32)
"""Key for the MAC check of an unknown token, because both answers must take the same time."""


def build_join_command(url: str, token: str) -> str:
    """Return the command line with which a Mac joins the coordinator at `url`, with the join token `token`.

    `echo` is a shell builtin. The token therefore never appears in the list of processes, which all users can read.
    """
    return f"echo {token} | cluster join {url} --token-file -"


class Redemption(StrEnum):
    """Result of an attempt to use a join token. All but `ACCEPTED` are reasons of `Denied`."""

    ACCEPTED = "accepted"
    """The token is valid, and the peer has proved the secret."""
    UNKNOWN = "token_unknown"
    """No token has this id, or the token was revoked."""
    WRONG = "token_wrong"
    """The MAC does not prove the secret."""
    EXPIRED = "token_expired"
    """The lifetime of the token has ended."""
    USED = "token_used"
    """The token has no uses left."""


MESSAGES = {
    Redemption.UNKNOWN: "the token is unknown here or was revoked: create one with `cluster token create`",
    Redemption.WRONG: "the token's secret is wrong: copy the whole token again",
    Redemption.EXPIRED: "the token has expired: create a new one with `cluster token create`",
    Redemption.USED: "the token was used already: create a new one with `cluster token create`",
}
"""Texts of `Denied` for the results that refuse a token."""


@dataclass(frozen=True, slots=True)
class JoinTokenInfo:
    """Join token without its secret, for lists. `created` and `expires` are in Unix seconds."""

    id: str
    name: str
    created: float
    expires: float
    uses_left: int
    revoked: bool


class JoinTokens:
    """Join tokens of the cluster with the CA `ca` (DER). `clock` returns Unix seconds."""

    def __init__(self, store: Database, ca: bytes, clock: Callable[[], float]) -> None:
        self._store = store
        self._ca = ca
        self._clock = clock
        self._replacing: set[str] = set()
        """Tokens that this process created for its own machine, whose node may have lost its identity."""

    def create(
        self, ttl: float = DEFAULT_TOKEN_SECONDS, uses: int = 1, name: str = "", *, replaces: bool = False
    ) -> JoinToken:
        """Create a token for `uses` nodes, valid for `ttl` seconds.

        `name` is shown in the list of tokens. With `replaces`, the machine of an unlinked member may join again in the
        member's place without the member's key. This permission ends with the process. Tokens that expired more than
        `EXPIRED_KEPT_SECONDS` ago are deleted. Raise `ValueError` if `ttl` or `uses` is not positive, and `StoreError`
        after a failed write.
        """
        if ttl <= 0 or uses < 1:
            raise ValueError(f"a token needs a positive time ({ttl} s) and at least one use ({uses})")
        self._delete_expired()
        token, now = new_token(self._ca), self._clock()
        self._store.tokens.put(TokenRow(token.id, derive_token_key(token.secret), now, now + ttl, uses, name))
        if replaces:
            self._replacing.add(token.id)
        log.info("token created", token=token.id, name=name, uses=uses, ttl=ttl)
        return token

    def list(self) -> list[JoinTokenInfo]:
        """Return all stored join tokens without their secrets, newest first.

        Used, expired and revoked tokens are included until they are deleted.
        """
        rows = sorted(self._store.tokens.values(), key=lambda row: row.created, reverse=True)
        return [JoinTokenInfo(row.id, row.name, row.created, row.expires, row.uses_left, row.revoked) for row in rows]

    def revoke(self, token_id: str) -> bool:
        """Revoke the token with this id. Return False if there is none. Raise `StoreError` after a failed write."""
        row = self._store.tokens.get(token_id)
        if row is not None:
            self._store.tokens.put(replace(row, revoked=True))
            log.info("token revoked", token=token_id)
        return row is not None

    def check(self, token_id: str, mac: bytes, csr: bytes) -> Redemption:
        """Check a join token for the certificate request `csr` (DER), without using the token. Log a refusal.

        `mac` proves the secret. Return `ACCEPTED`, or the first reason for a refusal: unknown id, wrong `mac`, revoked,
        used, or expired.
        """
        row = self._store.tokens.get(token_id)
        proven = hmac.compare_digest(compute_request_mac(row.key if row else _UNKNOWN_DIGEST, csr), mac)
        if row is None:
            return self._log_refusal(token_id, Redemption.UNKNOWN, "unknown")
        if not proven:
            return self._log_refusal(token_id, Redemption.WRONG, "wrong")
        if row.revoked:
            return self._log_refusal(token_id, Redemption.UNKNOWN, "revoked")
        if row.uses_left < 1:
            return self._log_refusal(token_id, Redemption.USED, "used")
        if self._clock() >= row.expires:
            return self._log_refusal(token_id, Redemption.EXPIRED, "expired")
        return Redemption.ACCEPTED

    def may_replace(self, token_id: str) -> bool:
        """Return whether a token was created with `replaces` since the start of this process."""
        return token_id in self._replacing

    def redeem(self, token_id: str, mac: bytes, csr: bytes) -> Redemption:
        """Check a join token like `check`, and use it once if it is accepted. Return the result.

        The caller must flush the store before it acts on the result. Raise `StoreError`, without any change, while
        changes cannot be written.
        """
        answer = self.check(token_id, mac, csr)
        if answer is Redemption.ACCEPTED:
            self._store.raise_failure()
            row = self._store.tokens[token_id]
            self._store.tokens.put(replace(row, uses_left=row.uses_left - 1))
            log.info("token redeemed", token=token_id, uses_left=row.uses_left - 1)
        return answer

    def _log_refusal(self, token_id: str, answer: Redemption, why: str) -> Redemption:
        log.warning("token refused", token=token_id[:16], why=why)
        return answer

    def _delete_expired(self) -> None:
        old = [row.id for row in self._store.tokens.values() if self._clock() > row.expires + EXPIRED_KEPT_SECONDS]
        for token in old:
            self._store.tokens.delete(token)
            self._replacing.discard(token)

"""Join tokens, and the proofs that bind a certificate request to a token or to a member.

The secret of a join token is never sent. The node sends HMAC-SHA256(SHA-256(secret), CSR); the coordinator stores only
the SHA-256 of the secret.
"""

import base64
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

_TOKEN = re.compile(r"mpj1\.([a-z2-7]{52})\.([a-z2-7]{8})\.([a-z2-7]{26})")


@dataclass(frozen=True, slots=True)
class JoinToken:
    """Join token, with which a machine joins a cluster. As text: `mpj1.<pin, base32>.<id>.<secret, base32>`."""

    pin: bytes
    """SHA-256 of the certificate of the CA in DER, 32 bytes."""
    id: str
    """Id under which the coordinator stores the token."""
    secret: bytes
    """16 random bytes."""

    def __str__(self) -> str:
        return f"mpj1.{_encode_base32(self.pin)}.{self.id}.{_encode_base32(self.secret)}"


def new_token(ca: bytes) -> JoinToken:
    """Create a random join token, pinned to the certificate of a CA in DER."""
    return JoinToken(hashlib.sha256(ca).digest(), _encode_base32(secrets.token_bytes(5)), secrets.token_bytes(16))


def parse_token(text: str) -> JoinToken:
    """Parse a join token. Raise ValueError for other texts; its message does not contain the secret."""
    match = _TOKEN.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            "this is not a join token: one has the form mpj1.<pin>.<id>.<secret>; `cluster token create` creates one"
        )
    return JoinToken(_decode_base32(match[1]), match[2], _decode_base32(match[3]))


def derive_token_key(secret: bytes) -> bytes:
    """Return the MAC key that the coordinator stores in place of the secret: its SHA-256."""
    return hashlib.sha256(secret).digest()


def compute_request_mac(key: bytes, csr: bytes) -> bytes:
    """Return the HMAC-SHA256 of a certificate request (DER) under the MAC key of a token."""
    return hmac.new(key, csr, hashlib.sha256).digest()


def build_rejoin_text(csr: bytes) -> bytes:
    """Return the bytes that a member signs with its key to request a new certificate with `csr` (DER)."""
    return b"macpool rejoin" + hashlib.sha256(csr).digest()


def _encode_base32(raw: bytes) -> str:
    return base64.b32encode(raw).decode().rstrip("=").lower()


def _decode_base32(text: str) -> bytes:
    return base64.b32decode(text.upper() + "=" * (-len(text) % 8))

"""Who is who: protocol number, cluster URIs, join tokens, and the proofs that bind a certificate request to a token.

Rules that nobody may break
- Identity is the URI in the certificate's SAN, `cluster://<cluster>/node/<node>` or `cluster://<cluster>/coordinator`,
  never an address and never a host name.
- The secret of a join token never crosses the wire: the node sends HMAC-SHA256(SHA-256(secret), CSR), and the
  coordinator stores only the SHA-256.
- Without a token both sides show a short code over everything that a man in the middle would have to change. The
  node commits to its nonce and its request before it sees the coordinator's nonce, so nobody can search for a
  colliding code.
"""

import base64
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import NewType

PROTOCOL = 1
"""Version of the frames. History: 1 (2026-11-20) the first."""
OLDEST_PROTOCOL = 1
"""The coordinator accepts this and everything up to PROTOCOL: N and N-1 side by side."""

SERVICE_TYPE = "_macpool._tcp.local."

NodeId = NewType("NodeId", str)

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._-]{0,61}[A-Za-z0-9._-])?")
_MODEL = re.compile(r"\w[\w ._:/@+()-]{0,199}")
_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TOKEN = re.compile(r"mpj1\.([a-z2-7]{52})\.([a-z2-7]{8})\.([a-z2-7]{26})")
_URI = re.compile(r"cluster://([A-Za-z0-9-]{1,64})/(coordinator|node/([A-Za-z0-9-]{1,64}))")


def valid_name(name: str) -> bool:
    """Say whether a friendly name is safe to print, to label with and to announce (1-63 plain characters)."""
    return _NAME.fullmatch(name) is not None


def valid_model(name: str) -> bool:
    """Say whether a model's name is safe to print and to label with: 1-200 letters, digits, spaces and ._:/@+()-."""
    return _MODEL.fullmatch(name) is not None


def valid_id(text: str) -> bool:
    """Say whether a text can be a cluster, node or machine id."""
    return _ID.fullmatch(text) is not None


def valid_request_id(text: str) -> bool:
    """Say whether a client's `x-request-id` may be taken over."""
    return _REQUEST_ID.fullmatch(text) is not None


def node_uri(cluster: str, node: NodeId) -> str:
    """Give the SAN of a node's certificate."""
    return f"cluster://{cluster}/node/{node}"


def coordinator_uri(cluster: str) -> str:
    """Give the SAN of the coordinator's certificate."""
    return f"cluster://{cluster}/coordinator"


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a link, read from its verified certificate; `node` is None for the coordinator."""

    cluster: str
    node: NodeId | None


def parse_uri(uri: str) -> Peer | None:
    """Read a SAN; None when it is no cluster URI."""
    match = _URI.fullmatch(uri)
    return Peer(match[1], NodeId(match[3]) if match[3] else None) if match else None


@dataclass(frozen=True, slots=True)
class JoinToken:
    """`mpj1.<sha256 of the CA, base32>.<id>.<secret>`: a CA pin (32 bytes), an id to look up, a 16-byte secret."""

    pin: bytes
    id: str
    secret: bytes

    def __str__(self) -> str:
        return f"mpj1.{_base32(self.pin)}.{self.id}.{_base32(self.secret)}"


def new_token(ca: bytes) -> JoinToken:
    """Make a fresh token for the CA given as DER."""
    return JoinToken(hashlib.sha256(ca).digest(), _base32(secrets.token_bytes(5)), secrets.token_bytes(16))


def parse_token(text: str) -> JoinToken:
    """Read a token; ValueError says what is wrong without repeating the secret."""
    match = _TOKEN.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            "this is not a join token: it reads mpj1.<pin>.<id>.<secret> and comes from `cluster token create`"
        )
    return JoinToken(_unbase32(match[1]), match[2], _unbase32(match[3]))


def token_key(secret: bytes) -> bytes:
    """Derive the MAC key that the coordinator stores instead of the secret."""
    return hashlib.sha256(secret).digest()


def request_mac(key: bytes, csr: bytes) -> bytes:
    """Bind a certificate request (DER) to a token's key."""
    return hmac.new(key, csr, hashlib.sha256).digest()


def rejoin_text(csr: bytes) -> bytes:
    """Return what the key of a member signs to ask for a new certificate (DER request) for the same member."""
    return b"macpool rejoin" + hashlib.sha256(csr).digest()


def commitment(nonce: bytes, csr: bytes) -> bytes:
    """Commit to a nonce and a certificate request (DER) before the other side reveals its own nonce.

    The request must be in it: whoever could still choose it after both nonces are known would search for one that
    gives a wanted code, a million tries at most.
    """
    return hashlib.sha256(b"macpool commitment" + hashlib.sha256(csr).digest() + nonce).digest()


def short_code(ca: bytes, csr: bytes, node_nonce: bytes, coordinator_nonce: bytes) -> str:
    """Give the six digits that both screens must show when a node joins without a token."""
    digest = hashlib.sha256(b"macpool code")
    for part in (ca, csr, node_nonce, coordinator_nonce):
        digest.update(len(part).to_bytes(4, "big") + part)
    return f"{int.from_bytes(digest.digest()[:8], 'big') % 1_000_000:06d}"


def _base32(raw: bytes) -> str:
    return base64.b32encode(raw).decode().rstrip("=").lower()


def _unbase32(text: str) -> bytes:
    return base64.b32decode(text.upper() + "=" * (-len(text) % 8))

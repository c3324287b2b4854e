"""Protocol version, cluster URIs, join tokens, and proofs that bind a certificate request to a join token.

Invariants
- The identity of a peer is the URI in the SAN of its certificate: `cluster://<cluster>/node/<node>` or
  `cluster://<cluster>/coordinator`. It is never an address or a host name.
- The secret of a join token is never sent. The node sends HMAC-SHA256(SHA-256(secret), CSR); the coordinator stores
  only the SHA-256.
- Without a token both sides show a short code. It covers every value that an attacker in the middle would have to
  change. The node commits to its nonce and its request before it receives the nonce of the coordinator. An attacker
  therefore cannot search for a colliding code.
"""

import base64
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import NewType

PROTOCOL = 1
"""Version of the protocol. History: 1 (2026-11-20), the first."""
OLDEST_PROTOCOL = 1
"""The coordinator accepts versions from this to PROTOCOL so that nodes of versions N and N-1 can run together."""

SERVICE_TYPE = "_macpool._tcp.local."

NodeId = NewType("NodeId", str)

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._-]{0,61}[A-Za-z0-9._-])?")
_MODEL = re.compile(r"\w[\w ._:/@+()-]{0,199}")
_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TOKEN = re.compile(r"mpj1\.([a-z2-7]{52})\.([a-z2-7]{8})\.([a-z2-7]{26})")
_URI = re.compile(r"cluster://([A-Za-z0-9-]{1,64})/(coordinator|node/([A-Za-z0-9-]{1,64}))")


def is_valid_name(name: str) -> bool:
    """Return whether a display name is safe in terminals, labels and DNS.

    It has 1 to 63 ASCII letters, digits, spaces and ._-. It begins with a letter or digit, and does not end with a
    space.
    """
    return _NAME.fullmatch(name) is not None


def is_valid_model(name: str) -> bool:
    """Return whether a model name has 1 to 200 letters, digits, spaces and ._:/@+()-.

    The first character is a letter, a digit or an underscore.
    """
    return _MODEL.fullmatch(name) is not None


def is_valid_id(text: str) -> bool:
    """Return whether a text is a valid cluster, node or machine id: 1 to 64 ASCII letters, digits and hyphens."""
    return _ID.fullmatch(text) is not None


def is_valid_request_id(text: str) -> bool:
    """Return whether a client's `x-request-id` can be used as request id: 1 to 64 ASCII letters, digits and ._-."""
    return _REQUEST_ID.fullmatch(text) is not None


def build_node_uri(cluster: str, node: NodeId) -> str:
    """Return the URI of a node for the SAN of its certificate."""
    return f"cluster://{cluster}/node/{node}"


def build_coordinator_uri(cluster: str) -> str:
    """Return the URI of the coordinator for the SAN of its certificate."""
    return f"cluster://{cluster}/coordinator"


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Identity of a peer, from its verified certificate; `node` is None for the coordinator."""

    cluster: str
    """Id of the cluster."""
    node: NodeId | None


def parse_uri(uri: str) -> PeerIdentity | None:
    """Parse a URI of a SAN. Return None for a URI that is not of a node or a coordinator."""
    match = _URI.fullmatch(uri)
    return PeerIdentity(match[1], NodeId(match[3]) if match[3] else None) if match else None


@dataclass(frozen=True, slots=True)
class JoinToken:
    """Join token, with which a machine joins a cluster. As text: `mpj1.<pin, base32>.<id>.<secret, base32>`."""

    pin: bytes
    """SHA-256 of the CA, 32 bytes."""
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


def compute_commitment(nonce: bytes, csr: bytes) -> bytes:
    """Return the commitment to a nonce and a certificate request (DER), sent before the peer reveals its nonce.

    The commitment covers the request. If an attacker could change the request later, a million tries would find one
    with a given code.
    """
    return hashlib.sha256(b"macpool commitment" + hashlib.sha256(csr).digest() + nonce).digest()


def compute_short_code(ca: bytes, csr: bytes, node_nonce: bytes, coordinator_nonce: bytes) -> str:
    """Return the six digits that both machines show while a node joins without a token.

    They are derived from the CA and the certificate request (both DER) and the nonces of both sides.
    """
    digest = hashlib.sha256(b"macpool code")
    for part in (ca, csr, node_nonce, coordinator_nonce):
        digest.update(len(part).to_bytes(4, "big") + part)
    return f"{int.from_bytes(digest.digest()[:8], 'big') % 1_000_000:06d}"


def _encode_base32(raw: bytes) -> str:
    return base64.b32encode(raw).decode().rstrip("=").lower()


def _decode_base32(text: str) -> bytes:
    return base64.b32decode(text.upper() + "=" * (-len(text) % 8))

"""Short code of six digits that both machines show while a node joins without a token, and the node's commitment.

The code covers every value that an attacker in the middle would have to change. The node commits to its nonce and its
request before it receives the nonce of the coordinator. An attacker therefore cannot search for a colliding code.
"""

import hashlib


def compute_commitment(nonce: bytes, csr: bytes) -> bytes:
    """Return the commitment to a nonce and a certificate request (DER), sent before the peer reveals its nonce.

    The commitment covers the request. If an attacker could change the request later, a million tries would find one
    with a given code.
    """
    return hashlib.sha256(b"macpool commitment" + hashlib.sha256(csr).digest() + nonce).digest()


def compute_short_code(ca: bytes, csr: bytes, node_nonce: bytes, coordinator_nonce: bytes) -> str:
    """Return the six digits that both machines show while a node joins without a token.

    The digits are derived from the certificate of the CA and the certificate request (both DER), and from the nonces of
    both sides.
    """
    digest = hashlib.sha256(b"macpool code")
    for part in (ca, csr, node_nonce, coordinator_nonce):
        digest.update(len(part).to_bytes(4, "big") + part)
    return f"{int.from_bytes(digest.digest()[:8], 'big') % 1_000_000:06d}"

"""Writer of the encrypted format of earlier backups, which only readers support now."""

import os

from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

MAGIC = b"macpool sealed 1\n"
PIECE_BYTES = 64 * 1024
COST = 17
"""Binary logarithm of the cost of scrypt, which the format does not store."""


def in_former_format(data: bytes, passphrase: bytes, cost: int = COST) -> bytes:
    """Return `data` in the former encrypted format. `cost` differs from `COST` only where a test reads with less."""
    salt = os.urandom(16)
    cipher = ChaCha20Poly1305(Scrypt(salt, 32, 2**cost, 8, 1).derive(passphrase))
    pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)] or [b""]
    nonces = [number.to_bytes(11, "big") + bytes((number == len(pieces) - 1,)) for number in range(len(pieces))]
    made = [cipher.encrypt(nonce, piece, MAGIC + salt) for nonce, piece in zip(nonces, pieces, strict=True)]
    return MAGIC + salt + b"".join(made)

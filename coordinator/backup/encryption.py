r"""Encryption of a file with a passphrase: scrypt derives the key, ChaCha20-Poly1305 encrypts pieces.

    b"macpool sealed 1\n" | salt, 16 bytes | pieces of 64 KiB, each with a tag of 16 bytes

The nonce of a piece is its number and, in its last byte, a flag for the last piece. The head is authenticated with
every piece. A changed, missing, moved, added or truncated piece is detected. The key uses a fresh salt, hence nonces
never repeat under it. scrypt costs 128 MiB and about a third of a second for each guess.
"""

import os
from typing import BinaryIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

MAGIC = b"macpool sealed 1\n"
FAMILY = b"macpool sealed "
CHUNK_BYTES = 64 * 1024
TAG_BYTES = 16
SALT_BYTES = 16
_COST, _BLOCK, _LANES = 2**17, 8, 1


class EncryptionError(Exception):
    """The file cannot be decrypted with this passphrase, or is damaged or truncated. The text has the reason."""


def _cipher(passphrase: bytes, salt: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(Scrypt(salt, 32, _COST, _BLOCK, _LANES).derive(passphrase))


def _nonce(number: int, *, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes((last,))


class EncryptingWriter:
    """Writer that encrypts data into `file`. Write the head at once. The caller ends with `finish`."""

    def __init__(self, file: BinaryIO, passphrase: bytes) -> None:
        salt = os.urandom(SALT_BYTES)
        self._file, self._head = file, MAGIC + salt
        self._cipher = _cipher(passphrase, salt)
        self._waiting = bytearray()
        self._number = 0
        file.write(self._head)

    def write(self, data: bytes) -> int:
        """Encrypt and write all complete pieces; keep the rest for the next call. Return the length of `data`."""
        self._waiting += data
        while len(self._waiting) > CHUNK_BYTES:
            self._seal(bytes(self._waiting[:CHUNK_BYTES]), last=False)
            del self._waiting[:CHUNK_BYTES]
        return len(data)

    def finish(self) -> None:
        """Encrypt and write the last piece, without which the file cannot be decrypted."""
        self._seal(bytes(self._waiting), last=True)

    def _seal(self, piece: bytes, *, last: bool) -> None:
        self._file.write(self._cipher.encrypt(_nonce(self._number, last=last), piece, self._head))
        self._number += 1


class DecryptingReader:
    """Reader that decrypts a file of `EncryptingWriter`. `file` is positioned after `MAGIC`.

    Raise `EncryptionError` if the file ends within the salt.
    """

    def __init__(self, file: BinaryIO, passphrase: bytes) -> None:
        salt = file.read(SALT_BYTES)
        if len(salt) < SALT_BYTES:
            raise EncryptionError("it is truncated within its first bytes: use another copy of the file")
        self._file, self._head = file, MAGIC + salt
        self._cipher = _cipher(passphrase, salt)
        self._next = file.read(CHUNK_BYTES + TAG_BYTES)
        self._plain = b""
        self._number = 0
        self._ended = False

    def read(self, size: int) -> bytes:
        """Return up to `size` decrypted bytes; fewer only at the end.

        Raise `EncryptionError` if the passphrase is wrong, or the file is modified or truncated.
        """
        pieces = [self._plain]
        have = len(self._plain)
        while have < size and not self._ended:
            piece = self._open()
            pieces.append(piece)
            have += len(piece)
        plaintext = b"".join(pieces)
        self._plain = plaintext[size:]
        return plaintext[:size]

    def _open(self) -> bytes:
        sealed, self._next = self._next, self._file.read(CHUNK_BYTES + TAG_BYTES)
        last = not self._next
        try:
            piece = self._cipher.decrypt(_nonce(self._number, last=last), sealed, self._head)
        except (InvalidTag, ValueError):
            why = (
                "the passphrase is wrong, or it is damaged"
                if not self._number
                else "it is damaged or truncated: use another copy of the file"
            )
            raise EncryptionError(why) from None
        self._number += 1
        self._ended = last
        return piece

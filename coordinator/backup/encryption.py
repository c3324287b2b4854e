r"""Encryption of a file with a passphrase, in the age format (https://age-encryption.org/v1), which `age -d` decrypts.

    age-encryption.org/v1
    -> scrypt SALT COST           scrypt of the passphrase encrypts the file key, 16 bytes
    FILE KEY, encrypted
    --- MAC                       HMAC-SHA256 of all lines above, with a key from the file key
    nonce, 16 bytes | pieces of 64 KiB, each with a tag of 16 bytes

HKDF-SHA256 derives the key of the pieces from file key and nonce; ChaCha20-Poly1305 encrypts them. The nonce of a piece
is its number and, in its last byte, a flag for the last piece. A changed, missing, moved, added or truncated piece is
detected. scrypt costs 128 MiB and about a third of a second for each guess.

The reader also accepts the earlier format of backups: `b"macpool sealed 1\n"`, a salt, and the same pieces, encrypted
with the scrypt key itself and authenticated together with that first line and the salt.

Why not a library: docs/decisions/0038-backups-in-the-age-format.md.
"""

import os
import re
from base64 import b64decode, b64encode
from typing import BinaryIO

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

MAGIC = b"age-encryption.org/v1\n"
FORMER_MAGIC = b"macpool sealed 1\n"
FORMER_FAMILY = b"macpool sealed "
"""First bytes of a file in any version of the earlier format."""
FAMILIES = (b"age-encryption.org/", FORMER_FAMILY)
"""First bytes of encrypted files of any version, in both formats."""
CHUNK_BYTES = 64 * 1024
TAG_BYTES = 16
SALT_BYTES = 16
NONCE_BYTES = 16
FILE_KEY_BYTES = 16
COST = 17
"""Binary logarithm of scrypt's work factor N. With this value scrypt needs 128 MiB of memory."""
MAX_COST = 20
"""Maximum `COST` that is accepted in a file: scrypt then needs 1 GiB of memory."""
MAX_HEADER_BYTES = 4096
_HEADER = re.compile(
    rb"age-encryption\.org/v1\n-> scrypt ([A-Za-z0-9+/]{22}) ([1-9][0-9]?)\n([A-Za-z0-9+/]{43})\n"
    rb"--- ([A-Za-z0-9+/]{43})\n"
)
_SALT_LABEL = b"age-encryption.org/v1/scrypt"
_WRONG = "the passphrase is wrong, or it is damaged"
_DAMAGED = "it is damaged or truncated: use another copy of the file"
_HEADER_DAMAGED = "it is damaged or truncated within its header: use another copy of the file"


class EncryptionError(Exception):
    """Raised if a file cannot be decrypted. The text has the reason.

    Reasons: the passphrase is wrong, scrypt would need more than 1 GiB of memory, or the file is damaged or truncated.
    """


def is_encrypted(beginning: bytes) -> bool:
    """Return whether a file that starts with the bytes `beginning` is in a format that `DecryptingReader` reads."""
    return beginning.startswith((MAGIC, FORMER_MAGIC))


class EncryptingWriter:
    """Writer that encrypts data into `file`, in the age format.

    The constructor writes the header. The caller must call `finish` at the end. All calls raise `OSError` if `file`
    cannot be written.
    """

    def __init__(self, file: BinaryIO, passphrase: bytes) -> None:
        self._file = file
        salt, file_key, nonce = os.urandom(SALT_BYTES), os.urandom(FILE_KEY_BYTES), os.urandom(NONCE_BYTES)
        sealed = _derive_passphrase_cipher(passphrase, _SALT_LABEL + salt, COST).encrypt(bytes(12), file_key, None)
        head = b"%b-> scrypt %b %d\n%b\n---" % (MAGIC, _encode(salt), COST, _encode(sealed))
        self._cipher = _derive_piece_cipher(file_key, nonce)
        self._waiting = bytearray()
        self._number = 0
        file.write(b"%b %b\n%b" % (head, _encode(_compute_mac(file_key, head).finalize()), nonce))

    def write(self, data: bytes) -> int:
        """Encrypt `data` and write complete pieces. Keep the rest, at most one piece, for the next call or `finish`.

        Return the length of `data`.
        """
        self._waiting += data
        while len(self._waiting) > CHUNK_BYTES:
            self._encrypt(bytes(self._waiting[:CHUNK_BYTES]), last=False)
            del self._waiting[:CHUNK_BYTES]
        return len(data)

    def finish(self) -> None:
        """Encrypt and write the last piece, without which the file cannot be decrypted."""
        self._encrypt(bytes(self._waiting), last=True)

    def _encrypt(self, piece: bytes, *, last: bool) -> None:
        self._file.write(self._cipher.encrypt(_build_piece_nonce(self._number, last=last), piece, None))
        self._number += 1


class DecryptingReader:
    """Reader that decrypts an encrypted file. `file` must be positioned at its start.

    The constructor raises `EncryptionError` if the header is damaged or truncated, needs more memory than allowed, or
    does not fit the passphrase. In the earlier format, the first `read` detects a wrong passphrase.
    """

    def __init__(self, file: BinaryIO, passphrase: bytes) -> None:
        self._file = file
        self._associated: bytes | None = None
        first = file.readline(MAX_HEADER_BYTES)
        if first == FORMER_MAGIC:
            salt = _read_exactly(file, SALT_BYTES)
            self._associated = FORMER_MAGIC + salt
            self._cipher = _derive_passphrase_cipher(passphrase, salt, COST)
        else:
            file_key = _decrypt_file_key(
                first + b"".join(file.readline(MAX_HEADER_BYTES) for _ in range(3)), passphrase
            )
            self._cipher = _derive_piece_cipher(file_key, _read_exactly(file, NONCE_BYTES))
        self._next = file.read(CHUNK_BYTES + TAG_BYTES)
        self._plain = b""
        self._number = 0
        self._ended = False

    def read(self, size: int, /) -> bytes:
        """Return up to `size` decrypted bytes; fewer only at the end.

        Raise `EncryptionError` if the passphrase is wrong, or the file is modified or truncated.
        """
        pieces = [self._plain]
        have = len(self._plain)
        while have < size and not self._ended:
            piece = self._decrypt()
            pieces.append(piece)
            have += len(piece)
        plaintext = b"".join(pieces)
        self._plain = plaintext[size:]
        return plaintext[:size]

    def _decrypt(self) -> bytes:
        encrypted, self._next = self._next, self._file.read(CHUNK_BYTES + TAG_BYTES)
        last = not self._next
        try:
            piece = self._cipher.decrypt(_build_piece_nonce(self._number, last=last), encrypted, self._associated)
        except (InvalidTag, ValueError):
            former_first = self._associated is not None and not self._number
            raise EncryptionError(_WRONG if former_first else _DAMAGED) from None
        self._number += 1
        self._ended = last
        return piece


def _decrypt_file_key(header: bytes, passphrase: bytes) -> bytes:
    """Return the file key of a header, after the header is verified with it.

    Raise `EncryptionError` if the header is damaged, needs more memory than allowed, or does not fit the passphrase.
    """
    match = _HEADER.fullmatch(header)
    if match is None:
        raise EncryptionError(
            f"{_HEADER_DAMAGED}, or a key instead of a passphrase encrypts it: decrypt it with `age -d` first"
        )
    salt, cost, sealed, mac = match.groups()
    if int(cost) > MAX_COST:
        raise EncryptionError(
            f"its scrypt cost of {int(cost)} needs more than 1 GiB of memory (at most {MAX_COST}): "
            "decrypt it with `age -d`"
        )
    try:
        cipher = _derive_passphrase_cipher(passphrase, _SALT_LABEL + _decode(salt), int(cost))
        file_key = cipher.decrypt(bytes(12), _decode(sealed), None)
        _compute_mac(file_key, header[: header.rindex(b" ")]).verify(_decode(mac))
    except InvalidTag:
        raise EncryptionError(_WRONG) from None
    except (InvalidSignature, ValueError):
        raise EncryptionError(_HEADER_DAMAGED) from None
    return file_key


def _derive_passphrase_cipher(passphrase: bytes, salt: bytes, cost: int) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(Scrypt(salt, 32, 2**cost, 8, 1).derive(passphrase))


def _derive(file_key: bytes, salt: bytes | None, info: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt, info).derive(file_key)


def _derive_piece_cipher(file_key: bytes, nonce: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(_derive(file_key, nonce, b"payload"))


def _build_piece_nonce(number: int, *, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes((last,))


def _compute_mac(file_key: bytes, head: bytes) -> HMAC:
    mac = HMAC(_derive(file_key, None, b"header"), SHA256())
    mac.update(head)
    return mac


def _encode(data: bytes) -> bytes:
    return b64encode(data).rstrip(b"=")


def _decode(text: bytes) -> bytes:
    return b64decode(text + b"=" * (-len(text) % 4))


def _read_exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EncryptionError(_HEADER_DAMAGED)
    return data

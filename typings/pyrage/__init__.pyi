"""Used parts of pyrage."""

from collections.abc import Sequence

from pyrage import passphrase as passphrase
from pyrage import x25519 as x25519

def encrypt(plaintext: bytes, recipients: Sequence[x25519.Recipient]) -> bytes: ...

"""Encryption of backups: the age format, its errors, and the format of earlier backups."""

import io
from base64 import b64encode

import pyrage
import pytest

from coordinator.backup import encryption
from coordinator.backup.encryption import (
    CHUNK_BYTES,
    FORMER_MAGIC,
    MAGIC,
    MAX_COST,
    NONCE_BYTES,
    TAG_BYTES,
    DecryptingReader,
    EncryptingWriter,
    EncryptionError,
    is_encrypted,
)
from tests.support.former_backup import in_former_format

QUICK_COST = 10
DATA = bytes(range(256)) * (CHUNK_BYTES * 3 // 256) + b"end"
PIECE_BYTES = CHUNK_BYTES + TAG_BYTES


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Derive keys with 1 MiB of memory, because the format does not depend on the cost."""
    monkeypatch.setattr(encryption, "COST", QUICK_COST)


def encrypted(data: bytes, passphrase: bytes = b"p") -> bytes:
    file = io.BytesIO()
    writer = EncryptingWriter(file, passphrase)
    assert writer.write(data) == len(data)
    writer.finish()
    return file.getvalue()


def decrypted(content: bytes, passphrase: bytes = b"p") -> bytes:
    reader, found = DecryptingReader(io.BytesIO(content), passphrase), b""
    while piece := reader.read(40_000):
        found += piece
    return found


def split(content: bytes) -> tuple[bytes, list[bytes]]:
    """Return header with nonce, and the pieces."""
    begin = content.index(b"\n--- ") + len("\n--- ") + 43 + 1 + NONCE_BYTES
    return content[:begin], [content[at : at + PIECE_BYTES] for at in range(begin, len(content), PIECE_BYTES)]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("length", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_decrypted_data_equals_the_encrypted_data(length: int) -> None:
    assert decrypted(encrypted(DATA[:length])) == DATA[:length]


@pytest.mark.usefixtures("quick")
def test_another_implementation_of_age_decrypts_an_empty_file() -> None:
    assert pyrage.passphrase.decrypt(encrypted(b"", "pass wörd".encode()), "pass wörd") == b""


def test_another_implementation_of_age_decrypts_the_file() -> None:
    content = encrypted(DATA[: CHUNK_BYTES + 1], "pass wörd".encode())
    assert pyrage.passphrase.decrypt(content, "pass wörd") == DATA[: CHUNK_BYTES + 1]
    assert is_encrypted(content)


@pytest.mark.usefixtures("quick")
def test_pieces_that_are_left_out_moved_or_repeated_are_detected() -> None:
    header, pieces = split(encrypted(DATA))
    assert [len(piece) for piece in pieces] == [PIECE_BYTES] * 3 + [3 + TAG_BYTES]
    for wrong in (pieces[:3], pieces[1:], [pieces[1], pieces[0], *pieces[2:]], [*pieces, pieces[3]], pieces[:1] * 4):
        with pytest.raises(EncryptionError, match=r"^it is damaged or truncated: use another copy of the file$"):
            decrypted(header + b"".join(wrong))


@pytest.mark.usefixtures("quick")
def test_reading_stays_at_most_a_piece_ahead_and_stops_at_the_damaged_piece() -> None:
    content = encrypted(DATA)
    header, _ = split(content)
    file = io.BytesIO(content)
    reader = DecryptingReader(file, b"p")
    assert (reader.read(10), file.tell()) == (DATA[:10], len(header) + 2 * PIECE_BYTES)
    assert (reader.read(CHUNK_BYTES - 10), file.tell()) == (DATA[10:CHUNK_BYTES], len(header) + 2 * PIECE_BYTES)
    damaged = bytearray(content)
    damaged[len(header) + CHUNK_BYTES + 20] ^= 1
    reader = DecryptingReader(io.BytesIO(bytes(damaged)), b"p")
    assert reader.read(CHUNK_BYTES) == DATA[:CHUNK_BYTES]
    with pytest.raises(EncryptionError, match=r"^it is damaged or truncated: use another copy of the file$"):
        reader.read(1)


@pytest.mark.usefixtures("quick")
def test_a_wrong_passphrase_is_named() -> None:
    content = encrypted(b"data")
    with pytest.raises(EncryptionError, match=r"^the passphrase is wrong, or it is damaged$"):
        decrypted(content, b"q")
    with pytest.raises(EncryptionError, match=r"^the passphrase is wrong, or it is damaged$"):
        decrypted(in_former_format(b"data", b"p", QUICK_COST), b"q")


@pytest.mark.usefixtures("quick")
def test_each_changed_byte_of_the_header_is_detected() -> None:
    content = encrypted(b"data")
    header, _ = split(content)
    salt, key, mac, nonce = (
        content.index(b"scrypt ") + 8,
        content.index(b"\n", len(MAGIC)) + 9,
        content.index(b"--- ") + 9,
        len(header) - 3,
    )
    for at, words in (
        (salt, "passphrase is wrong"),
        (key, "passphrase is wrong"),
        (mac, "its header"),
        (nonce, "damaged"),
    ):
        changed = bytearray(content)
        changed[at] = ord("A") if changed[at] != ord("A") else ord("B")
        with pytest.raises(EncryptionError, match=words):
            decrypted(bytes(changed))


@pytest.mark.usefixtures("quick")
def test_a_file_that_ends_within_its_header_is_named() -> None:
    header, _ = split(encrypted(b"data"))
    for cut in (len(MAGIC), len(header) - NONCE_BYTES - 5, len(header) - 1):
        with pytest.raises(EncryptionError, match="is damaged or truncated within its header"):
            DecryptingReader(io.BytesIO(header[:cut]), b"p")
    with pytest.raises(EncryptionError, match="is damaged or truncated within its header"):
        DecryptingReader(io.BytesIO(in_former_format(b"", b"p", QUICK_COST)[: len(FORMER_MAGIC) + 15]), b"p")


@pytest.mark.usefixtures("quick")
def test_a_file_for_a_key_instead_of_a_passphrase_names_the_next_step() -> None:
    content = pyrage.encrypt(b"data", [pyrage.x25519.Identity.generate().to_public()])
    with pytest.raises(EncryptionError, match=r"a key instead of a passphrase .* `age -d`"):
        DecryptingReader(io.BytesIO(content), b"p")


@pytest.mark.usefixtures("quick")
def test_a_cost_that_needs_too_much_memory_is_refused() -> None:
    content = encrypted(b"data")
    raised = content.replace(b" %d\n" % QUICK_COST, b" %d\n" % (MAX_COST + 1), 1)
    with pytest.raises(EncryptionError, match=r"its scrypt cost of 21 needs more than 1 GiB of memory \(at most 20\)"):
        DecryptingReader(io.BytesIO(raised), b"p")


@pytest.mark.usefixtures("quick")
def test_a_header_whose_key_cannot_be_authenticated_is_refused() -> None:
    content = encrypted(b"data")
    line = content.split(b"\n")[3]
    forged = content.replace(line, b"--- " + b64encode(bytes(32)).rstrip(b"="), 1)
    with pytest.raises(EncryptionError, match="is damaged or truncated within its header"):
        DecryptingReader(io.BytesIO(forged), b"p")


def test_the_former_format_is_read() -> None:
    content = in_former_format(DATA, b"p")
    assert is_encrypted(content)
    assert decrypted(content) == DATA
    assert not is_encrypted(b"macpool sealed 2\n")


@pytest.mark.usefixtures("quick")
def test_a_truncated_file_in_the_former_format_is_detected() -> None:
    content = in_former_format(DATA, b"p", QUICK_COST)
    assert decrypted(content) == DATA
    with pytest.raises(EncryptionError, match=r"^it is damaged or truncated: use another copy of the file$"):
        decrypted(content[:-1])

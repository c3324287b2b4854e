"""Sealed bytes: only the passphrase and the complete file open them, and they are read as they were written."""

import io

import pytest

from coordinator.backup.encryption import CHUNK_BYTES, DecryptingReader, EncryptingWriter, EncryptionError


@pytest.mark.parametrize("length", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_sealed_bytes_are_read_as_they_were_written(length: int) -> None:
    data = bytes(range(251)) * (length // 251 + 1)
    opener = DecryptingReader(io.BytesIO(sealed_bytes(data[:length])[17:]), b"p")
    found = b""
    while piece := opener.read(40_000):
        found += piece
    assert found == data[:length]


def sealed_bytes(data: bytes) -> bytes:
    file = io.BytesIO()
    sealer = EncryptingWriter(file, b"p")
    sealer.write(data)
    sealer.finish()
    return file.getvalue()


def test_pieces_cannot_be_left_out_moved_or_repeated() -> None:
    data = bytes(range(256)) * (CHUNK_BYTES * 3 // 256) + b"end"
    made = sealed_bytes(data)
    head, body = made[:33], made[33:]
    pieces = [body[at : at + CHUNK_BYTES + 16] for at in range(0, len(body), CHUNK_BYTES + 16)]
    assert len(pieces) == 4
    for wrong in (pieces[:3], pieces[1:], [pieces[1], pieces[0], *pieces[2:]], [*pieces, pieces[3]], pieces[:1] * 4):
        opener = DecryptingReader(io.BytesIO((head + b"".join(wrong))[17:]), b"p")
        with pytest.raises(EncryptionError):
            opener.read(len(data) * 2)


def test_no_more_is_read_than_is_wanted_and_what_is_wrong_says_where() -> None:
    data = bytes(range(256)) * (CHUNK_BYTES * 3 // 256)
    made = sealed_bytes(data)
    assert len(made) == 33 + 3 * (CHUNK_BYTES + 16)
    file = io.BytesIO(made[17:])
    opener, ahead = DecryptingReader(file, b"p"), 16 + 2 * (CHUNK_BYTES + 16)
    assert (opener.read(10), file.tell()) == (data[:10], ahead)
    assert (opener.read(CHUNK_BYTES - 10), file.tell()) == (data[10:CHUNK_BYTES], ahead)
    spoiled = bytearray(made)
    spoiled[33 + CHUNK_BYTES + 20] ^= 1
    damaged = DecryptingReader(io.BytesIO(bytes(spoiled)[17:]), b"p")
    assert damaged.read(CHUNK_BYTES) == data[:CHUNK_BYTES]
    with pytest.raises(EncryptionError, match=r"^it is damaged or truncated: use another copy of the file$"):
        damaged.read(1)
    with pytest.raises(EncryptionError, match=r"^the passphrase is wrong, or it is damaged$"):
        DecryptingReader(io.BytesIO(made[17:]), b"q").read(1)
    with pytest.raises(EncryptionError, match="is truncated within its first bytes"):
        DecryptingReader(io.BytesIO(made[17:32]), b"p")
    assert EncryptingWriter(io.BytesIO(), b"p").write(b"abc") == 3

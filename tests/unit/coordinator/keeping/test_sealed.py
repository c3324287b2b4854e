"""Sealed bytes: read as they were written, and by nothing but the passphrase and the whole of them."""

import io

import pytest

from coordinator.keeping.sealed import PIECE, Opener, Sealer, SealError


@pytest.mark.parametrize("length", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_sealed_bytes_are_read_as_they_were_written(length: int) -> None:
    data = bytes(range(251)) * (length // 251 + 1)
    opener = Opener(io.BytesIO(sealed_bytes(data[:length])[17:]), b"p")
    found = b""
    while piece := opener.read(40_000):
        found += piece
    assert found == data[:length]


def sealed_bytes(data: bytes) -> bytes:
    file = io.BytesIO()
    sealer = Sealer(file, b"p")
    sealer.write(data)
    sealer.finish()
    return file.getvalue()


def test_pieces_cannot_be_left_out_moved_or_repeated() -> None:
    data = bytes(range(256)) * (PIECE * 3 // 256) + b"end"
    made = sealed_bytes(data)
    head, body = made[:33], made[33:]
    pieces = [body[at : at + PIECE + 16] for at in range(0, len(body), PIECE + 16)]
    assert len(pieces) == 4
    for wrong in (pieces[:3], pieces[1:], [pieces[1], pieces[0], *pieces[2:]], [*pieces, pieces[3]], pieces[:1] * 4):
        opener = Opener(io.BytesIO((head + b"".join(wrong))[17:]), b"p")
        with pytest.raises(SealError):
            opener.read(len(data) * 2)

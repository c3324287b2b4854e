"""Encode and parse the journal of a partial file: the pieces on the disk, each with its checksum. Pure.

A journal is a header followed by records of a fixed size, which are only appended. A power cut can lose data whose
record is on the disk. After a restart, a piece therefore counts only if its content has the checksum of the record.
Other processes read the journal while it grows. A torn record ends the journal.
"""

import struct
import zlib
from dataclasses import dataclass, field

_HEADER = struct.Struct("<8sQI")
_CHECK = struct.Struct("<I")
_RECORD = struct.Struct("<III")
_MAGIC = b"macpool1"
HEADER_BYTES = _HEADER.size + _CHECK.size
RECORD_BYTES = _RECORD.size


@dataclass(frozen=True, slots=True)
class PieceJournal:
    """Content of a journal: the sizes of a file and of its pieces, and the received pieces with their checksums."""

    size: int
    """Bytes of the complete file."""
    piece_bytes: int
    """Bytes of each piece except the last."""
    pieces: dict[int, int] = field(default_factory=dict[int, int])
    """CRC-32 of each received piece, by its number from 0."""

    def add_records(self, content: bytes) -> int:
        """Add the records in the next bytes of the journal, up to the first torn record.

        Return the number of bytes parsed. The caller passes the rest again, with the bytes that follow.
        """
        count = count_pieces(self.size, self.piece_bytes)
        at = 0
        while at + RECORD_BYTES <= len(content):
            piece, checksum, check = _RECORD.unpack_from(content, at)
            if check != _compute_record_check(piece, checksum) or piece >= count:
                break
            self.pieces[piece] = checksum
            at += RECORD_BYTES
        return at


def count_pieces(size: int, piece_bytes: int) -> int:
    """Return the number of pieces of a file with `size` bytes."""
    return -(-size // piece_bytes)


def compute_piece_checksum(data: bytes | bytearray | memoryview) -> int:
    """Return the CRC-32 of a piece, which detects lost writes. The digest of the file detects all other damage."""
    return zlib.crc32(data)


def encode_header(size: int, piece_bytes: int) -> bytes:
    """Encode the header of a journal for a file with `size` bytes."""
    head = _HEADER.pack(_MAGIC, size, piece_bytes)
    return head + _CHECK.pack(zlib.crc32(head))


def encode_record(piece: int, checksum: int) -> bytes:
    """Encode the record of a received piece: its number from 0, and the CRC-32 of its content."""
    return _RECORD.pack(piece, checksum, _compute_record_check(piece, checksum))


def parse_journal(content: bytes) -> PieceJournal | None:
    """Parse a journal up to the first torn record. Return None if the header is missing or damaged."""
    if len(content) < HEADER_BYTES:
        return None
    _, size, piece_bytes = _HEADER.unpack_from(content)
    if content[:HEADER_BYTES] != encode_header(size, piece_bytes) or piece_bytes == 0:
        return None
    journal = PieceJournal(size, piece_bytes)
    journal.add_records(content[HEADER_BYTES:])
    return journal


def _compute_record_check(piece: int, checksum: int) -> int:
    return zlib.crc32(struct.pack("<II", piece, checksum))

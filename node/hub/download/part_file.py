"""Store the pieces of a partly downloaded file on the disk, with a journal that survives interruptions.

A piece is written, then recorded in the journal. After an interruption, the checksum of every recorded piece is
compared with its content, and a piece that differs is fetched again. Only `finish` gives the file its final name, after
the caller has verified the digest of the content.
"""

import os
from contextlib import suppress

from host.private_files import sync_descriptor
from node.hub.cache_layout import RepositoryFolder
from node.hub.download.piece_journal import (
    compute_piece_checksum,
    count_pieces,
    encode_header,
    encode_record,
    parse_journal,
)
from wire.models.files import ModelFile

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_MODE = 0o644


class PartFile:
    """Partial file of a repository. The caller holds the lock of the repository.

    `open` must be called first. After that, several threads may write different pieces, and any thread may read.
    """

    def __init__(self, folder: RepositoryFolder, file: ModelFile, piece_bytes: int) -> None:
        self._folder = folder
        self._file = file
        self._piece_bytes = piece_bytes
        self._part = -1
        self._journal = -1
        self._checksums: dict[int, int] = {}

    @property
    def received_bytes(self) -> int:
        """Bytes of the pieces that are on the disk."""
        pieces = self.count_pieces()
        excess = pieces * self._piece_bytes - self._file.size if self.has_piece(pieces - 1) else 0
        return len(self._checksums) * self._piece_bytes - excess

    def has_piece(self, piece: int) -> bool:
        """Return whether the piece with this number (from 0) is on the disk."""
        return piece in self._checksums

    def get_extent(self, piece: int) -> tuple[int, int]:
        """Return the offsets in the file, in bytes, of the start of a piece and of the byte after its end."""
        start = piece * self._piece_bytes
        return start, min(self._file.size, start + self._piece_bytes)

    def open(self) -> None:
        """Open or create the file and its journal, and keep the pieces of an earlier download with correct checksums.

        No piece is kept if the earlier download had another piece size. Raise `OSError` if a file cannot be created,
        read or written.
        """
        self._part = os.open(self._folder.get_part(self._file.etag), _FLAGS, _MODE)
        self._checksums = self._read_valid_pieces()
        os.ftruncate(self._part, self._file.size)
        content = encode_header(self._file.size, self._piece_bytes)
        content += b"".join(encode_record(piece, checksum) for piece, checksum in sorted(self._checksums.items()))
        path = self._folder.get_journal(self._file.etag)
        new = path.with_name(f"{path.name}.macpool-new")
        new.unlink(missing_ok=True)
        new.write_bytes(content)
        new.replace(path)
        self._journal = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)

    def _read_valid_pieces(self) -> dict[int, int]:
        with suppress(OSError):
            journal = parse_journal(self._folder.get_journal(self._file.etag).read_bytes())
            if journal is not None and (journal.size, journal.piece_bytes) == (self._file.size, self._piece_bytes):
                return {
                    piece: checksum for piece, checksum in journal.pieces.items() if self._has_checksum(piece, checksum)
                }
        return {}

    def _has_checksum(self, piece: int, checksum: int) -> bool:
        start, end = self.get_extent(piece)
        content = os.pread(self._part, end - start, start)
        return len(content) == end - start and compute_piece_checksum(content) == checksum

    def write_piece(self, piece: int, content: bytes | bytearray) -> None:
        """Write the content of a piece, and record the piece in the journal. Raise `OSError` on failure.

        After a failure, the piece counts as missing.
        """
        view, at = memoryview(content), self.get_extent(piece)[0]
        while view:
            written = os.pwrite(self._part, view, at)
            view, at = view[written:], at + written
        checksum = compute_piece_checksum(content)
        os.write(self._journal, encode_record(piece, checksum))
        self._checksums[piece] = checksum

    def read_piece(self, piece: int) -> bytes:
        """Return the content of a received piece. Raise `OSError` on failure."""
        start, end = self.get_extent(piece)
        return os.pread(self._part, end - start, start)

    def count_pieces(self) -> int:
        """Return the number of pieces of the complete file."""
        return count_pieces(self._file.size, self._piece_bytes)

    def finish(self) -> None:
        """Rename the file to its blob. The content must be complete and verified. Raise `OSError` on failure."""
        sync_descriptor(self._part)
        self._folder.get_part(self._file.etag).replace(self._folder.get_blob(self._file.etag))
        self._folder.get_journal(self._file.etag).unlink(missing_ok=True)
        self.close()

    def discard(self) -> None:
        """Delete the file, because its content is wrong, and open a new one without pieces.

        Raise `OSError` on failure.
        """
        self.close()
        self._folder.get_part(self._file.etag).unlink(missing_ok=True)
        self._folder.get_journal(self._file.etag).unlink(missing_ok=True)
        self.open()

    def close(self) -> None:
        """Close the descriptors. The files stay."""
        for descriptor in (self._part, self._journal):
            if descriptor >= 0:
                os.close(descriptor)
        self._part = self._journal = -1

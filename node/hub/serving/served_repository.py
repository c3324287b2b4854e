"""Repository that this node serves to other nodes: a snapshot of the Hugging Face cache, or a download in progress.

A complete file is read from its blob. A file that another process still downloads is read from its partial file, as far
as the journal records its pieces. The node that gets the file verifies its content.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from node.hub.cache_layout import RepositoryFolder
from node.hub.download.piece_journal import HEADER_BYTES, PieceJournal, parse_journal
from wire.models.files import ModelFile, ModelManifest


class ServedFile(Protocol):
    """Open file of a repository. Its methods block, and are called by one thread at a time.

    They raise `OSError` if the file cannot be read.
    """

    def count_available(self, start: int) -> int:
        """Return the number of bytes that can be read from `start` without a gap; 0 if there are none yet."""
        ...

    def read(self, start: int, size: int) -> bytes:
        """Return at most `size` bytes from `start`. `count_available` must have reported them before."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class ServedRepository(Protocol):
    """Repository at one commit, as a server offers it."""

    @property
    def manifest(self) -> ModelManifest:
        """Commit of the repository, and path, size and hashes of each file."""
        ...

    def open(self, file: ModelFile) -> ServedFile:
        """Open a file of the manifest. Raise `OSError` if it cannot be opened."""
        ...

    def is_growing(self) -> bool:
        """Return whether files that are missing now are still being downloaded. Raise `OSError` if that is unknown."""
        ...


class OpenFile:
    """File on the disk whose download is complete. The constructor raises `OSError` if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._descriptor).st_size

    def count_available(self, start: int) -> int:
        """Return the number of bytes from `start` to the end of the file; 0 after the end."""
        return max(0, self._size - start)

    def read(self, start: int, size: int) -> bytes:
        """Return at most `size` bytes from `start`."""
        return os.pread(self._descriptor, size, start)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


class CacheRepository:
    """Repository with the files of `manifest` in the Hugging Face cache folder `hub`."""

    def __init__(self, hub: Path, manifest: ModelManifest) -> None:
        self._folder = RepositoryFolder(hub, manifest.repo)
        self._manifest = manifest

    @property
    def manifest(self) -> ModelManifest:
        """Commit of the repository, and path, size and hashes of each file."""
        return self._manifest

    def find(self, repo: str, revision: str) -> "CacheRepository | None":
        """Return this repository if `repo` is its name and `revision` its commit or `main`. Otherwise return None."""
        return self if repo == self._manifest.repo and revision in (self._manifest.commit, "main") else None

    def open(self, file: ModelFile) -> ServedFile:
        """Return a file of the manifest, even if it is still being downloaded.

        The first call of `count_available` opens the file.
        """
        return _GrowingFile(file, self._find_complete, self._folder)

    def is_growing(self) -> bool:
        """Return whether a download of the repository is in progress. Raise `OSError` if its lock cannot be opened."""
        return self._folder.is_locked()

    def _find_complete(self, file: ModelFile) -> Path | None:
        """Return the path of a complete file; None if it is missing or has another size."""
        paths = (self._folder.get_blob(file.etag), self._folder.get_snapshot(self._manifest.commit) / file.path)
        return next((path for path in paths if _has_size(path, file.size)), None)


class _GrowingFile:
    """File that is complete, or whose pieces another process writes. Each call reads new records of the journal."""

    def __init__(
        self, file: ModelFile, find_complete: Callable[[ModelFile], Path | None], folder: RepositoryFolder
    ) -> None:
        self._file = file
        self._find_complete = find_complete
        self._part = folder.get_part(file.etag)
        self._journal = folder.get_journal(file.etag)
        self._journal_inode = 0
        self._parsed_bytes = 0
        self._pieces: PieceJournal | None = None
        self._opened: OpenFile | None = None
        self._complete = False

    def count_available(self, start: int) -> int:
        """Return the bytes that can be read from `start` without a gap."""
        if not self._complete:
            self._refresh()
        if self._complete:
            return max(0, self._file.size - start)
        if self._pieces is None or self._opened is None:
            return 0
        piece = first = start // self._pieces.piece_bytes
        while piece in self._pieces.pieces:
            piece += 1
        return 0 if piece == first else min(self._file.size, piece * self._pieces.piece_bytes) - start

    def read(self, start: int, size: int) -> bytes:
        """Return at most `size` bytes from `start`."""
        return b"" if self._opened is None else self._opened.read(start, size)

    def close(self) -> None:
        """Close the descriptor."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _refresh(self) -> None:
        complete = self._find_complete(self._file)
        if complete is not None:
            self.close()
            self._opened, self._complete = OpenFile(complete), True
            return
        with suppress(FileNotFoundError), self._journal.open("rb") as journal:
            inode = os.fstat(journal.fileno()).st_ino
            if inode != self._journal_inode or self._opened is None:
                self.close()
                self._opened, self._journal_inode = OpenFile(self._part), inode
                self._pieces = parse_journal(journal.read(HEADER_BYTES))
                self._parsed_bytes = HEADER_BYTES
            if self._pieces is not None:
                journal.seek(self._parsed_bytes)
                self._parsed_bytes += self._pieces.add_records(journal.read())


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
